// Workspaces: a buffer for each stream of a handle (WR), or one arena for all handles of a GPU (WD).
#ifndef UCUDNN_WORKSPACE_HPP_
#define UCUDNN_WORKSPACE_HPP_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace ucudnn {

struct Buffer {
  char* memory = nullptr;
  std::uint64_t size = 0;
  bool captured = false;  // a CUDA graph has its address
};

// Memory that CUDA graphs have the address of, and nothing else uses any more. It lives as long as its owner, because
// nobody tells when a graph is destroyed.
class Retired {
 public:
  ~Retired() { clear(); }
  void add(char* memory, std::uint64_t size);
  void clear();

 private:
  std::vector<char*> blocks_;
};

// The buffers of one handle. Kernels on one stream run one after another, so they share one buffer, which grows.
class Buffers {
 public:
  ~Buffers();
  // The buffer of the current stream; nothing is allocated.
  const Buffer& current() const { return *current_; }
  void select(cudaStream_t stream);
  // Make the current stream's buffer at least this large; false if there is too little memory.
  bool grow(std::uint64_t size, cudaStream_t stream);
  // A graph captures a call that uses the current stream's buffer.
  void capture() { current_->captured = true; }

 private:
  Retired retired_;
  std::unordered_map<cudaStream_t, Buffer> buffers_;
  Buffer none_;
  Buffer* current_ = &none_;
};

// The arena of one GPU. Segments are disjoint, except that a handle uses one segment for all calls of a problem.
class Arena {
 public:
  // The current generation of decisions; segments of an older generation have other offsets.
  std::uint64_t generation() const { return generation_.load(std::memory_order_acquire); }
  char* memory() const { return memory_; }
  // Count the handles that use the arena; the last one frees it.
  void join();
  void leave();
  // Take a newer division after all work in the old one has ended; false if there is too little memory.
  bool divide(std::uint64_t generation, std::uint64_t size);
  // A graph captures a call that uses the arena. Later divisions use other memory, because segments move.
  void capture() { captured_ = true; }

 private:
  void replace(std::uint64_t size);

  std::mutex mutex_;
  std::atomic<std::uint64_t> generation_{0};
  char* memory_ = nullptr;
  std::uint64_t size_ = 0;
  bool captured_ = false;
  Retired retired_;
  int handles_ = 0;
};

constexpr int kMostDevices = 64;
Arena& arena_of(int device);

}  // namespace ucudnn
#endif
