// The C interface. Arguments may be null, and no exception may leave it.
#include <cstdlib>
#include <new>
#include <string>

#include "entry.hpp"
#include "handle.hpp"

namespace {

// Bytes from text such as 67108864, 64MiB or 1.5 GiB, as ucudnn/units.py reads it; -1 if it cannot be read.
std::int64_t parse_bytes(const std::string& text) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  std::string unit;
  for (; *end; ++end) {
    if (*end != ' ') unit += static_cast<char>(*end | 0x20);
  }
  const char* const names[] = {"", "b", "kb", "mb", "gb", "k", "m", "g", "kib", "mib", "gib"};
  const double factors[] = {1, 1, 1e3, 1e6, 1e9, 0x1p10, 0x1p20, 0x1p30, 0x1p10, 0x1p20, 0x1p30};
  for (int i = 0; i < 11; ++i) {
    if (unit == names[i] && number >= 0 && number * factors[i] < 0x1p63) {
      return static_cast<std::int64_t>(number * factors[i]);
    }
  }
  return -1;
}

template <typename Run, typename Result>
Result guarded(Run run, Result otherwise) {
  try {
    return run();
  } catch (const std::exception& error) {
    ucudnn::say("failed inside: %s", error.what());
    return otherwise;
  }
}

}  // namespace

extern "C" {

cudnnStatus_t ucudnn_create(ucudnn_handle_t* handle) {
  if (!handle) return CUDNN_STATUS_BAD_PARAM;
  *handle = nullptr;
  cudnnHandle_t cudnn = nullptr;
  const cudnnStatus_t status = cudnnCreate(&cudnn);
  if (status != CUDNN_STATUS_SUCCESS) return status;
  return guarded(
      [&] {
        ucudnn::planner();  // starts Python now rather than in the first convolution
        *handle = new ucudnn_handle(cudnn);
        return CUDNN_STATUS_SUCCESS;
      },
      CUDNN_STATUS_INTERNAL_ERROR);
}

cudnnStatus_t ucudnn_destroy(ucudnn_handle_t handle) {
  if (!handle) return CUDNN_STATUS_BAD_PARAM;
  cudnnHandle_t cudnn = handle->cudnn();
  ucudnn::Entry entry(handle->busy());
  if (!entry.granted()) return CUDNN_STATUS_BAD_PARAM;
  entry.end();
  delete handle;  // before cuDNN's handle, which its plans use
  return cudnnDestroy(cudnn);
}

cudnnHandle_t ucudnn_cudnn_handle(ucudnn_handle_t handle) { return handle ? handle->cudnn() : nullptr; }

cudnnStatus_t ucudnn_set_stream(ucudnn_handle_t handle, cudaStream_t stream) {
  if (!handle) return CUDNN_STATUS_BAD_PARAM;
  const ucudnn::Entry entry(handle->busy());
  if (!entry.granted()) return CUDNN_STATUS_BAD_PARAM;
  return guarded([&] { return handle->set_stream(stream); }, CUDNN_STATUS_INTERNAL_ERROR);
}

int ucudnn_register(ucudnn_handle_t handle, int operation, const ucudnn_descriptors* descriptors,
                    int64_t limit_bytes) {
  if (!handle || !descriptors) return 0;
  const ucudnn::Entry entry(handle->busy());
  if (!entry.granted()) return 0;
  return guarded([&] { return handle->divides(operation, *descriptors, limit_bytes) ? 1 : 0; }, 0);
}

int ucudnn_divides(ucudnn_handle_t handle, int operation, const ucudnn_descriptors* descriptors) {
  return ucudnn_register(handle, operation, descriptors, ucudnn::kUnstated);
}

int64_t ucudnn_plain_limit(int64_t limit_bytes) {
  const char* text = std::getenv("UCUDNN_DEFAULT_WORKSPACE_LIMIT");
  if (!text || !*text) text = std::getenv("UCUDNN_WORKSPACE_LIMIT");
  const std::int64_t named = text && *text && limit_bytes != 0 ? parse_bytes(text) : -1;
  return named >= 0 ? named : limit_bytes;
}

cudnnStatus_t ucudnn_convolve(ucudnn_handle_t handle, int operation, const ucudnn_descriptors* descriptors,
                              const void* alpha, void* x, void* w, void* y, const void* beta,
                              const ucudnn_plain* plain) {
  if (!handle || !descriptors || !plain) return CUDNN_STATUS_BAD_PARAM;
  const ucudnn::Entry entry(handle->busy());
  if (!entry.granted()) return CUDNN_STATUS_BAD_PARAM;
  const ucudnn::Call call = {operation,
                             descriptors,
                             alpha,
                             beta,
                             static_cast<char*>(x),
                             static_cast<char*>(w),
                             static_cast<char*>(y),
                             plain};
  return guarded([&] { return handle->convolve(call); }, CUDNN_STATUS_INTERNAL_ERROR);
}

cudnnStatus_t ucudnn_report(const char* path) {
  return guarded(
      [&] {
        const ucudnn::Callbacks* python = ucudnn::planner();
        if (!python) return CUDNN_STATUS_NOT_INITIALIZED;
        return python->report(path ? path : "-") == 0 ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM;
      },
      CUDNN_STATUS_INTERNAL_ERROR);
}

}  // extern "C"
