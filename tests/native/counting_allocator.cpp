// An allocator of PyTorch's CPU tensors that says how many bytes live, as that of a GPU does. It stands in for it in
// tests of limits of memory, and takes the memory from the allocator that was there before.

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

namespace {

std::mutex mutex;
std::int64_t live = 0, peak = 0;
std::map<std::int64_t, std::int64_t> after;  // by size: the most bytes that lived after an allocation of it

void count(std::int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  live += bytes;
  peak = std::max(peak, live);
  if (bytes > 0) after[bytes] = std::max(after[bytes], live);
}

struct Block {
  c10::DataPtr memory;
  std::int64_t bytes;
};

void release(void* block) {
  auto* const one = static_cast<Block*>(block);
  count(-one->bytes);
  delete one;
}

class Counting final : public c10::DeviceAllocator {
 public:
  explicit Counting(c10::Allocator* inner) : inner_(inner) {}
  c10::DataPtr allocate(std::size_t bytes) override {
    auto* const block = new Block{inner_->allocate(bytes), static_cast<std::int64_t>(bytes)};
    count(block->bytes);
    return {block->memory.get(), block, &release, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    const std::lock_guard<std::mutex> lock(mutex);
    c10::CachingDeviceAllocator::DeviceStats found;
    found.allocated_bytes[0].current = live;
    return found;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
  c10::Allocator* inner() const { return inner_; }

 private:
  c10::Allocator* const inner_;
};

Counting* used = nullptr;

}  // namespace

extern "C" {

// Counts from now on; what was allocated before is not counted.
void count_begin() {
  if (used == nullptr) used = new Counting(c10::GetAllocator(c10::DeviceType::CPU));
  c10::SetAllocator(c10::DeviceType::CPU, used);
}

// Counts no new memory, but what is freed of that which was counted.
void count_end() { c10::SetAllocator(c10::DeviceType::CPU, used->inner()); }

std::int64_t count_live() { return live; }

// Returns the most bytes that lived since this was last called.
std::int64_t count_peak() {
  const std::lock_guard<std::mutex> lock(mutex);
  after.clear();
  return std::exchange(peak, live);
}

// Returns the most bytes that lived after an allocation of this size since `count_peak` was called; 0 without any.
std::int64_t count_after(std::int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = after.find(bytes);
  return found == after.end() ? 0 : found->second;
}
}
