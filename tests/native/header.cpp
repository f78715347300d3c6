// Calls each kind of function of the header, to compile with strict flags.
#include <ucudnn.hpp>
cudnnStatus_t run(UcudnnHandle_t &handle, cudaStream_t stream) {
  UcudnnHandle_t none = nullptr, copy = handle, *many = new UcudnnHandle_t[3];
  delete[] many;
  cudnnHandle_t plain = copy;
  cudnnConvolutionFwdAlgo_t forward = {};
  cudnnConvolutionBwdDataAlgo_t data = {};
  cudnnConvolutionBwdFilterAlgo_t filter = {};
  cudnnConvolutionFwdAlgoPerf_t perf;
  cudnnTensorDescriptor_t t = nullptr;
  cudnnFilterDescriptor_t f = nullptr;
  cudnnConvolutionDescriptor_t c = nullptr;
  size_t size;
  int count;
  if (none == nullptr && !plain) cudnnCreate(&handle);
  cudnnSetStream(handle, stream);
  cudnnGetStream(handle, &stream);
  cudnnAddTensor(handle, nullptr, t, nullptr, nullptr, t, nullptr);
  cudnnGetConvolutionForwardAlgorithm(handle, t, f, c, t, CUDNN_CONVOLUTION_FWD_PREFER_FASTEST, 0, &forward);
  cudnnGetConvolutionBackwardDataAlgorithm(handle, f, t, c, t, CUDNN_CONVOLUTION_BWD_DATA_NO_WORKSPACE, 0, &data);
  cudnnGetConvolutionBackwardFilterAlgorithm(handle, t, t, c, f,
      CUDNN_CONVOLUTION_BWD_FILTER_SPECIFY_WORKSPACE_LIMIT, 8, &filter);
  cudnnGetConvolutionForwardAlgorithm_v7(handle, t, f, c, t, 1, &count, &perf);
  cudnnFindConvolutionForwardAlgorithm(handle, t, f, c, t, 1, &count, &perf);
  cudnnFindConvolutionForwardAlgorithmEx(handle, t, nullptr, f, nullptr, c, t, nullptr, 1, &count, &perf, nullptr, 0);
  cudnnGetConvolutionBackwardDataWorkspaceSize(handle, f, t, c, t, data, &size);
  cudnnConvolutionBackwardFilter(handle, &size, t, nullptr, t, nullptr, c, filter, nullptr, 0, &size, f, nullptr);
  return cudnnDestroy(handle);
}
