// Kernels that the gate lets cuDNN compute: executions of plans that Python has built.
#pragma once

#include <ATen/ops/empty_strided.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace {

// Functions of cuDNN's backend API; each returns 0 if it succeeds.
struct Cudnn {
  int (*create)(int type, void** descriptor);
  int (*set)(void* descriptor, int attribute, int type, std::int64_t count, const void* values);
  int (*finalize)(void* descriptor);
  int (*execute)(void* handle, void* plan, void* pack);
  int (*destroy)(void* descriptor);
};

// Numbers of cudnn.h.
constexpr int VARIANT_PACK = 16, UNIQUE_IDS = 1000, DATA_POINTERS = 1001, WORKSPACE = 1003, INT64 = 3, VOID_PTR = 6;

constexpr std::uintptr_t ALIGNMENT = 16;       // of tensors
constexpr std::uintptr_t TAIL_ALIGNMENT = 256;  // of a workspace inside an output

// Addresses of x, w, y and, for kernels that add one, of the bias; else that is null.
using Tensors = std::array<void*, 4>;

// One execution of a plan; the fields are those of `DirectPart` in Python.
struct Part {
  void* plan;
  std::int64_t x_offset, y_offset;
  std::int64_t tail_offset;  // of a workspace inside the output; -1: it is the workspace of the kernel
};

// A kernel that cuDNN computes without Python.
struct Direct {
  Cudnn cudnn;
  void* handle;
  std::vector<Part> parts;
  std::int64_t workspace_bytes;
  std::int64_t* calls;  // the first number counts what was computed; the second one is 0 while the plan is current
  const std::int64_t* other_stream;  // 0 while the handle is set to the default stream
  std::int64_t most_bytes = -1;  // what live bytes and the workspace may come to; -1: live bytes are not limited
  c10::DeviceAllocator* allocator = nullptr;  // says how many bytes live, where these are limited

  bool is_bounded() const { return most_bytes >= 0 && workspace_bytes > 0; }
};

// Returns whether the workspace of a bounded kernel may be allocated now.
bool has_room(const Direct& direct, const at::Tensor& like) {
  const auto stats = direct.allocator->getDeviceStats(std::max<c10::DeviceIndex>(0, like.device().index()));
  const auto all = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return direct.workspace_bytes <= direct.most_bytes - stats.allocated_bytes[all].current;
}

// Returns whether the kernel still has this plan, and its handle the default stream.
bool is_current(const Direct& direct) { return direct.calls[1] == 0 && *direct.other_stream == 0; }

// A variant pack of cuDNN: the addresses for one execution of a plan.
class Pack final {
 public:
  Pack(const Cudnn& cudnn, const Tensors& tensors, void* workspace) : cudnn_(cudnn) {
    static const std::int64_t ids[] = {1, 2, 3, 4};  // of x, w, y and the bias in every operation graph
    const std::int64_t count = tensors[3] == nullptr ? 3 : 4;
    fails_ = cudnn.create(VARIANT_PACK, &address_) || cudnn.set(address_, UNIQUE_IDS, INT64, count, ids) ||
             cudnn.set(address_, DATA_POINTERS, VOID_PTR, count, tensors.data()) ||
             cudnn.set(address_, WORKSPACE, VOID_PTR, 1, &workspace) || cudnn.finalize(address_);
  }
  ~Pack() {
    if (address_ != nullptr) cudnn_.destroy(address_);
  }
  Pack(const Pack&) = delete;
  Pack& operator=(const Pack&) = delete;
  bool runs(void* handle, void* plan) const { return !fails_ && cudnn_.execute(handle, plan, address_) == 0; }

 private:
  const Cudnn& cudnn_;
  void* address_ = nullptr;
  bool fails_ = true;
};

std::uintptr_t number(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }

bool are_aligned(const Tensors& tensors) {
  return (number(tensors[0]) | number(tensors[1]) | number(tensors[2]) | number(tensors[3])) % ALIGNMENT == 0;
}

// Memory for a kernel; an undefined tensor if it needs none, or if there is not that much.
at::Tensor workspace_of(const Direct& direct, const at::Tensor& like) {
  if (!direct.workspace_bytes) return {};
  try {
    return at::empty_strided({direct.workspace_bytes}, {1}, like.options().dtype(at::kByte));
  } catch (const c10::OutOfMemoryError&) {
    return {};
  }
}

// Computes a kernel, and returns whether all of it was queued; no other thread may use its handle meanwhile.
bool runs(const Direct& direct, const Tensors& tensors, void* workspace, void* out) {
  for (const Part& part : direct.parts) {
    char* const x = static_cast<char*>(tensors[0]) + part.x_offset;
    char* const y = static_cast<char*>(tensors[2]) + part.y_offset;
    const std::uintptr_t tail = number(out) + part.tail_offset + TAIL_ALIGNMENT - 1;
    void* const own = part.tail_offset < 0 ? workspace : reinterpret_cast<void*>(tail - tail % TAIL_ALIGNMENT);
    if (!Pack(direct.cudnn, {x, tensors[1], y, tensors[3]}, own).runs(direct.handle, part.plan)) return false;
  }
  ++*direct.calls;
  return true;
}

}  // namespace
