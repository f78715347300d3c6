// Rules of the gate: what is computed here of calls that look the same.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <unordered_map>

#include "calls.hpp"
#include "direct.hpp"
#include "signature.hpp"

namespace {

// Computes one of the tensors x, w and y of a kernel from the others, and adds a bias if it is given; 0: it could not.
using Callback = int (*)(std::int64_t kernel, const void* x, const void* w, const void* y, const void* bias);

struct Output {
  std::int64_t kernel = -1;  // -1: left to PyTorch
  std::shared_ptr<const Direct> direct;  // null: the callback computes it
  Numbers sizes;
  Numbers strides;
};

struct Rule {
  std::array<Output, 2> outputs;  // forward: the first one; backward: gradients of the input and the weight
  Numbers bias_sizes;
  Numbers bias_strides;
  bool fuses = false;  // the kernel of the output adds the bias
  const std::int64_t* bypass = nullptr;  // not 0 while such calls come to Python, which tries something

  bool is_bypassed() const { return bypass != nullptr && *bypass != 0; }
  bool computes() const { return outputs[0].kernel >= 0 || outputs[1].kernel >= 0; }
  bool has_its_plans() const {
    return std::all_of(outputs.begin(), outputs.end(),
                       [](const Output& each) { return each.direct == nullptr || is_current(*each.direct); });
  }
};

// What the gate does with the calls of one operator.
struct Side {
  std::unordered_map<Numbers, Rule, Hash> rules;
  std::shared_ptr<const Kernel> own;     // PyTorch's
  std::shared_ptr<const Kernel> python;  // null if no call comes to Python

  // A table that passes all calls on to PyTorch needs no gate.
  bool needs_gate() const { return python != nullptr || !rules.empty(); }
};

// Counts the tables that exist: Python keeps what the rules of all of them use.
std::atomic<std::int64_t> tables{0};

// What the gate does with all calls of a device type.
struct Table {
  c10::DispatchKey key = c10::DispatchKey::Undefined;
  Callback callback = nullptr;
  Side forward;
  Side backward;
  // Direct kernels run on PyTorch's default stream only: cuDNN's handles are set to it, and it is never captured.
  bool is_direct = false;
  bool is_over_plans = false;  // plans within a stated limit compute in Python, too
  bool is_mixed = false;  // the callback computes other kernels, maybe on the same handles

  Table() { ++tables; }
  ~Table() { --tables; }
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;
};

}  // namespace
