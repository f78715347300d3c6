// Calls of PyTorch's two operators, and how they go on to PyTorch's kernels or to kernels in Python.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_convolution_native.h>
#include <ATen/ops/convolution_backward_native.h>
#include <c10/core/DeviceGuard.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace {

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Mask = std::array<bool, 3>;

struct Geometry {
  at::IntArrayRef stride;
  at::IntArrayRef padding;
  at::IntArrayRef dilation;
  bool transposed;
  at::IntArrayRef output_padding;
  std::int64_t groups;
};

at::IntArrayRef whole(c10::SymIntArrayRef numbers) { return C10_AS_INTARRAYREF_SLOW(numbers); }

Geometry geometry_of(c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                     bool transposed, c10::SymIntArrayRef output_padding, const c10::SymInt& groups) {
  return {whole(stride), whole(padding), whole(dilation), transposed, whole(output_padding),
          groups.guard_int(__FILE__, __LINE__)};
}

// A call of aten::_convolution.
struct Forward {
  const at::Tensor& x;
  const at::Tensor& weight;
  const std::optional<at::Tensor>& bias;
  Geometry geometry;
  bool benchmark;
  bool deterministic;
  bool enabled;  // cuDNN
  bool tf32;
};

// A call of aten::convolution_backward.
struct Backward {
  const at::Tensor& grad;
  const at::Tensor& x;
  const at::Tensor& weight;
  at::OptionalIntArrayRef bias_sizes;
  Geometry geometry;
  Mask mask;
};

// A kernel to which the gate passes calls on, and the operator of which it is one.
struct Kernel {
  c10::OperatorHandle handle;
  c10::SafeKernelFunction kernel;
  // Whether it is PyTorch's own, which is called as a function. A kernel in Python takes its arguments in a list, and
  // to make that takes the host longer than all else that the gate does.
  bool is_own;
};

// Returns whether a kernel was registered by the code that PyTorch generates for its own ones.
bool is_own(const c10::SafeKernelFunction& kernel) {
  const std::string& told = kernel.debug();
  for (const char* file : {"RegisterCompositeExplicitAutograd", "RegisterCUDA", "RegisterCPU"}) {
    if (told.find(file) != std::string::npos) return true;
  }
  return false;
}

void push(torch::jit::Stack& stack, const Geometry& geometry) {
  torch::jit::push(stack, geometry.stride, geometry.padding, geometry.dilation, geometry.transposed,
                   geometry.output_padding, geometry.groups);
}

at::Tensor goes_on(const Kernel& passed, c10::DispatchKey key, const Forward& call) {
  const Geometry& how = call.geometry;
  if (passed.is_own) {
    return at::native::_convolution(call.x, call.weight, call.bias, how.stride, how.padding, how.dilation,
                                    how.transposed, how.output_padding, how.groups, call.benchmark, call.deterministic,
                                    call.enabled, call.tf32);
  }
  torch::jit::Stack stack;
  torch::jit::push(stack, call.x, call.weight, call.bias);
  push(stack, how);
  torch::jit::push(stack, call.benchmark, call.deterministic, call.enabled, call.tf32);
  passed.kernel.callBoxed(passed.handle, c10::DispatchKeySet(key), &stack);
  return std::move(stack.back()).toTensor();
}

Gradients goes_on(const Kernel& passed, c10::DispatchKey key, const Backward& call) {
  const Geometry& how = call.geometry;
  if (passed.is_own) {
    const c10::DeviceGuard guard(call.grad.device());
    return at::native::convolution_backward(call.grad, call.x, call.weight, call.bias_sizes, how.stride, how.padding,
                                            how.dilation, how.transposed, how.output_padding, how.groups, call.mask);
  }
  torch::jit::Stack stack;
  torch::jit::push(stack, call.grad, call.x, call.weight);
  stack.emplace_back(call.bias_sizes.has_value() ? c10::IValue(*call.bias_sizes) : c10::IValue());
  push(stack, how);
  torch::jit::push(stack, c10::List<bool>({call.mask[0], call.mask[1], call.mask[2]}));
  passed.kernel.callBoxed(passed.handle, c10::DispatchKeySet(key), &stack);
  return {std::move(stack[0]).toTensor(), std::move(stack[1]).toTensor(), std::move(stack[2]).toTensor()};
}

}  // namespace
