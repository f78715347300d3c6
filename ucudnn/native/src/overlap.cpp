#include "overlap.hpp"

#include <algorithm>

namespace ucudnn {
namespace {

constexpr int kMostWork = 100000;  // comparisons, as in overlap.py
const char* const kNames[] = {"x", "w", "y"};
const char* const kOperations[] = {"Forward", "BackwardData", "BackwardFilter"};
constexpr int kWritten[] = {2, 0, 1};

std::int64_t item_bytes(std::int32_t type) {
  switch (type) {
    case CUDNN_DATA_DOUBLE: return 8;
    case CUDNN_DATA_FLOAT: return 4;
    case CUDNN_DATA_HALF: case CUDNN_DATA_BFLOAT16: return 2;
    default: return 0;
  }
}

std::int64_t floor_of(std::int64_t a, std::int64_t b) { return a / b - (a % b < 0); }

Extent extent_of(const std::int32_t* sizes, const std::int32_t* strides, int dims, std::int64_t item) {
  int order[kMostDims];
  for (int i = 0; i < dims; ++i) order[i] = i;
  std::sort(order, order + dims, [=](int a, int b) { return strides[a] < strides[b]; });
  Extent extent;
  extent.run = item;
  for (int i = 0; i < dims; ++i) extent.repeat(sizes[order[i]], strides[order[i]] * item);
  return extent;
}

// Compares the innermost dimensions of two tensors; `work` is what may still be done.
bool meet(const Extent& a, int i, const Extent& b, int j, std::int64_t shift, int* work) {
  const std::int64_t a_span = a.span(i), b_span = b.span(j);
  if (shift >= a_span || shift + b_span <= 0) return false;
  if ((i == 0 && j == 0) || --*work < 0) return true;
  const std::int64_t a_step = i ? a.step[i - 1] : 0, b_step = j ? b.step[j - 1] : 0;
  if (a_step < b_step) return meet(b, j, a, i, -shift, work);
  // The repetitions of b that are as far apart as those of a need no loop of their own.
  const bool both = a_step == b_step;
  const int b_inner = both ? j - 1 : j;
  const std::int64_t inner = a.span(i - 1), other = b.span(b_inner);
  const std::int64_t first = std::max(floor_of(shift - inner, a_step) + 1, both ? 1 - b.count[j - 1] : 0);
  const std::int64_t last = std::min(-floor_of(-shift - other, a_step) - 1, a.count[i - 1] - 1);
  for (std::int64_t k = first; k <= last; ++k) {
    if (meet(a, i - 1, b, b_inner, shift - k * a_step, work)) return true;
  }
  return false;
}

}  // namespace

void Extent::repeat(std::int64_t times, std::int64_t step_bytes) {
  if (times <= 1) return;
  if (dims == 0 && step_bytes <= run) {
    run += (times - 1) * step_bytes;
  } else if (dims > 0 && step_bytes == count[dims - 1] * step[dims - 1]) {
    count[dims - 1] *= times;
  } else {
    count[dims] = times;
    step[dims++] = step_bytes;
  }
}

std::int64_t Extent::span(int innermost) const {
  std::int64_t bytes = run;
  for (int i = 0; i < innermost; ++i) bytes += (count[i] - 1) * step[i];
  return bytes;
}

bool share_bytes(const Extent& one, const Extent& other, std::int64_t shift) {
  int work = kMostWork;
  return meet(one, one.dims, other, other.dims, shift, &work);
}

Extents extents_of(const Question& question) {
  const std::int64_t x = item_bytes(question.x_type), w = item_bytes(question.w_type), y = item_bytes(question.y_type);
  Extents extents;
  extents.known = x && w && y;
  extents.tensors[0] = extent_of(question.x_size, question.x_stride, question.dims, x);
  extents.tensors[2] = extent_of(question.y_size, question.y_stride, question.dims, y);
  extents.tensors[1].run = w;
  for (int i = 0; i < question.dims; ++i) extents.tensors[1].run *= question.w_size[i];
  return extents;
}

std::string overlap(int operation, const Extents& extents, const char* x, const char* w, const char* y) {
  if (!extents.known || operation < 0 || operation > 2) return "";
  const char* const addresses[] = {x, w, y};
  const int written = kWritten[operation];
  const Extent& out = extents.tensors[written];
  const std::int64_t bytes = out.span(out.dims);
  for (int read = 0; read < 3; ++read) {
    const Extent& in = extents.tensors[read];
    const std::int64_t shift = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(addresses[read]) -
                                                         reinterpret_cast<std::uintptr_t>(addresses[written]));
    if (read == written || shift >= bytes || shift + in.span(in.dims) <= 0) continue;
    if (share_bytes(out, in, shift)) {
      const std::string name = kNames[written];
      return name + ", which " + kOperations[operation] + " writes, shares memory with " + kNames[read] +
             ", which it reads: give " + name + " memory of its own";
    }
  }
  return "";
}

}  // namespace ucudnn
