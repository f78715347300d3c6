// The gate in front of PyTorch's convolutions. Calls that look like one of a table are computed here, by execution
// plans of cuDNN or by a callback. All others go on to PyTorch's kernel, or to a kernel in Python, as the table says.
// The gate needs no header of Python, CUDA or cuDNN.
//
// It is registered once. Then only its table is replaced. Another thread may compute meanwhile, so a table does not
// change once it is used, and a call has the same table from its begin to its end.

#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "signature.hpp"
#include "rules.hpp"

#define EXPORTED __attribute__((visibility("default")))

namespace {

constexpr int NONE = -1;  // of the gradients

struct Gate {
  std::unique_ptr<Table> next;       // which is being stated
  std::shared_ptr<const Table> now;  // read and written by atomic functions only
  std::shared_ptr<const Kernel> own_forward, own_backward;  // what was registered before the gate
  std::unique_ptr<torch::Library> library;                  // null: the gate stands nowhere
  bool in_front_of_forward = false, in_front_of_backward = false;
  std::mutex handles;  // no two threads may use a handle at once
  int in_python = 0;   // threads that may use handles in Python; who waited for them could hold Python itself
};

Gate& gate() {
  static Gate* const only = new Gate;  // never destroyed, because threads may outlive the end of the process
  return *only;
}

std::shared_ptr<const Table> table_now() { return std::atomic_load_explicit(&gate().now, std::memory_order_acquire); }

// Takes the handles, or does not if who has them may wait for Python, because this thread may hold that.
std::unique_lock<std::mutex> handles_of_this_thread(const Table& table) {
  Gate& one = gate();
  return table.is_mixed ? std::unique_lock<std::mutex>(one.handles, std::try_to_lock)
                        : std::unique_lock<std::mutex>(one.handles);
}

bool computes(const Table& table, const Direct& direct, const at::Tensor& like, const Tensors& tensors, void* out) {
  if (!are_aligned(tensors)) return false;
  std::unique_lock<std::mutex> lock;
  if (direct.is_bounded()) {  // no other kernel may take a workspace after live bytes are read, before the allocation
    lock = handles_of_this_thread(table);
    if (!lock.owns_lock() || gate().in_python || !is_current(direct) || !has_room(direct, like)) return false;
  }
  const at::Tensor memory = workspace_of(direct, like);
  if (direct.workspace_bytes && !memory.defined()) return false;
  if (!direct.is_bounded()) lock = handles_of_this_thread(table);
  if (!lock.owns_lock() || gate().in_python || !is_current(direct)) return false;
  return runs(direct, tensors, memory.defined() ? memory.mutable_data_ptr() : nullptr, out);
}

at::Tensor computed(const Table& table, const Output& output, const at::Tensor& like, const at::Tensor* x,
                    const at::Tensor* w, const at::Tensor* y, bool transposed, const at::Tensor* bias = nullptr) {
  const c10::DeviceGuard guard(like.device());
  if (table.is_direct) {
    const c10::impl::VirtualGuardImpl streams(like.device().type());
    if (streams.getStream(like.device()).id() != 0) return {};
  }
  at::Tensor out = at::empty_strided(output.sizes, output.strides, like.options());
  const auto address = [&](const at::Tensor* tensor) {
    return tensor == nullptr ? out.data_ptr() : const_cast<void*>(tensor->const_data_ptr());
  };
  const Tensors tensors{address(transposed ? y : x), address(w), address(transposed ? x : y),
                        bias == nullptr ? nullptr : const_cast<void*>(bias->const_data_ptr())};
  if (output.direct) return computes(table, *output.direct, like, tensors, out.data_ptr()) ? out : at::Tensor();
  const auto lock = table.is_direct ? handles_of_this_thread(table) : std::unique_lock<std::mutex>();
  if (table.is_direct && !lock.owns_lock()) return {};
  return table.callback(output.kernel, tensors[0], tensors[1], tensors[2], tensors[3]) != 0 ? out : at::Tensor();
}

void count_in_python(int change) {
  const std::lock_guard<std::mutex> lock(gate().handles);
  gate().in_python += change;
}

// While it lives, no kernel is computed by its handle here, because Python may use that.
class InPython final {
 public:
  InPython() { count_in_python(1); }
  ~InPython() { count_in_python(-1); }
  InPython(const InPython&) = delete;
  InPython& operator=(const InPython&) = delete;
};

// Returns the kernel that computes calls which no rule computes.
const Kernel& rest_of(const Side& side) { return side.python == nullptr ? *side.own : *side.python; }

// Passes a call on to a kernel.
template <typename Call>
auto pass_on_to(const Table& table, const Kernel& kernel, const Call& call) {
  std::optional<InPython> inside;
  if (table.is_over_plans) inside.emplace();
  return goes_on(kernel, table.key, call);
}

// Passes on what is left of the gradients of a backward call, except for one of them, and adds the others to `found`.
void pass_on_but(const Table& table, const Backward& call, Mask& left, int later, std::array<at::Tensor, 3>& found) {
  Backward now = call;
  now.mask = left;
  if (later != NONE) now.mask[later] = false;
  auto [near, filters, bias] = pass_on_to(table, rest_of(table.backward), now);
  const std::array<at::Tensor*, 3> passed{&near, &filters, &bias};
  for (int at = 0; at < 3; ++at) {
    if (!now.mask[at]) continue;
    found[at] = std::move(*passed[at]);
    left[at] = false;
  }
}

const Rule* rule_of(const Side& side, const Numbers& signature) {
  const auto found = side.rules.find(signature);
  return found == side.rules.end() ? nullptr : &found->second;
}

// Returns the kernel to which a call goes on that nothing computes here; null if something does.
const Kernel* passes(const Table& table, const Side& side, const Rule* rule) {
  const bool is_bypassed = rule != nullptr && rule->is_bypassed();  // once, because another thread may change it
  // A part of a gradients' call would have a plan of its own in Python, so all of it goes there.
  const bool is_whole = rule == nullptr || !table.is_over_plans || rule->has_its_plans();
  if (rule != nullptr && !is_bypassed && is_whole && rule->computes()) return nullptr;
  return &rest_of(side);
}

at::Tensor forward(const Forward& call) {
  const std::shared_ptr<const Table> held = table_now();
  const Table& table = *held;
  Numbers& signature = empty_signature();
  add(signature, call.x);
  add(signature, call.weight);
  const bool biased = call.bias.has_value() && call.bias->defined();
  signature.push_back(biased ? 4 : -1);
  if (biased) add(signature, *call.bias);
  add(signature, call.geometry);
  signature.insert(signature.end(), {call.deterministic, call.enabled, call.tf32});  // all but `benchmark`
  const Rule* const rule = rule_of(table.forward, signature);
  if (const Kernel* const kernel = passes(table, table.forward, rule)) return pass_on_to(table, *kernel, call);
  const at::Tensor* const fused = rule->fuses ? &*call.bias : nullptr;
  at::Tensor out =
      computed(table, rule->outputs[0], call.x, &call.x, &call.weight, nullptr, call.geometry.transposed, fused);
  if (!out.defined()) return pass_on_to(table, rest_of(table.forward), call);
  if (biased && fused == nullptr) out.add_(call.bias->as_strided(rule->bias_sizes, rule->bias_strides));
  return out;
}

Gradients backward(const Backward& call) {
  const std::shared_ptr<const Table> held = table_now();
  const Table& table = *held;
  Numbers& signature = empty_signature();
  add(signature, call.grad);
  add(signature, call.x);
  add(signature, call.weight);
  add(signature, call.geometry);
  add(signature, call.mask);
  const auto& context = at::globalContext();
  signature.push_back(context.deterministicCuDNN() || context.deterministicAlgorithms());
  signature.push_back(context.userEnabledCuDNN());
  signature.push_back(precision_now());
  const Rule* const rule = rule_of(table.backward, signature);
  if (const Kernel* const kernel = passes(table, table.backward, rule)) return pass_on_to(table, *kernel, call);
  std::array<at::Tensor, 3> found;
  Mask left = call.mask;
  const bool over_plans = table.is_over_plans;
  if (over_plans && left[2]) {
    std::vector<std::int64_t> all_but_channels{0};
    for (std::int64_t axis = 2; axis < call.grad.dim(); ++axis) all_but_channels.push_back(axis);
    found[2] = call.grad.sum(all_but_channels);
    left[2] = false;
  }
  // PyTorch's order, so that memory is taken in the same order. Plans have the gradient of the weight first, because
  // its workspace may be where the other gradient will be.
  const std::array<int, 2> order = over_plans ? std::array<int, 2>{1, 0} : std::array<int, 2>{0, 1};
  for (const int at : order) {
    if (rule->outputs[at].kernel >= 0) {
      const bool of_input = at == 0;
      found[at] = computed(table, rule->outputs[at], call.x, of_input ? nullptr : &call.x,
                           of_input ? &call.weight : nullptr, &call.grad, call.geometry.transposed);
      left[at] = !found[at].defined();
    }
    if (!over_plans && at == 0 && left[0] && left[1] && rule->outputs[1].kernel >= 0) {
      // Now, because after the other gradient that would be live while this kernel has its workspace. A plan is not
      // asked for a part of a call, because that has a plan of its own.
      pass_on_but(table, call, left, 1, found);
    }
  }
  if (left[0] || left[1] || left[2]) pass_on_but(table, call, left, NONE, found);
  return {std::move(found[0]), std::move(found[1]), std::move(found[2])};
}

// The kernels that are registered, with the arguments of the operators' schemas.

at::Tensor gated_forward(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                         bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups, bool benchmark,
                         bool deterministic, bool enabled, bool tf32) {
  return forward({x, weight, bias, geometry_of(stride, padding, dilation, transposed, output_padding, groups),
                  benchmark, deterministic, enabled, tf32});
}

Gradients gated_backward(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight,
                         at::OptionalSymIntArrayRef bias_sizes, c10::SymIntArrayRef stride,
                         c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                         c10::SymIntArrayRef output_padding, c10::SymInt groups, Mask mask) {
  return backward({grad, x, weight, bias_sizes ? at::OptionalIntArrayRef(whole(*bias_sizes)) : std::nullopt,
                   geometry_of(stride, padding, dilation, transposed, output_padding, groups), mask});
}

class Quiet final : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}  // that a kernel is replaced, which is what is wanted
};

std::shared_ptr<const Kernel> kernel_of(const char* name, c10::DispatchKey key) {
  const c10::OperatorHandle handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  const c10::SafeKernelFunction kernel = handle.getComputedKernelForDispatchKey(key);
  return std::make_shared<const Kernel>(Kernel{handle, kernel, is_own(kernel)});
}

// Returns a side of the table that is being stated.
Side& next_side(int is_backward) { return is_backward ? gate().next->backward : gate().next->forward; }

thread_local std::string message;

template <typename Run>
const char* guarded(const Run& run) noexcept {
  try {
    run();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

Numbers list(const std::int64_t* values, std::int64_t count) { return Numbers(values, values + count); }

}  // namespace

// Each function returns nullptr, or the text of an error, which lives until the thread calls the next one.
extern "C" {

// Begins another table, for a device type and with a callback. The one that is used holds until this one is.
EXPORTED const char* ucudnn_gate_begin(const char* device_type, Callback callback) {
  return guarded([&] {
    auto next = std::make_unique<Table>();
    next->key = c10::parseDispatchKey(device_type);
    next->callback = callback;
    gate().next = std::move(next);
  });
}

// Names the operator whose kernel in Python computes calls that no rule computes, by plans within a stated limit.
EXPORTED const char* ucudnn_gate_python(int is_backward, const char* name) {
  return guarded([&] { next_side(is_backward).python = kernel_of(name, gate().next->key); });
}

// Lets a kernel compute an output of calls with a signature: `at` is 0 for a forward call, else the gradient's place.
EXPORTED const char* ucudnn_gate_add(int is_backward, const std::int64_t* signature, std::int64_t length, int at,
                                     std::int64_t kernel, const std::int64_t* sizes, const std::int64_t* strides,
                                     std::int64_t dimensions) {
  return guarded([&] {
    Side& side = next_side(is_backward);
    side.rules[list(signature, length)].outputs.at(at) = {kernel, nullptr, list(sizes, dimensions),
                                                     list(strides, dimensions)};
  });
}

// Lets cuDNN compute an output, in place of the callback. `functions` are those of `Cudnn`, in that order; `parts` has
// four numbers for each part. `calls`, `other_stream` and `most_bytes` are those of `Direct`. All live as long as the
// table.
EXPORTED const char* ucudnn_gate_direct(int is_backward, const std::int64_t* signature, std::int64_t length, int at,
                                        void* const* functions, void* handle, const std::int64_t* parts,
                                        std::int64_t count, std::int64_t workspace_bytes, std::int64_t* calls,
                                        const std::int64_t* other_stream, std::int64_t most_bytes) {
  return guarded([&] {
    auto direct = std::make_shared<Direct>();
    direct->cudnn = {reinterpret_cast<decltype(Cudnn::create)>(functions[0]),
                     reinterpret_cast<decltype(Cudnn::set)>(functions[1]),
                     reinterpret_cast<decltype(Cudnn::finalize)>(functions[2]),
                     reinterpret_cast<decltype(Cudnn::execute)>(functions[3]),
                     reinterpret_cast<decltype(Cudnn::destroy)>(functions[4])};
    direct->handle = handle;
    for (const std::int64_t* part = parts; part < parts + 4 * count; part += 4) {
      direct->parts.push_back({reinterpret_cast<void*>(part[0]), part[1], part[2], part[3]});
    }
    direct->workspace_bytes = workspace_bytes;
    direct->calls = calls;
    direct->other_stream = other_stream;
    direct->most_bytes = most_bytes;
    if (direct->is_bounded()) {
      const auto type = gate().next->key == c10::DispatchKey::CUDA ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
      direct->allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(type));
      TORCH_CHECK(direct->allocator != nullptr, "PyTorch's allocator does not say how many bytes live");
    }
    next_side(is_backward).rules.at(list(signature, length)).outputs.at(at).direct = std::move(direct);
    gate().next->is_direct = true;
  });
}

// States the sizes and strides with which the bias of a forward call is added, unless its kernel fuses it.
EXPORTED const char* ucudnn_gate_bias(const std::int64_t* signature, std::int64_t length, const std::int64_t* sizes,
                                      const std::int64_t* strides, std::int64_t dimensions, int fuses) {
  return guarded([&] {
    Rule& rule = next_side(0).rules.at(list(signature, length));
    rule.bias_sizes = list(sizes, dimensions);
    rule.bias_strides = list(strides, dimensions);
    rule.fuses = fuses != 0;
  });
}

// Passes calls with a signature on while a number is not 0, which may change at any time. It lives as long as the
// table.
EXPORTED const char* ucudnn_gate_bypass(int is_backward, const std::int64_t* signature, std::int64_t length,
                                        const std::int64_t* bypass) {
  return guarded([&] { next_side(is_backward).rules[list(signature, length)].bypass = bypass; });
}

// Uses the table that was begun last. The gate is put in front of an operator for which it has something to do, unless
// it stands there. What it passes on to PyTorch goes to the kernels that were registered before, which must stay. A
// table with nothing to do gives the operators back.
EXPORTED const char* ucudnn_gate_use() {
  return guarded([&] {
    static Quiet quiet;
    const c10::WarningUtils::WarningHandlerGuard silence(&quiet);
    Gate& one = gate();
    TORCH_CHECK(one.next != nullptr, "no table was stated");
    const std::shared_ptr<Table> next = std::move(one.next);
    const bool needs_forward = next->forward.needs_gate(), needs_backward = next->backward.needs_gate();
    const bool is_needed = needs_forward || needs_backward;
    if (one.library == nullptr && !is_needed) return;
    if (one.library == nullptr) {
      one.own_forward = kernel_of("aten::_convolution", next->key);
      one.own_backward = kernel_of("aten::convolution_backward", next->key);
    }
    next->forward.own = one.own_forward;
    next->backward.own = one.own_backward;
    next->is_over_plans = next->forward.python != nullptr || next->backward.python != nullptr;
    for (const Side* side : {&next->forward, &next->backward}) {
      for (const auto& rule : side->rules) {
        for (const Output& output : rule.second.outputs) next->is_mixed |= output.kernel >= 0 && !output.direct;
      }
    }
    std::atomic_store_explicit(&one.now, std::shared_ptr<const Table>(next), std::memory_order_release);
    if (!is_needed) {
      one.library.reset();
      return;
    }
    if (one.library == nullptr) {
      one.library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", next->key, __FILE__, __LINE__);
      one.in_front_of_forward = one.in_front_of_backward = false;
    }
    if (needs_forward && !std::exchange(one.in_front_of_forward, true)) {
      one.library->impl("_convolution", TORCH_FN(gated_forward));
    }
    if (needs_backward && !std::exchange(one.in_front_of_backward, true)) {
      one.library->impl("convolution_backward", TORCH_FN(gated_backward));
    }
  });
}

// Returns how many tables exist: the one that is used or was used last, one that was begun, and earlier ones by which
// other threads still compute.
EXPORTED std::int64_t ucudnn_gate_tables() { return tables; }

// Returns whether all calls that are passed on go to PyTorch's own kernels, without a list of arguments.
EXPORTED int ucudnn_gate_passes_to_own() {
  const std::shared_ptr<const Table> table = table_now();
  return rest_of(table->forward).is_own && rest_of(table->backward).is_own;
}

// Lets no kernel be computed by its handle here (1), and ends that (-1).
EXPORTED const char* ucudnn_gate_in_python(int change) {
  return guarded([&] { count_in_python(change); });
}

// Gives the operators back to PyTorch. The table stays, because another thread may be on its way to it.
EXPORTED const char* ucudnn_gate_close() {
  return guarded([] { gate().library.reset(); });
}
}
