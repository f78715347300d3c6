// The time in which cuDNN itself reads four descriptors: the larger part of an answer from UcudnnHandle_t's cache.
// The program is linked with the real libcudnn; descriptors need no GPU.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "question.hpp"

int main() {
  cudnnTensorDescriptor_t x, y;
  cudnnFilterDescriptor_t w;
  cudnnConvolutionDescriptor_t c;
  if (cudnnCreateTensorDescriptor(&x) || cudnnCreateTensorDescriptor(&y) || cudnnCreateFilterDescriptor(&w) ||
      cudnnCreateConvolutionDescriptor(&c)) {
    return 1;
  }
  // AlexNet's conv2: two groups, hence the strides of the whole blob.
  cudnnSetTensor4dDescriptorEx(x, CUDNN_DATA_FLOAT, 256, 48, 27, 27, 96 * 27 * 27, 27 * 27, 27, 1);
  cudnnSetTensor4dDescriptorEx(y, CUDNN_DATA_FLOAT, 256, 128, 27, 27, 256 * 27 * 27, 27 * 27, 27, 1);
  cudnnSetFilter4dDescriptor(w, CUDNN_DATA_FLOAT, CUDNN_TENSOR_NCHW, 128, 48, 5, 5);
  cudnnSetConvolution2dDescriptor(c, 2, 2, 1, 1, 1, 1, CUDNN_CROSS_CORRELATION, CUDNN_DATA_FLOAT);
  const ucudnn_descriptors descriptors = {x, w, c, y};
  ucudnn::Question question;
  if (!ucudnn::read_question(UCUDNN_FORWARD, descriptors, &question) || question.x_stride[0] != 96 * 27 * 27 ||
      question.padding[1] != 2 || question.w_size[1] != 48 || question.groups != 1 || question.dims != 4) {
    return 2;
  }
  std::vector<double> samples;
  std::size_t sum = 0;
  for (int sample = 0; sample < 21; ++sample) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 2000; ++i) {
      ucudnn::read_question(UCUDNN_FORWARD, descriptors, &question);
      sum += ucudnn::QuestionHash()(question);
    }
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    samples.push_back(took.count() / 2000);
  }
  std::sort(samples.begin(), samples.end());
  std::printf("{\"cudnn\": %zu, \"read_and_hash_us\": %.4f}\n", cudnnGetVersion(), samples[samples.size() / 2]);
  return sum == 0;
}
