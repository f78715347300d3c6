#include "question.hpp"

namespace ucudnn {
namespace {

bool read_tensor(cudnnTensorDescriptor_t descriptor, std::int32_t* type, int* dims, std::int32_t* sizes,
                 std::int32_t* strides) {
  cudnnDataType_t found;
  int size[CUDNN_DIM_MAX], step[CUDNN_DIM_MAX];
  if (cudnnGetTensorNdDescriptor(descriptor, CUDNN_DIM_MAX, &found, dims, size, step) != CUDNN_STATUS_SUCCESS ||
      *dims < 3 || *dims > kMostDims) {
    return false;
  }
  *type = found;
  for (int i = 0; i < *dims; ++i) {
    sizes[i] = size[i];
    strides[i] = step[i];
  }
  return true;
}

}  // namespace

bool read_question(int operation, const ucudnn_descriptors& descriptors, Question* question) {
  std::memset(question, 0, sizeof *question);
  question->operation = operation;
  int y_dims = 0, w_dims = 0, spatial = 0, size[CUDNN_DIM_MAX];
  if (!read_tensor(descriptors.x, &question->x_type, &question->dims, question->x_size, question->x_stride) ||
      !read_tensor(descriptors.y, &question->y_type, &y_dims, question->y_size, question->y_stride)) {
    return false;
  }
  cudnnDataType_t type;
  cudnnTensorFormat_t format;
  if (cudnnGetFilterNdDescriptor(descriptors.w, CUDNN_DIM_MAX, &type, &format, &w_dims, size) !=
          CUDNN_STATUS_SUCCESS ||
      w_dims != question->dims || y_dims != question->dims) {
    return false;
  }
  question->w_type = type;
  question->w_format = format;
  for (int i = 0; i < w_dims; ++i) question->w_size[i] = size[i];
  constexpr int most = CUDNN_DIM_MAX - 2;
  int padding[most], stride[most], dilation[most];
  cudnnConvolutionMode_t mode;
  cudnnDataType_t compute;
  cudnnMathType_t math;
  if (cudnnGetConvolutionNdDescriptor(descriptors.convolution, most, &spatial, padding, stride, dilation, &mode,
                                      &compute) != CUDNN_STATUS_SUCCESS ||
      spatial != question->dims - 2 ||
      cudnnGetConvolutionMathType(descriptors.convolution, &math) != CUDNN_STATUS_SUCCESS ||
      cudnnGetConvolutionGroupCount(descriptors.convolution, &question->groups) != CUDNN_STATUS_SUCCESS) {
    return false;
  }
  for (int i = 0; i < spatial; ++i) {
    question->padding[i] = padding[i];
    question->stride[i] = stride[i];
    question->dilation[i] = dilation[i];
  }
  question->mode = mode;
  question->compute_type = compute;
  question->math_type = math;
  return true;
}

bool wants_determinism(int operation, int algorithm) {
  return algorithm != 0 &&
         !(operation == UCUDNN_BACKWARD_FILTER && algorithm == CUDNN_CONVOLUTION_BWD_FILTER_ALGO_3);
}

}  // namespace ucudnn
