// Overlap: an output that shares memory with an input. Micro-batches write samples before later ones are read, so the
// numbers would depend on the limit (ucudnn/execution/overlap.py).
#ifndef UCUDNN_OVERLAP_HPP_
#define UCUDNN_OVERLAP_HPP_

#include <cstdint>
#include <string>

#include "question.hpp"

namespace ucudnn {

// The bytes of a tensor: runs without gaps, repeated in each dimension. Steps are in bytes; the longest one is last.
struct Extent {
  std::int64_t run = 0;
  int dims = 0;
  std::int64_t count[kMostDims], step[kMostDims];

  // Repeat what there is. Call it with the shortest step first.
  void repeat(std::int64_t times, std::int64_t step_bytes);
  // Bytes from the first one to the last, of the innermost dimensions.
  std::int64_t span(int innermost) const;
};

// Whether a tensor at `shift` bytes after another one shares a byte with it. Where that takes too long to find out, it
// counts as shared.
bool share_bytes(const Extent& one, const Extent& other, std::int64_t shift);

// x, w and y of a convolution.
struct Extents {
  bool known = false;
  Extent tensors[3];
};

// Extents of all tensors. They are unknown for types without a fixed number of bytes.
Extents extents_of(const Question& question);

// Why the output cannot be written; '' if it shares no byte with an input.
std::string overlap(int operation, const Extents& extents, const char* x, const char* w, const char* y);

}  // namespace ucudnn
#endif
