// What four descriptors ask for, as plain numbers: the key under which a handle knows a convolution.
#ifndef UCUDNN_QUESTION_HPP_
#define UCUDNN_QUESTION_HPP_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ucudnn_c.h"

namespace ucudnn {

constexpr int kMostDims = 5;     // of tensors: 3-D convolutions
constexpr int kMostSpatial = 3;

// Read by Python, too (ucudnn/native/bridge.py): the order of these is a contract. Unused entries are 0.
struct Question {
  std::int32_t operation;
  std::int32_t deterministic;
  std::int32_t dims;
  std::int32_t x_type, w_type, y_type;
  std::int32_t w_format;
  std::int32_t x_size[kMostDims], x_stride[kMostDims];
  std::int32_t w_size[kMostDims];
  std::int32_t y_size[kMostDims], y_stride[kMostDims];
  std::int32_t padding[kMostSpatial], stride[kMostSpatial], dilation[kMostSpatial];
  std::int32_t mode, compute_type, math_type, groups;
  std::int32_t unused;

  bool operator==(const Question& other) const { return std::memcmp(this, &other, sizeof *this) == 0; }
};
static_assert(sizeof(Question) % sizeof(std::uint64_t) == 0, "questions are hashed by words");

struct QuestionHash {
  std::size_t operator()(const Question& question) const {
    std::uint64_t hash = 0x9e3779b97f4a7c15u;
    std::uint64_t word;
    for (std::size_t at = 0; at < sizeof question; at += sizeof word) {
      std::memcpy(&word, reinterpret_cast<const char*>(&question) + at, sizeof word);
      hash = (hash ^ word) * 0xff51afd7ed558ccdu;
      hash ^= hash >> 32;
    }
    return static_cast<std::size_t>(hash);
  }
};

// Read descriptors; false where they cannot be read, or have more dimensions than a convolution can have.
bool read_question(int operation, const ucudnn_descriptors& descriptors, Question* question);

// Whether an algorithm's number, as a caller gives it, is a wish for results that repeat themselves to the bit: that of
// an algorithm of cuDNN's that is deterministic, other than 0, which stands for any.
bool wants_determinism(int operation, int algorithm);

}  // namespace ucudnn
#endif
