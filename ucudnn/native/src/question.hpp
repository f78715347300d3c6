// The contents of four descriptors as plain numbers: the key under which a handle finds a convolution.
#ifndef UCUDNN_QUESTION_HPP_
#define UCUDNN_QUESTION_HPP_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ucudnn_c.h"

namespace ucudnn {

constexpr int kMostDims = 5;     // of the tensors of 3-D convolutions
constexpr int kMostSpatial = 3;

// Python reads it too (ucudnn/native/bridge.py), so the order of fields must not change. Unused entries are 0.
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

// Read descriptors; false if they cannot be read, or have more dimensions than a convolution.
bool read_question(int operation, const ucudnn_descriptors& descriptors, Question* question);

// Whether the algorithm's number that a caller gives requests results that repeat bit for bit. That is the number of a
// deterministic algorithm of cuDNN, other than 0, which stands for any algorithm.
bool wants_determinism(int operation, int algorithm);

}  // namespace ucudnn
#endif
