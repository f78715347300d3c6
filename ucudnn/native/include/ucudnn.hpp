// UcudnnHandle_t replaces cudnnHandle_t: it computes convolutions in micro-batches, and cuDNN does everything else.
//
//     #include <ucudnn.hpp>    // instead of, or after, cudnn.h
//     UcudnnHandle_t handle;   // was: cudnnHandle_t handle;
//
// The functions that choose algorithms answer 'algorithm 0, no workspace', because the handle chooses algorithms and
// owns their workspace. A limit that the caller states (the preference SPECIFY_WORKSPACE_LIMIT, or the workspace of a
// cudnnFind...Ex) holds unless UCUDNN_DEFAULT_WORKSPACE_LIMIT is set. A limit of 0 always holds. This type has the
// functions that cuDNN 8 removed.
//
// `python -m ucudnn.native --cflags` and `--libs` print the flags for a build.
#ifndef UCUDNN_HPP_
#define UCUDNN_HPP_

#include <cstddef>
#include <cstdint>

#include "ucudnn_c.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // as in ucudnn_c.h

class UcudnnHandle_t {
 public:
  UcudnnHandle_t() noexcept = default;
  UcudnnHandle_t(std::nullptr_t) noexcept {}
  operator cudnnHandle_t() const noexcept { return ucudnn_cudnn_handle(state_); }
  ucudnn_handle_t state() const noexcept { return state_; }

 private:
  friend cudnnStatus_t cudnnCreate(UcudnnHandle_t *handle);
  ucudnn_handle_t state_ = nullptr;  // a pointer like cudnnHandle_t, so copies refer to the same handle
};

inline cudnnStatus_t cudnnCreate(UcudnnHandle_t *handle) {
  return handle ? ucudnn_create(&handle->state_) : CUDNN_STATUS_BAD_PARAM;
}

inline cudnnStatus_t cudnnDestroy(const UcudnnHandle_t &handle) { return ucudnn_destroy(handle.state()); }

inline cudnnStatus_t cudnnSetStream(const UcudnnHandle_t &handle, cudaStream_t stream) {
  return ucudnn_set_stream(handle.state(), stream);
}

inline cudnnStatus_t cudnnGetStream(const UcudnnHandle_t &handle, cudaStream_t *stream) {
  return cudnnGetStream(static_cast<cudnnHandle_t>(handle), stream);
}

// The types that cuDNN 8 removed.
typedef enum {
  CUDNN_CONVOLUTION_FWD_NO_WORKSPACE = 0,
  CUDNN_CONVOLUTION_FWD_PREFER_FASTEST = 1,
  CUDNN_CONVOLUTION_FWD_SPECIFY_WORKSPACE_LIMIT = 2,
} cudnnConvolutionFwdPreference_t;

typedef enum {
  CUDNN_CONVOLUTION_BWD_DATA_NO_WORKSPACE = 0,
  CUDNN_CONVOLUTION_BWD_DATA_PREFER_FASTEST = 1,
  CUDNN_CONVOLUTION_BWD_DATA_SPECIFY_WORKSPACE_LIMIT = 2,
} cudnnConvolutionBwdDataPreference_t;

typedef enum {
  CUDNN_CONVOLUTION_BWD_FILTER_NO_WORKSPACE = 0,
  CUDNN_CONVOLUTION_BWD_FILTER_PREFER_FASTEST = 1,
  CUDNN_CONVOLUTION_BWD_FILTER_SPECIFY_WORKSPACE_LIMIT = 2,
} cudnnConvolutionBwdFilterPreference_t;

namespace ucudnn {

// Answer with virtual algorithms: 0 does not promise determinism, 1 repeats its results bit for bit.
template <typename Perf, typename Algorithm>
cudnnStatus_t virtual_algorithms(cudnnConvolutionDescriptor_t convolution, Algorithm, int requested, int *returned,
                                 Perf *results) {
  if (requested < 1 || !returned || !results) return CUDNN_STATUS_BAD_PARAM;
  cudnnMathType_t math = CUDNN_DEFAULT_MATH;
  const cudnnStatus_t status = cudnnGetConvolutionMathType(convolution, &math);
  if (status != CUDNN_STATUS_SUCCESS) return status;
  *returned = requested < 2 ? requested : 2;
  for (int i = 0; i < *returned; ++i) {
    results[i] = Perf();
    results[i].algo = static_cast<Algorithm>(i);
    results[i].status = CUDNN_STATUS_SUCCESS;
    results[i].time = -1;  // not measured; cuDNN's own ..._v7 also answers -1
    results[i].memory = 0;
    results[i].determinism = i ? CUDNN_DETERMINISTIC : CUDNN_NON_DETERMINISTIC;
    results[i].mathType = math;
  }
  return CUDNN_STATUS_SUCCESS;
}

// Bytes as a limit; there is no limit if they exceed an int64.
inline std::int64_t limit_of(std::size_t bytes) {
  return bytes > static_cast<std::size_t>(INT64_MAX) ? UCUDNN_NO_LIMIT : static_cast<std::int64_t>(bytes);
}

// The limit that a preference states: 0, 1 and 2 are NO_WORKSPACE, PREFER_FASTEST and SPECIFY_WORKSPACE_LIMIT.
inline std::int64_t stated_limit(int preference, std::size_t limit) {
  return preference == 0 ? 0 : preference == 1 ? UCUDNN_NO_LIMIT : limit_of(limit);
}

// Plain cuDNN's first algorithm within a limit.
template <typename Perf, typename Algorithm>
cudnnStatus_t first_within(const Perf *results, int count, std::int64_t limit, Algorithm *algorithm) {
  for (int i = 0; i < count; ++i) {
    const bool fits = limit == UCUDNN_NO_LIMIT || results[i].memory <= static_cast<std::size_t>(limit);
    if (results[i].status == CUDNN_STATUS_SUCCESS && fits) {
      *algorithm = results[i].algo;
      return CUDNN_STATUS_SUCCESS;
    }
  }
  return CUDNN_STATUS_NOT_SUPPORTED;
}

}  // namespace ucudnn

// Forward

inline cudnnStatus_t cudnnGetConvolutionForwardAlgorithm_v7(const UcudnnHandle_t &handle, cudnnTensorDescriptor_t x,
                                                            cudnnFilterDescriptor_t w,
                                                            cudnnConvolutionDescriptor_t convolution,
                                                            cudnnTensorDescriptor_t y, int requested, int *returned,
                                                            cudnnConvolutionFwdAlgoPerf_t *results) {
  const ucudnn_descriptors descriptors = {x, w, convolution, y};
  if (ucudnn_register(handle.state(), UCUDNN_FORWARD, &descriptors, UCUDNN_NO_LIMIT)) {
    return ucudnn::virtual_algorithms(convolution, cudnnConvolutionFwdAlgo_t(), requested, returned, results);
  }
  return cudnnGetConvolutionForwardAlgorithm_v7(static_cast<cudnnHandle_t>(handle), x, w, convolution, y, requested,
      returned, results);
}

inline cudnnStatus_t cudnnFindConvolutionForwardAlgorithm(const UcudnnHandle_t &handle, cudnnTensorDescriptor_t x,
                                                          cudnnFilterDescriptor_t w,
                                                          cudnnConvolutionDescriptor_t convolution,
                                                          cudnnTensorDescriptor_t y, int requested, int *returned,
                                                          cudnnConvolutionFwdAlgoPerf_t *results) {
  const ucudnn_descriptors descriptors = {x, w, convolution, y};
  if (ucudnn_register(handle.state(), UCUDNN_FORWARD, &descriptors, UCUDNN_NO_LIMIT)) {
    return ucudnn::virtual_algorithms(convolution, cudnnConvolutionFwdAlgo_t(), requested, returned, results);
  }
  return cudnnFindConvolutionForwardAlgorithm(static_cast<cudnnHandle_t>(handle), x, w, convolution, y, requested,
      returned, results);
}

inline cudnnStatus_t cudnnFindConvolutionForwardAlgorithmEx(const UcudnnHandle_t &handle, cudnnTensorDescriptor_t x,
                                                            const void *x_data, cudnnFilterDescriptor_t w,
                                                            const void *w_data,
                                                            cudnnConvolutionDescriptor_t convolution,
                                                            cudnnTensorDescriptor_t y, void *y_data, int requested,
                                                            int *returned, cudnnConvolutionFwdAlgoPerf_t *results,
                                                            void *workspace, size_t workspace_bytes) {
  const ucudnn_descriptors descriptors = {x, w, convolution, y};
  if (ucudnn_register(handle.state(), UCUDNN_FORWARD, &descriptors, ucudnn::limit_of(workspace_bytes))) {
    return ucudnn::virtual_algorithms(convolution, cudnnConvolutionFwdAlgo_t(), requested, returned, results);
  }
  return cudnnFindConvolutionForwardAlgorithmEx(static_cast<cudnnHandle_t>(handle), x, x_data, w, w_data, convolution,
      y, y_data, requested, returned, results, workspace, workspace_bytes);
}

inline cudnnStatus_t cudnnGetConvolutionForwardAlgorithm(const UcudnnHandle_t &handle, cudnnTensorDescriptor_t x,
                                                         cudnnFilterDescriptor_t w,
                                                         cudnnConvolutionDescriptor_t convolution,
                                                         cudnnTensorDescriptor_t y,
                                                         cudnnConvolutionFwdPreference_t preference, size_t limit,
                                                         cudnnConvolutionFwdAlgo_t *algorithm) {
  if (!algorithm) return CUDNN_STATUS_BAD_PARAM;
  const ucudnn_descriptors descriptors = {x, w, convolution, y};
  const std::int64_t stated = ucudnn::stated_limit(preference, limit);
  if (ucudnn_register(handle.state(), UCUDNN_FORWARD, &descriptors, stated)) {
    *algorithm = cudnnConvolutionFwdAlgo_t();
    return CUDNN_STATUS_SUCCESS;
  }
  cudnnConvolutionFwdAlgoPerf_t results[CUDNN_CONVOLUTION_FWD_ALGO_COUNT];
  int count = 0;
  const cudnnStatus_t status = cudnnGetConvolutionForwardAlgorithm_v7(static_cast<cudnnHandle_t>(handle), x, w,
      convolution, y, CUDNN_CONVOLUTION_FWD_ALGO_COUNT, &count, results);
  if (status != CUDNN_STATUS_SUCCESS) return status;
  return ucudnn::first_within(results, count, ucudnn_plain_limit(stated), algorithm);
}

inline cudnnStatus_t cudnnGetConvolutionForwardWorkspaceSize(const UcudnnHandle_t &handle, cudnnTensorDescriptor_t x,
    cudnnFilterDescriptor_t w, cudnnConvolutionDescriptor_t convolution, cudnnTensorDescriptor_t y,
    cudnnConvolutionFwdAlgo_t algorithm, size_t *size) {
  if (!size) return CUDNN_STATUS_BAD_PARAM;
  const ucudnn_descriptors descriptors = {x, w, convolution, y};
  if (ucudnn_divides(handle.state(), UCUDNN_FORWARD, &descriptors)) {
    *size = 0;
    return CUDNN_STATUS_SUCCESS;
  }
  return cudnnGetConvolutionForwardWorkspaceSize(static_cast<cudnnHandle_t>(handle), x, w, convolution, y, algorithm,
      size);
}

inline cudnnStatus_t cudnnConvolutionForward(const UcudnnHandle_t &handle, const void *alpha,
                                             cudnnTensorDescriptor_t x, const void *x_data, cudnnFilterDescriptor_t w,
                                             const void *w_data, cudnnConvolutionDescriptor_t convolution,
                                             cudnnConvolutionFwdAlgo_t algorithm, void *workspace,
                                             size_t workspace_bytes, const void *beta, cudnnTensorDescriptor_t y,
                                             void *y_data) {
  const ucudnn_descriptors descriptors = {x, w, convolution, y};
  const ucudnn_plain plain = {static_cast<int>(algorithm), workspace, workspace_bytes};
  return ucudnn_convolve(handle.state(), UCUDNN_FORWARD, &descriptors, alpha, const_cast<void *>(x_data),
      const_cast<void *>(w_data), y_data, beta, &plain);
}

// BackwardData

inline cudnnStatus_t cudnnGetConvolutionBackwardDataAlgorithm_v7(const UcudnnHandle_t &handle,
    cudnnFilterDescriptor_t w, cudnnTensorDescriptor_t y, cudnnConvolutionDescriptor_t convolution,
    cudnnTensorDescriptor_t x, int requested, int *returned, cudnnConvolutionBwdDataAlgoPerf_t *results) {
  const ucudnn_descriptors descriptors = {x, w, convolution, y};
  if (ucudnn_register(handle.state(), UCUDNN_BACKWARD_DATA, &descriptors, UCUDNN_NO_LIMIT)) {
    return ucudnn::virtual_algorithms(convolution, cudnnConvolutionBwdDataAlgo_t(), requested, returned, results);
  }
  return cudnnGetConvolutionBackwardDataAlgorithm_v7(static_cast<cudnnHandle_t>(handle), w, y, convolution, x,
      requested, returned, results);
}

inline cudnnStatus_t cudnnFindConvolutionBackwardDataAlgorithm(const UcudnnHandle_t &handle,
    cudnnFilterDescriptor_t w, cudnnTensorDescriptor_t y, cudnnConvolutionDescriptor_t convolution,
    cudnnTensorDescriptor_t x, int requested, int *returned, cudnnConvolutionBwdDataAlgoPerf_t *results) {
  const ucudnn_descriptors descriptors = {x, w, convolution, y};
  if (ucudnn_register(handle.state(), UCUDNN_BACKWARD_DATA, &descriptors, UCUDNN_NO_LIMIT)) {
    return ucudnn::virtual_algorithms(convolution, cudnnConvolutionBwdDataAlgo_t(), requested, returned, results);
  }
  return cudnnFindConvolutionBackwardDataAlgorithm(static_cast<cudnnHandle_t>(handle), w, y, convolution, x,
      requested, returned, results);
}

inline cudnnStatus_t cudnnFindConvolutionBackwardDataAlgorithmEx(const UcudnnHandle_t &handle,
    cudnnFilterDescriptor_t w, const void *w_data, cudnnTensorDescriptor_t y, const void *y_data,
    cudnnConvolutionDescriptor_t convolution, cudnnTensorDescriptor_t x, void *x_data, int requested, int *returned,
    cudnnConvolutionBwdDataAlgoPerf_t *results, void *workspace, size_t workspace_bytes) {
  const ucudnn_descriptors descriptors = {x, w, convolution, y};
  if (ucudnn_register(handle.state(), UCUDNN_BACKWARD_DATA, &descriptors,
      ucudnn::limit_of(workspace_bytes))) {
    return ucudnn::virtual_algorithms(convolution, cudnnConvolutionBwdDataAlgo_t(), requested, returned, results);
  }
  return cudnnFindConvolutionBackwardDataAlgorithmEx(static_cast<cudnnHandle_t>(handle), w, w_data, y, y_data,
      convolution, x, x_data, requested, returned, results, workspace, workspace_bytes);
}

inline cudnnStatus_t cudnnGetConvolutionBackwardDataAlgorithm(const UcudnnHandle_t &handle, cudnnFilterDescriptor_t w,
    cudnnTensorDescriptor_t y, cudnnConvolutionDescriptor_t convolution, cudnnTensorDescriptor_t x,
    cudnnConvolutionBwdDataPreference_t preference, size_t limit, cudnnConvolutionBwdDataAlgo_t *algorithm) {
  if (!algorithm) return CUDNN_STATUS_BAD_PARAM;
  const ucudnn_descriptors descriptors = {x, w, convolution, y};
  const std::int64_t stated = ucudnn::stated_limit(preference, limit);
  if (ucudnn_register(handle.state(), UCUDNN_BACKWARD_DATA, &descriptors, stated)) {
    *algorithm = cudnnConvolutionBwdDataAlgo_t();
    return CUDNN_STATUS_SUCCESS;
  }
  cudnnConvolutionBwdDataAlgoPerf_t results[CUDNN_CONVOLUTION_BWD_DATA_ALGO_COUNT];
  int count = 0;
  const cudnnStatus_t status = cudnnGetConvolutionBackwardDataAlgorithm_v7(static_cast<cudnnHandle_t>(handle), w, y,
      convolution, x, CUDNN_CONVOLUTION_BWD_DATA_ALGO_COUNT, &count, results);
  if (status != CUDNN_STATUS_SUCCESS) return status;
  return ucudnn::first_within(results, count, ucudnn_plain_limit(stated), algorithm);
}

inline cudnnStatus_t cudnnGetConvolutionBackwardDataWorkspaceSize(const UcudnnHandle_t &handle,
    cudnnFilterDescriptor_t w, cudnnTensorDescriptor_t y, cudnnConvolutionDescriptor_t convolution,
    cudnnTensorDescriptor_t x, cudnnConvolutionBwdDataAlgo_t algorithm, size_t *size) {
  if (!size) return CUDNN_STATUS_BAD_PARAM;
  const ucudnn_descriptors descriptors = {x, w, convolution, y};
  if (ucudnn_divides(handle.state(), UCUDNN_BACKWARD_DATA, &descriptors)) {
    *size = 0;
    return CUDNN_STATUS_SUCCESS;
  }
  return cudnnGetConvolutionBackwardDataWorkspaceSize(static_cast<cudnnHandle_t>(handle), w, y, convolution, x,
      algorithm, size);
}

inline cudnnStatus_t cudnnConvolutionBackwardData(const UcudnnHandle_t &handle, const void *alpha,
                                                  cudnnFilterDescriptor_t w, const void *w_data,
                                                  cudnnTensorDescriptor_t y, const void *y_data,
                                                  cudnnConvolutionDescriptor_t convolution,
                                                  cudnnConvolutionBwdDataAlgo_t algorithm, void *workspace,
                                                  size_t workspace_bytes, const void *beta, cudnnTensorDescriptor_t x,
                                                  void *x_data) {
  const ucudnn_descriptors descriptors = {x, w, convolution, y};
  const ucudnn_plain plain = {static_cast<int>(algorithm), workspace, workspace_bytes};
  return ucudnn_convolve(handle.state(), UCUDNN_BACKWARD_DATA, &descriptors, alpha, x_data,
      const_cast<void *>(w_data), const_cast<void *>(y_data), beta, &plain);
}

// BackwardFilter

inline cudnnStatus_t cudnnGetConvolutionBackwardFilterAlgorithm_v7(const UcudnnHandle_t &handle,
    cudnnTensorDescriptor_t x, cudnnTensorDescriptor_t y, cudnnConvolutionDescriptor_t convolution,
    cudnnFilterDescriptor_t w, int requested, int *returned, cudnnConvolutionBwdFilterAlgoPerf_t *results) {
  const ucudnn_descriptors descriptors = {x, w, convolution, y};
  if (ucudnn_register(handle.state(), UCUDNN_BACKWARD_FILTER, &descriptors, UCUDNN_NO_LIMIT)) {
    return ucudnn::virtual_algorithms(convolution, cudnnConvolutionBwdFilterAlgo_t(), requested, returned, results);
  }
  return cudnnGetConvolutionBackwardFilterAlgorithm_v7(static_cast<cudnnHandle_t>(handle), x, y, convolution, w,
      requested, returned, results);
}

inline cudnnStatus_t cudnnFindConvolutionBackwardFilterAlgorithm(const UcudnnHandle_t &handle,
    cudnnTensorDescriptor_t x, cudnnTensorDescriptor_t y, cudnnConvolutionDescriptor_t convolution,
    cudnnFilterDescriptor_t w, int requested, int *returned, cudnnConvolutionBwdFilterAlgoPerf_t *results) {
  const ucudnn_descriptors descriptors = {x, w, convolution, y};
  if (ucudnn_register(handle.state(), UCUDNN_BACKWARD_FILTER, &descriptors, UCUDNN_NO_LIMIT)) {
    return ucudnn::virtual_algorithms(convolution, cudnnConvolutionBwdFilterAlgo_t(), requested, returned, results);
  }
  return cudnnFindConvolutionBackwardFilterAlgorithm(static_cast<cudnnHandle_t>(handle), x, y, convolution, w,
      requested, returned, results);
}

inline cudnnStatus_t cudnnFindConvolutionBackwardFilterAlgorithmEx(const UcudnnHandle_t &handle,
    cudnnTensorDescriptor_t x, const void *x_data, cudnnTensorDescriptor_t y, const void *y_data,
    cudnnConvolutionDescriptor_t convolution, cudnnFilterDescriptor_t w, void *w_data, int requested, int *returned,
    cudnnConvolutionBwdFilterAlgoPerf_t *results, void *workspace, size_t workspace_bytes) {
  const ucudnn_descriptors descriptors = {x, w, convolution, y};
  if (ucudnn_register(handle.state(), UCUDNN_BACKWARD_FILTER, &descriptors,
      ucudnn::limit_of(workspace_bytes))) {
    return ucudnn::virtual_algorithms(convolution, cudnnConvolutionBwdFilterAlgo_t(), requested, returned, results);
  }
  return cudnnFindConvolutionBackwardFilterAlgorithmEx(static_cast<cudnnHandle_t>(handle), x, x_data, y, y_data,
      convolution, w, w_data, requested, returned, results, workspace, workspace_bytes);
}

inline cudnnStatus_t cudnnGetConvolutionBackwardFilterAlgorithm(const UcudnnHandle_t &handle,
    cudnnTensorDescriptor_t x, cudnnTensorDescriptor_t y, cudnnConvolutionDescriptor_t convolution,
    cudnnFilterDescriptor_t w, cudnnConvolutionBwdFilterPreference_t preference, size_t limit,
    cudnnConvolutionBwdFilterAlgo_t *algorithm) {
  if (!algorithm) return CUDNN_STATUS_BAD_PARAM;
  const ucudnn_descriptors descriptors = {x, w, convolution, y};
  const std::int64_t stated = ucudnn::stated_limit(preference, limit);
  if (ucudnn_register(handle.state(), UCUDNN_BACKWARD_FILTER, &descriptors, stated)) {
    *algorithm = cudnnConvolutionBwdFilterAlgo_t();
    return CUDNN_STATUS_SUCCESS;
  }
  cudnnConvolutionBwdFilterAlgoPerf_t results[CUDNN_CONVOLUTION_BWD_FILTER_ALGO_COUNT];
  int count = 0;
  const cudnnStatus_t status = cudnnGetConvolutionBackwardFilterAlgorithm_v7(static_cast<cudnnHandle_t>(handle), x, y,
      convolution, w, CUDNN_CONVOLUTION_BWD_FILTER_ALGO_COUNT, &count, results);
  if (status != CUDNN_STATUS_SUCCESS) return status;
  return ucudnn::first_within(results, count, ucudnn_plain_limit(stated), algorithm);
}

inline cudnnStatus_t cudnnGetConvolutionBackwardFilterWorkspaceSize(const UcudnnHandle_t &handle,
    cudnnTensorDescriptor_t x, cudnnTensorDescriptor_t y, cudnnConvolutionDescriptor_t convolution,
    cudnnFilterDescriptor_t w, cudnnConvolutionBwdFilterAlgo_t algorithm, size_t *size) {
  if (!size) return CUDNN_STATUS_BAD_PARAM;
  const ucudnn_descriptors descriptors = {x, w, convolution, y};
  if (ucudnn_divides(handle.state(), UCUDNN_BACKWARD_FILTER, &descriptors)) {
    *size = 0;
    return CUDNN_STATUS_SUCCESS;
  }
  return cudnnGetConvolutionBackwardFilterWorkspaceSize(static_cast<cudnnHandle_t>(handle), x, y, convolution, w,
      algorithm, size);
}

inline cudnnStatus_t cudnnConvolutionBackwardFilter(const UcudnnHandle_t &handle, const void *alpha,
                                                    cudnnTensorDescriptor_t x, const void *x_data,
                                                    cudnnTensorDescriptor_t y, const void *y_data,
                                                    cudnnConvolutionDescriptor_t convolution,
                                                    cudnnConvolutionBwdFilterAlgo_t algorithm, void *workspace,
                                                    size_t workspace_bytes, const void *beta,
                                                    cudnnFilterDescriptor_t w, void *w_data) {
  const ucudnn_descriptors descriptors = {x, w, convolution, y};
  const ucudnn_plain plain = {static_cast<int>(algorithm), workspace, workspace_bytes};
  return ucudnn_convolve(handle.state(), UCUDNN_BACKWARD_FILTER, &descriptors, alpha, const_cast<void *>(x_data),
      w_data, const_cast<void *>(y_data), beta, &plain);
}

#pragma GCC diagnostic pop

#endif
