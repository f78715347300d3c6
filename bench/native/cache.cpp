// The cost of UcudnnHandle_t for a program: answers from the cache, and the dispatch of planned convolutions. The
// program is linked with the stand-in for cuDNN of tests/native, which returns at once. No GPU is needed or measured.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include <ucudnn.hpp>

extern "C" void stub_idle(int);

namespace {

template <typename Run>
double microseconds(Run run) {  // median of 21 means
  std::vector<double> samples;
  for (int sample = 0; sample < 21; ++sample) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 2000; ++i) run();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    samples.push_back(took.count() / 2000);
  }
  std::sort(samples.begin(), samples.end());
  return samples[samples.size() / 2];
}

}  // namespace

int main() {
  // A convolution of two groups with the strides of the whole blob, as in Caffe; small, because planning computes it.
  UcudnnHandle_t handle;
  if (cudnnCreate(&handle) != CUDNN_STATUS_SUCCESS) return 1;
  cudnnTensorDescriptor_t x, y;
  cudnnFilterDescriptor_t w;
  cudnnConvolutionDescriptor_t c;
  cudnnCreateTensorDescriptor(&x);
  cudnnCreateTensorDescriptor(&y);
  cudnnCreateFilterDescriptor(&w);
  cudnnCreateConvolutionDescriptor(&c);
  const int n = 8, side = 6;
  const int xs[] = {n, 2, side, side}, xt[] = {4 * side * side, side * side, side, 1};
  const int ys[] = {n, 3, side, side}, yt[] = {6 * side * side, side * side, side, 1};
  const int ws[] = {3, 2, 3, 3}, one[] = {1, 1};
  cudnnConvolutionFwdAlgo_t forward;
  cudnnConvolutionBwdDataAlgo_t data;
  cudnnConvolutionBwdFilterAlgo_t filter;
  std::size_t size = 0;
  const auto reshape = [&] {
    cudnnSetTensorNdDescriptor(x, CUDNN_DATA_FLOAT, 4, xs, xt);
    cudnnSetTensorNdDescriptor(y, CUDNN_DATA_FLOAT, 4, ys, yt);
    cudnnSetConvolutionNdDescriptor(c, 2, one, one, one, CUDNN_CROSS_CORRELATION, CUDNN_DATA_FLOAT);
    cudnnSetFilterNdDescriptor(w, CUDNN_DATA_FLOAT, CUDNN_TENSOR_NCHW, 4, ws);
  };
  reshape();
  const std::size_t limit = 600;  // workspace for two samples, which makes four micro-batches
  const auto algorithm = [&] {
    cudnnGetConvolutionForwardAlgorithm(handle, x, w, c, y, CUDNN_CONVOLUTION_FWD_SPECIFY_WORKSPACE_LIMIT, limit,
                                        &forward);
  };
  const auto workspace = [&] { cudnnGetConvolutionForwardWorkspaceSize(handle, x, w, c, y, forward, &size); };
  const auto all_six = [&] {
    algorithm();
    workspace();
    cudnnGetConvolutionBackwardFilterAlgorithm(handle, x, y, c, w,
        CUDNN_CONVOLUTION_BWD_FILTER_SPECIFY_WORKSPACE_LIMIT, limit, &filter);
    cudnnGetConvolutionBackwardFilterWorkspaceSize(handle, x, y, c, w, filter, &size);
    cudnnGetConvolutionBackwardDataAlgorithm(handle, w, y, c, x, CUDNN_CONVOLUTION_BWD_DATA_SPECIFY_WORKSPACE_LIMIT,
        limit, &data);
    cudnnGetConvolutionBackwardDataWorkspaceSize(handle, w, y, c, x, data, &size);
  };
  all_six();
  std::vector<float> xv(n * 4 * side * side), wv(6 * 2 * 9), yv(n * 6 * side * side);
  const float alpha = 1, beta = 0;
  const auto convolve = [&] {
    cudnnConvolutionForward(handle, &alpha, x, xv.data(), w, wv.data(), c, forward, nullptr, 0, &beta, y, yv.data());
  };
  convolve();  // the first call plans
  stub_idle(1);
  const double answer = microseconds(algorithm), bytes = microseconds(workspace), six = microseconds(all_six);
  const double call = microseconds(convolve);
  const double reshaped = microseconds([&] { reshape(); all_six(); });
  std::printf("{\"get_algorithm_us\": %.4f, \"get_workspace_size_us\": %.4f, \"all_six_us\": %.4f, "
              "\"reshape_and_all_six_us\": %.4f, \"convolve_of_4_micro_batches_us\": %.4f}\n",
              answer, bytes, six, reshaped, call);
  cudnnDestroy(handle);
  return answer < 1 && bytes < 1 ? 0 : 2;
}
