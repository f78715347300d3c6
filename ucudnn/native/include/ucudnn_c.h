/* The C interface of ucudnn: a cuDNN handle whose convolutions go in micro-batches.
 *
 * C++ programs include ucudnn.hpp instead, whose UcudnnHandle_t takes the place of cudnnHandle_t.
 *
 * A handle is used by one thread at a time, as cuDNN's own. Under UCUDNN_TOTAL_WORKSPACE_SIZE one workspace serves all
 * handles of a GPU: then its convolutions are to be called by one thread.
 */
#ifndef UCUDNN_C_H_
#define UCUDNN_C_H_

#include <cudnn.h>
#include <stddef.h>
#include <stdint.h>

#if CUDNN_MAJOR < 9
#error "ucudnn needs cuDNN 9"
#endif

/* Under CUDNN_WARN_DEPRECATED, cuDNN 9 warns of the types of its convolutions: where callers name them, not here. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

#ifdef __cplusplus
extern "C" {
#endif

#define UCUDNN_API __attribute__((visibility("default")))

typedef struct ucudnn_handle *ucudnn_handle_t;

enum { UCUDNN_FORWARD = 0, UCUDNN_BACKWARD_DATA = 1, UCUDNN_BACKWARD_FILTER = 2 };

/* What a convolution works on; which tensor is written follows from the operation. */
typedef struct {
  cudnnTensorDescriptor_t x;
  cudnnFilterDescriptor_t w;
  cudnnConvolutionDescriptor_t convolution;
  cudnnTensorDescriptor_t y;
} ucudnn_descriptors;

/* What plain cuDNN gets where a convolution cannot go in micro-batches. */
typedef struct {
  int algorithm;
  void *workspace;
  size_t workspace_bytes;
} ucudnn_plain;

#define UCUDNN_NO_LIMIT (-1)

/* Make a handle on the current GPU. The first of a process starts Python, or finds it running. */
UCUDNN_API cudnnStatus_t ucudnn_create(ucudnn_handle_t *handle);
UCUDNN_API cudnnStatus_t ucudnn_destroy(ucudnn_handle_t handle);

/* cuDNN's own handle, for all that is not a convolution. */
UCUDNN_API cudnnHandle_t ucudnn_cudnn_handle(ucudnn_handle_t handle);
UCUDNN_API cudnnStatus_t ucudnn_set_stream(ucudnn_handle_t handle, cudaStream_t stream);

/* Register a convolution before its first run, with the limit of workspace that the caller states, in bytes, or
 * UCUDNN_NO_LIMIT. Returns 1 if it goes in micro-batches, with no workspace of the caller's, and 0 if plain cuDNN is to
 * compute it. From the second time on this is a look-up. */
UCUDNN_API int ucudnn_register(ucudnn_handle_t handle, int operation, const ucudnn_descriptors *descriptors,
                               int64_t limit_bytes);

/* The same, without stating a limit. */
UCUDNN_API int ucudnn_divides(ucudnn_handle_t handle, int operation, const ucudnn_descriptors *descriptors);

/* The limit that plain cuDNN is held to: what the caller states, unless UCUDNN_DEFAULT_WORKSPACE_LIMIT is set. */
UCUDNN_API int64_t ucudnn_plain_limit(int64_t limit_bytes);

/* out = alpha * conv + beta * out, on the handle's stream; alpha and beta point to a float, or to a double for doubles.
 * The first call of a convolution measures and plans it. */
UCUDNN_API cudnnStatus_t ucudnn_convolve(ucudnn_handle_t handle, int operation, const ucudnn_descriptors *descriptors,
                                         const void *alpha, void *x, void *w, void *y, const void *beta,
                                         const ucudnn_plain *plain);

#ifdef __cplusplus
}
#endif

#pragma GCC diagnostic pop
#endif
