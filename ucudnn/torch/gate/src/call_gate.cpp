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

// Reads the numbers in which Python states a table. A list begins with its length.
class Reader final {
 public:
  Reader(const std::int64_t* numbers, std::int64_t count) : next_(numbers), end_(numbers + count) {}
  std::int64_t number() {
    TORCH_CHECK(next_ != end_, "the table ends too early");
    return *next_++;
  }
  Numbers list() {
    const std::int64_t count = number();
    TORCH_CHECK(0 <= count && count <= end_ - next_, "the table ends too early");
    const std::int64_t* const first = std::exchange(next_, next_ + count);
    return Numbers(first, next_);
  }
  template <typename Address>
  void address(Address& found) {
    found = reinterpret_cast<Address>(number());
  }

 private:
  const std::int64_t* next_;
  const std::int64_t* const end_;
};

// Reads a kernel that cuDNN computes: the fields of its parts, then those of `Direct`; null where it has no parts.
std::shared_ptr<const Direct> read_direct(Reader& read, c10::DispatchKey key) {
  const Numbers parts = read.list();
  if (parts.empty()) return nullptr;
  auto direct = std::make_shared<Direct>();
  for (std::size_t at = 0; at + 3 < parts.size(); at += 4) {
    direct->parts.push_back({reinterpret_cast<void*>(parts[at]), parts[at + 1], parts[at + 2], parts[at + 3]});
  }
  read.address(direct->cudnn.create);
  read.address(direct->cudnn.set);
  read.address(direct->cudnn.finalize);
  read.address(direct->cudnn.execute);
  read.address(direct->cudnn.destroy);
  read.address(direct->handle);
  direct->workspace_bytes = read.number();
  read.address(direct->calls);
  read.address(direct->other_stream);
  direct->most_bytes = read.number();
  if (direct->is_bounded()) {
    const auto type = key == c10::DispatchKey::CUDA ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
    direct->allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(type));
    TORCH_CHECK(direct->allocator != nullptr, "PyTorch's allocator does not say how many bytes live");
  }
  return direct;
}

// Reads the rules of one operator; `name` is that of its operator with a kernel in Python, or null.
void read_side(Reader& read, Table& table, Side& side, const char* name) {
  if (name != nullptr) {
    side.python = kernel_of(name, table.key);
    table.is_over_plans = true;
  }
  for (std::int64_t left = read.number(); left > 0; --left) {
    Rule& rule = side.rules[read.list()];
    read.address(rule.bypass);
    rule.bias_sizes = read.list();
    rule.bias_strides = read.list();
    rule.fuses = read.number() != 0;
    for (Output& output : rule.outputs) {
      output.kernel = read.number();
      if (output.kernel < 0) continue;
      output.sizes = read.list();
      output.strides = read.list();
      output.direct = read_direct(read, table.key);
      (output.direct ? table.is_direct : table.is_mixed) = true;
    }
  }
}

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

}  // namespace

// Each function returns nullptr, or the text of an error, which lives until the thread calls the next one.
extern "C" {

// Uses a table for a device type, with a callback; `python_forward` and `python_backward` name the operators whose
// kernels in Python compute calls that no rule computes, by plans within a stated limit, or are null. `numbers` are
// those of `Reader`; what they point to lives as long as the table.
//
// The gate is put in front of an operator for which it has something to do, unless it stands there. What it passes on
// to PyTorch goes to the kernels that were registered before, which must stay. A table with nothing to do gives the
// operators back.
EXPORTED const char* ucudnn_gate_use(const char* device_type, Callback callback, const char* python_forward,
                                     const char* python_backward, const std::int64_t* numbers, std::int64_t count) {
  return guarded([&] {
    static Quiet quiet;
    const c10::WarningUtils::WarningHandlerGuard silence(&quiet);
    Gate& one = gate();
    const auto next = std::make_shared<Table>();
    next->key = c10::parseDispatchKey(device_type);
    next->callback = callback;
    Reader read(numbers, count);
    read_side(read, *next, next->forward, python_forward);
    read_side(read, *next, next->backward, python_backward);
    const bool needs_forward = next->forward.needs_gate(), needs_backward = next->backward.needs_gate();
    const bool is_needed = needs_forward || needs_backward;
    if (one.library == nullptr && !is_needed) return;
    if (one.library == nullptr) {
      one.own_forward = kernel_of("aten::_convolution", next->key);
      one.own_backward = kernel_of("aten::convolution_backward", next->key);
    }
    next->forward.own = one.own_forward;
    next->backward.own = one.own_backward;
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

// Returns how many tables exist: the one that is used or was used last, and earlier ones by which other threads still
// compute.
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
