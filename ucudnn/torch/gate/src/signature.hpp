// The signature of a call: a list of numbers, namely shapes, strides, types and devices of the tensors, and the other
// arguments. A list of numbers inside it begins with its length. `ucudnn.torch.gate.call_gate` states signatures in the
// same order.
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
  std::size_t operator()(const Numbers& signature) const {
    std::uint64_t found = 1469598103934665603ull;  // FNV-1a, by number
    for (const std::int64_t each : signature) found = (found ^ static_cast<std::uint64_t>(each)) * 1099511628211ull;
    return found ^ (found >> 32);
  }
};

void add(Numbers& signature, at::IntArrayRef list) {
  signature.push_back(static_cast<std::int64_t>(list.size()));
  signature.insert(signature.end(), list.begin(), list.end());
}

void add(Numbers& signature, const at::Tensor& tensor) {
  add(signature, tensor.sizes());
  add(signature, tensor.strides());
  signature.push_back(static_cast<std::int64_t>(tensor.scalar_type()));
  signature.push_back(tensor.is_cpu() ? 0 : tensor.get_device());  // the CPU stands for a GPU in tests
}

void add(Numbers& signature, const Geometry& geometry) {
  signature.push_back(6);
  add(signature, geometry.stride);
  add(signature, geometry.padding);
  add(signature, geometry.dilation);
  signature.push_back(geometry.transposed);
  add(signature, geometry.output_padding);
  signature.push_back(geometry.groups);
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

void add(Numbers& signature, const Mask& mask) {
  signature.push_back(static_cast<std::int64_t>(mask.size()));
  signature.insert(signature.end(), mask.begin(), mask.end());
}

Numbers& empty_signature() {
  thread_local Numbers signature;
  signature.clear();
  return signature;
}

}  // namespace
