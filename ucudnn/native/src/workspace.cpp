#include "workspace.hpp"

#include "planner.hpp"

namespace ucudnn {
namespace {

// Lets this thread allocate and free while other threads capture graphs, whose captures would end else.
class Relaxed {
 public:
  Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Memory, or null if there is too little.
char* allocate(std::uint64_t size) {
  const Relaxed relaxed;
  void* memory = nullptr;
  if (cudaMalloc(&memory, size) == cudaSuccess) return static_cast<char*>(memory);
  cudaGetLastError();  // handled by the caller, so clear it
  return nullptr;
}

void release(char* memory) {
  const Relaxed relaxed;
  cudaFree(memory);  // waits until no kernel uses the memory
}

}  // namespace

void Retired::add(char* memory, std::uint64_t size) {
  if (!memory) return;
  blocks_.push_back(memory);
  say("a workspace of %llu bytes is replaced, but kept as well, because a CUDA graph was captured with it",
      static_cast<unsigned long long>(size));
}

void Retired::clear() {
  for (char* each : blocks_) release(each);
  blocks_.clear();
}

Buffers::~Buffers() {
  for (auto& entry : buffers_) release(entry.second.memory);
}

void Buffers::select(cudaStream_t stream) { current_ = &buffers_[stream]; }

bool Buffers::grow(std::uint64_t size, cudaStream_t stream) {
  if (current_ == &none_) select(stream);
  if (size <= current_->size) return true;
  if (current_->captured) {
    retired_.add(current_->memory, current_->size);
  } else {  // the old buffer is freed first, so that both are never held at the same time
    cudaStreamSynchronize(stream);
    release(current_->memory);
  }
  *current_ = Buffer();
  current_->memory = allocate(size);
  if (current_->memory) current_->size = size;
  return current_->memory != nullptr;
}

void Arena::join() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++handles_;
}

void Arena::leave() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (--handles_ == 0) {
    release(memory_);
    retired_.clear();
    memory_ = nullptr;
    size_ = 0;
    captured_ = false;
    generation_ = 0;  // the next handle allocates an arena again
  }
}

bool Arena::divide(std::uint64_t generation, std::uint64_t size) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (generation <= generation_.load(std::memory_order_relaxed)) return size == 0 || memory_;
  if (memory_) cudaDeviceSynchronize();
  if (size != size_ || captured_) replace(size);
  generation_.store(generation, std::memory_order_release);
  return size == 0 || memory_;
}

void Arena::replace(std::uint64_t size) {
  if (captured_) {
    retired_.add(memory_, size_);
  } else {
    release(memory_);
  }
  captured_ = false;
  memory_ = size ? allocate(size) : nullptr;
  size_ = memory_ ? size : 0;
}

Arena& arena_of(int device) {
  // Never destroyed, because CUDA may be unloaded before statics are destroyed.
  static Arena* arenas = new Arena[kMostDevices];
  return arenas[device >= 0 && device < kMostDevices ? device : 0];
}

}  // namespace ucudnn
