// What Caffe's convolution layer calls beyond the project's stand-in for cuDNN (tests/native/stub_cudnn.cpp): the rest of
// the CUDA runtime that it uses, on host memory, and the functions of cuDNN for biases. Nothing else of Caffe's GPU side
// is there; a test that calls it ends at once.
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <cudnn.h>
#include <curand.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

struct Tensor {
  cudnnDataType_t type;
  int dims, size[CUDNN_DIM_MAX], stride[CUDNN_DIM_MAX];

  explicit Tensor(cudnnTensorDescriptor_t descriptor) {
    cudnnGetTensorNdDescriptor(descriptor, CUDNN_DIM_MAX, &type, &dims, size, stride);
    if (dims != 4) std::abort();
  }
  std::int64_t at(int n, int c, int h, int w) const {
    return std::int64_t(n) * stride[0] + std::int64_t(c) * stride[1] + std::int64_t(h) * stride[2] +
           std::int64_t(w) * stride[3];
  }
  template <typename Visit>
  void visit(Visit visit) const {
    for (int n = 0; n < size[0]; ++n)
      for (int c = 0; c < size[1]; ++c)
        for (int h = 0; h < size[2]; ++h)
          for (int w = 0; w < size[3]; ++w) visit(n, c, h, w);
  }
};

// y = alpha * bias + beta * y, the bias once for each channel.
template <typename T>
void add(const Tensor& bias, const Tensor& y, T alpha, const T* from, T beta, T* to) {
  y.visit([&](int n, int c, int h, int w) {
    T& value = to[y.at(n, c, h, w)];
    value = alpha * from[bias.at(0, bias.size[1] == 1 ? 0 : c, 0, 0)] + (beta == 0 ? 0 : beta * value);
  });
}

// bias = alpha * (sum of y over all but channels) + beta * bias.
template <typename T>
void sum(const Tensor& y, const Tensor& bias, T alpha, const T* from, T beta, T* to) {
  for (int c = 0; c < y.size[1]; ++c) {
    double total = 0;
    y.visit([&](int n, int channel, int h, int w) {
      if (channel == c) total += from[y.at(n, c, h, w)];
    });
    T& value = to[bias.at(0, c, 0, 0)];
    value = static_cast<T>(alpha * total + (beta == 0 ? 0 : beta * value));
  }
}

template <typename T>
T number(const void* value) { return *static_cast<const T*>(value); }

std::uintptr_t streams = 0;

}  // namespace

extern "C" {

const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "an error"; }
cudaError_t cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof *properties);
  std::strcpy(properties->name, "host memory");
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* target, const void* source, size_t size, cudaMemcpyKind) {
  std::memmove(target, source, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size, cudaMemcpyKind, cudaStream_t) {
  std::memmove(target, source, size);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* target, int value, size_t size) { std::memset(target, value, size); return cudaSuccess; }
cudaError_t cudaMallocHost(void** memory, size_t size) { *memory = std::malloc(size); return cudaSuccess; }
cudaError_t cudaFreeHost(void* memory) { std::free(memory); return cudaSuccess; }
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = reinterpret_cast<cudaStream_t>(0x1000 + 16 * ++streams);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

cublasStatus_t cublasCreate(cublasHandle_t* handle) { *handle = reinterpret_cast<cublasHandle_t>(1); return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasDestroy(cublasHandle_t) { return CUBLAS_STATUS_SUCCESS; }
curandStatus_t curandCreateGenerator(curandGenerator_t* generator, curandRngType_t) {
  *generator = reinterpret_cast<curandGenerator_t>(1);
  return CURAND_STATUS_SUCCESS;
}
curandStatus_t curandDestroyGenerator(curandGenerator_t) { return CURAND_STATUS_SUCCESS; }
curandStatus_t curandSetPseudoRandomGeneratorSeed(curandGenerator_t, unsigned long long) { return CURAND_STATUS_SUCCESS; }
curandStatus_t curandSetGeneratorOffset(curandGenerator_t, unsigned long long) { return CURAND_STATUS_SUCCESS; }

cudnnStatus_t cudnnSetTensor4dDescriptorEx(cudnnTensorDescriptor_t descriptor, cudnnDataType_t type, int n, int c,
                                           int h, int w, int n_stride, int c_stride, int h_stride, int w_stride) {
  const int size[] = {n, c, h, w}, stride[] = {n_stride, c_stride, h_stride, w_stride};
  return cudnnSetTensorNdDescriptor(descriptor, type, 4, size, stride);
}
cudnnStatus_t cudnnSetFilter4dDescriptor(cudnnFilterDescriptor_t descriptor, cudnnDataType_t type,
                                         cudnnTensorFormat_t format, int k, int c, int h, int w) {
  const int size[] = {k, c, h, w};
  return cudnnSetFilterNdDescriptor(descriptor, type, format, 4, size);
}
cudnnStatus_t cudnnSetConvolution2dDescriptor(cudnnConvolutionDescriptor_t descriptor, int pad_h, int pad_w, int u,
                                              int v, int dilation_h, int dilation_w, cudnnConvolutionMode_t mode,
                                              cudnnDataType_t compute) {
  const int padding[] = {pad_h, pad_w}, stride[] = {u, v}, dilation[] = {dilation_h, dilation_w};
  return cudnnSetConvolutionNdDescriptor(descriptor, 2, padding, stride, dilation, mode, compute);
}
cudnnStatus_t cudnnAddTensor(cudnnHandle_t, const void* alpha, const cudnnTensorDescriptor_t a, const void* from,
                             const void* beta, const cudnnTensorDescriptor_t c, void* to) {
  const Tensor bias(a), y(c);
  if (y.type == CUDNN_DATA_DOUBLE) {
    add(bias, y, number<double>(alpha), static_cast<const double*>(from), number<double>(beta), static_cast<double*>(to));
  } else {
    add(bias, y, number<float>(alpha), static_cast<const float*>(from), number<float>(beta), static_cast<float*>(to));
  }
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnConvolutionBackwardBias(cudnnHandle_t, const void* alpha, const cudnnTensorDescriptor_t dy,
                                           const void* from, const void* beta, const cudnnTensorDescriptor_t db,
                                           void* to) {
  const Tensor y(dy), bias(db);
  if (y.type == CUDNN_DATA_DOUBLE) {
    sum(y, bias, number<double>(alpha), static_cast<const double*>(from), number<double>(beta), static_cast<double*>(to));
  } else {
    sum(y, bias, number<float>(alpha), static_cast<const float*>(from), number<float>(beta), static_cast<float*>(to));
  }
  return CUDNN_STATUS_SUCCESS;
}

}  // extern "C"

namespace caffe {

void caffe_gpu_memcpy(const size_t size, const void* source, void* target) {
  if (source != target) std::memmove(target, source, size);
}

}  // namespace caffe
