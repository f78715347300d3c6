/* The C interface of ucudnn: a cuDNN handle whose convolutions are computed in micro-batches.
 *
 * C++ programs include ucudnn.hpp instead, whose UcudnnHandle_t replaces cudnnHandle_t.
 *
 * One thread at a time may use a handle, as with cuDNN's own; another one is refused meanwhile. With
 * UCUDNN_TOTAL_WORKSPACE_SIZE all handles of a GPU share one workspace, and one thread must call all their
 * convolutions.
 */
#ifndef UCUDNN_C_H_
#define UCUDNN_C_H_

#include <cudnn.h>
#include <stddef.h>
#include <stdint.h>

#if CUDNN_MAJOR < 9
#error "ucudnn needs cuDNN 9"
#endif

/* Under CUDNN_WARN_DEPRECATED, cuDNN 9 warns of its convolution types. Only callers shall see that, not this header. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

#ifdef __cplusplus
extern "C" {
#endif

#define UCUDNN_API __attribute__((visibility("default")))

typedef struct ucudnn_handle *ucudnn_handle_t;

enum { UCUDNN_FORWARD = 0, UCUDNN_BACKWARD_DATA = 1, UCUDNN_BACKWARD_FILTER = 2 };

/* The descriptors of a convolution; the operation determines which tensor is written. */
typedef struct {
  cudnnTensorDescriptor_t x;
  cudnnFilterDescriptor_t w;
  cudnnConvolutionDescriptor_t convolution;
  cudnnTensorDescriptor_t y;
} ucudnn_descriptors;

/* The arguments for plain cuDNN if it must compute a convolution. */
typedef struct {
  int algorithm;
  void *workspace;
  size_t workspace_bytes;
} ucudnn_plain;

#define UCUDNN_NO_LIMIT (-1)

/* Create a handle on the current GPU. The first handle of a process starts Python unless it runs. */
UCUDNN_API cudnnStatus_t ucudnn_create(ucudnn_handle_t *handle);
UCUDNN_API cudnnStatus_t ucudnn_destroy(ucudnn_handle_t handle);

/* cuDNN's own handle, for all functions other than convolutions. */
UCUDNN_API cudnnHandle_t ucudnn_cudnn_handle(ucudnn_handle_t handle);
UCUDNN_API cudnnStatus_t ucudnn_set_stream(ucudnn_handle_t handle, cudaStream_t stream);

/* Register a convolution before its first run, with the workspace limit in bytes that the caller states, or
 * UCUDNN_NO_LIMIT. Returns 1 if it is computed in micro-batches, without workspace from the caller, and 0 if plain
 * cuDNN computes it. Later calls only look it up. */
UCUDNN_API int ucudnn_register(ucudnn_handle_t handle, int operation, const ucudnn_descriptors *descriptors,
                               int64_t limit_bytes);

/* The same for a caller that states no limit. */
UCUDNN_API int ucudnn_divides(ucudnn_handle_t handle, int operation, const ucudnn_descriptors *descriptors);

/* The limit for plain cuDNN: UCUDNN_DEFAULT_WORKSPACE_LIMIT if it is set, else the limit that the caller states. */
UCUDNN_API int64_t ucudnn_plain_limit(int64_t limit_bytes);

/* Compute out = alpha * conv + beta * out on the handle's stream. alpha and beta point to a double for double tensors,
 * else to a float. The first call of a convolution measures and plans it. The answer is CUDNN_STATUS_BAD_PARAM, and
 * nothing is computed, if the output shares memory with an input, or if another call uses the handle or this thread. */
UCUDNN_API cudnnStatus_t ucudnn_convolve(ucudnn_handle_t handle, int operation, const ucudnn_descriptors *descriptors,
                                         const void *alpha, void *x, void *w, void *y, const void *beta,
                                         const ucudnn_plain *plain);

/* Write the report of all handles so far: each kernel with its configuration, times, workspace and calls. A path that
 * ends in .json gets JSON, another one text; "-" and null are stderr. The answer is CUDNN_STATUS_BAD_PARAM if it cannot
 * be written, with the reason on stderr. The variable UCUDNN_REPORT is the path of a report that is written at exit. */
UCUDNN_API cudnnStatus_t ucudnn_report(const char *path);

#ifdef __cplusplus
}
#endif

#pragma GCC diagnostic pop
#endif
