#include "workspace.hpp"

namespace ucudnn {

Buffers::~Buffers() {
  for (auto& entry : buffers_) cudaFree(entry.second.memory);  // waits until no kernel uses the memory
}

void Buffers::select(cudaStream_t stream) { current_ = &buffers_[stream]; }

bool Buffers::grow(std::uint64_t size, cudaStream_t stream) {
  if (current_ == &none_) select(stream);
  if (size <= current_->size) return true;
  // The old buffer is freed first, so that both are never held at the same time.
  cudaStreamSynchronize(stream);
  cudaFree(current_->memory);
  *current_ = Buffer();
  void* memory = nullptr;
  if (cudaMalloc(&memory, size) != cudaSuccess) {
    cudaGetLastError();  // handled here, so clear it
    return false;
  }
  current_->memory = static_cast<char*>(memory);
  current_->size = size;
  return true;
}

void Arena::join() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++handles_;
}

void Arena::leave() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (--handles_ == 0) {
    cudaFree(memory_);  // waits until no kernel uses the memory
    memory_ = nullptr;
    size_ = 0;
    generation_ = 0;  // the next handle allocates an arena again
  }
}

bool Arena::divide(std::uint64_t generation, std::uint64_t size) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (generation <= generation_.load(std::memory_order_relaxed)) return size == 0 || memory_;
  if (memory_) cudaDeviceSynchronize();
  if (size != size_) {
    cudaFree(memory_);
    memory_ = nullptr;
    size_ = 0;
    void* memory = nullptr;
    if (size && cudaMalloc(&memory, size) == cudaSuccess) {
      memory_ = static_cast<char*>(memory);
      size_ = size;
    } else if (size) {
      cudaGetLastError();  // handled here, so clear it
    }
  }
  generation_.store(generation, std::memory_order_release);
  return size == 0 || memory_;
}

Arena& arena_of(int device) {
  // Never destroyed, because CUDA may be unloaded before statics are destroyed.
  static Arena* arenas = new Arena[kMostDevices];
  return arenas[device >= 0 && device < kMostDevices ? device : 0];
}

}  // namespace ucudnn
