// Several threads, each with its own handle, plan and compute the same convolutions at the same time.
#include <cstdio>
#include <thread>
#include <vector>

#include <ucudnn.hpp>

namespace {

bool computes(int seed) {
  UcudnnHandle_t handle;
  if (cudnnCreate(&handle)) return false;
  cudnnTensorDescriptor_t t;
  cudnnFilterDescriptor_t f;
  cudnnConvolutionDescriptor_t c;
  cudnnCreateTensorDescriptor(&t);
  cudnnCreateFilterDescriptor(&f);
  cudnnCreateConvolutionDescriptor(&c);
  const int size[] = {8, 1, 4, 4}, stride[] = {16, 16, 4, 1}, filter[] = {1, 1, 1, 1}, zero[] = {0, 0}, one[] = {1, 1};
  cudnnSetTensorNdDescriptor(t, CUDNN_DATA_FLOAT, 4, size, stride);
  cudnnSetFilterNdDescriptor(f, CUDNN_DATA_FLOAT, CUDNN_TENSOR_NCHW, 4, filter);
  cudnnSetConvolutionNdDescriptor(c, 2, zero, one, one, CUDNN_CROSS_CORRELATION, CUDNN_DATA_FLOAT);
  std::vector<float> x(128), y(128);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = float(seed) + float(i);
  const float two = 2, alpha = 1, beta = 0;
  bool right = true;
  for (int round = 0; round < 50; ++round) {
    cudnnConvolutionFwdAlgo_t algorithm;
    right &= !cudnnGetConvolutionForwardAlgorithm(handle, t, f, c, t,
        CUDNN_CONVOLUTION_FWD_SPECIFY_WORKSPACE_LIMIT, 300, &algorithm);
    right &= !cudnnConvolutionForward(handle, &alpha, t, x.data(), f, &two, c, algorithm, nullptr, 0, &beta, t,
        y.data());
    for (std::size_t i = 0; i < x.size(); ++i) right &= y[i] == 2 * x[i];
  }
  return cudnnDestroy(handle) == CUDNN_STATUS_SUCCESS && right;
}

}  // namespace

int main() {
  constexpr int count = 4;
  bool right[count] = {};
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&right, i] { right[i] = computes(i); });
  for (std::thread& thread : threads) thread.join();
  for (bool each : right) {
    if (!each) return 1;
  }
  std::puts("computed");
}
