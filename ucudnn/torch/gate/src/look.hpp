// The look of a call: a list of numbers, namely shapes, strides, types and devices of the tensors, and the other
// arguments. A list of numbers inside it begins with its length. `ucudnn.torch.gate.call_gate` states looks in the same
// order.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "calls.hpp"

namespace {

using Numbers = std::vector<std::int64_t>;

struct Hash {
  std::size_t operator()(const Numbers& look) const {
    std::uint64_t found = 1469598103934665603ull;  // FNV-1a, by number
    for (const std::int64_t each : look) found = (found ^ static_cast<std::uint64_t>(each)) * 1099511628211ull;
    return found ^ (found >> 32);
  }
};

void add(Numbers& look, at::IntArrayRef list) {
  look.push_back(static_cast<std::int64_t>(list.size()));
  look.insert(look.end(), list.begin(), list.end());
}

void add(Numbers& look, const at::Tensor& tensor) {
  add(look, tensor.sizes());
  add(look, tensor.strides());
  look.push_back(static_cast<std::int64_t>(tensor.scalar_type()));
  look.push_back(tensor.is_cpu() ? 0 : tensor.get_device());  // the CPU stands for a GPU in tests
}

void add(Numbers& look, const Geometry& geometry) {
  look.push_back(6);
  add(look, geometry.stride);
  add(look, geometry.padding);
  add(look, geometry.dilation);
  look.push_back(geometry.transposed);
  add(look, geometry.output_padding);
  look.push_back(geometry.groups);
}

// Numbers of PyTorch's ways to compute convolutions of float32; the names are those that Python sees.
std::int64_t precision_now() {
  const auto& context = at::globalContext();
#ifdef UCUDNN_PRECISION_HAS_NUMBERS
  const std::string now = at::precision2str(context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::CONV));
#else
  const std::string now = context.float32Precision("cuda", "conv");
#endif
  const char* const names[] = {"none", "ieee", "tf32", "bf16"};
  for (std::int64_t number = 0; number < 4; ++number) {
    if (now == names[number]) return number;
  }
  return -2;
}

void add(Numbers& look, const Mask& mask) {
  look.push_back(static_cast<std::int64_t>(mask.size()));
  look.insert(look.end(), mask.begin(), mask.end());
}

Numbers& empty_look() {
  thread_local Numbers look;
  look.clear();
  return look;
}

}  // namespace
