// The object behind a ucudnn_handle_t: cuDNN's handle, the convolutions that it knows, and their prepared plans.
#ifndef UCUDNN_HANDLE_HPP_
#define UCUDNN_HANDLE_HPP_

#include <atomic>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "overlap.hpp"
#include "planner.hpp"
#include "question.hpp"
#include "workspace.hpp"

namespace ucudnn {

struct Call {
  int operation;
  const ucudnn_descriptors* descriptors;
  const void *alpha, *beta;
  char *x, *w, *y;
  const ucudnn_plain* plain;
};

// The variant packs of one plan for one set of addresses: one for each step.
struct Packs {
  char *x, *w, *y, *workspace;
  std::vector<cudnnBackendDescriptor_t> descriptors;
};

// A plan for one alpha and beta with its variant packs, which it owns; so it is not copied.
class PreparedPlan {
 public:
  PreparedPlan(const Answer& answer, bool is_double, double alpha, double beta, int alignment);
  ~PreparedPlan();
  PreparedPlan(const PreparedPlan&) = delete;
  PreparedPlan& operator=(const PreparedPlan&) = delete;

  bool is_for(double alpha, double beta, int alignment) const {
    return alpha == alpha_ && beta == beta_ && alignment == alignment_;
  }
  const std::vector<Step>& steps() const { return steps_; }
  std::uint64_t generation() const { return generation_; }
  std::uint64_t workspace_bytes() const { return workspace_bytes_; }
  std::uint64_t token() const { return token_; }
  bool divided() const { return divided_; }
  std::uint64_t offset() const { return offset_; }
  // Whether a CUDA graph has calls of this plan. It needs the compiled kernels that execution plans own, but no packs.
  bool captured() const { return captured_; }
  void capture() { captured_ = true; }
  // Count a call of its kernel. Handles of several threads may share the count.
  void count() const { __atomic_fetch_add(calls_, 1, __ATOMIC_RELAXED); }

  // Execute all steps. Returns cuDNN's status; if it is not success, `done` is the number of steps that were queued.
  cudnnStatus_t run(cudnnHandle_t cudnn, int operation, char* x, char* w, char* y, char* workspace, std::size_t* done);

 private:
  const Packs* packs(char* x, char* w, char* y, char* workspace);
  cudnnStatus_t legacy(cudnnHandle_t cudnn, int operation, const Step& step, char* x, char* w, char* y,
                       char* workspace) const;

  std::vector<Step> steps_;
  std::vector<Packs> packs_;
  std::size_t latest_ = 0, oldest_ = 0;  // indices of packs
  double alpha_, beta_;
  int alignment_;
  bool divided_, double_, captured_ = false;
  float alpha_single_, beta_single_;
  std::uint64_t generation_, workspace_bytes_, offset_, token_;
  std::uint64_t* calls_;
};

constexpr std::int64_t kUnstated = UCUDNN_NO_LIMIT - 1;  // the caller stated neither a limit nor that there is none

// A convolution that a handle knows.
struct Kernel {
  bool asked = false;
  bool plain = false;  // plain cuDNN computes it
  std::int64_t limit = kUnstated;  // the limit that was stated last
  std::uint64_t generation = 0;    // older plans are out of date
  std::vector<PreparedPlan*> plans;
  Extents extents;
};

class Handle {
 public:
  explicit Handle(cudnnHandle_t cudnn);
  ~Handle();

  cudnnHandle_t cudnn() const { return cudnn_; }
  std::atomic<bool>& busy() { return busy_; }  // whether a call uses the handle
  cudnnStatus_t set_stream(cudaStream_t stream);
  bool divides(int operation, const ucudnn_descriptors& descriptors, std::int64_t limit);
  cudnnStatus_t convolve(const Call& call);

 private:
  cudnnStatus_t follow(cudaStream_t stream);
  bool capturing() const;
  cudnnStatus_t plain(const Call& call) const;
  cudnnStatus_t plain(const Call& call, int algorithm) const;
  PreparedPlan* ready(const Kernel& kernel, const Request& request) const;
  PreparedPlan* find(Kernel& kernel, Request request);
  PreparedPlan* plan(Kernel& kernel, Request request);
  bool make_room(const Answer& answer);
  cudnnStatus_t run(PreparedPlan* prepared, const Call& call, bool captured, std::size_t* done);
  cudnnStatus_t run_captured(const Kernel& kernel, const Request& request, const Call& call);
  cudnnStatus_t recover(Kernel& kernel, Request request, const Call& call, PreparedPlan* prepared, std::size_t done,
                        cudnnStatus_t status);
  void drop(Kernel& kernel, PreparedPlan* prepared);

  std::atomic<bool> busy_{false};
  cudnnHandle_t cudnn_;
  std::uint64_t number_;
  int device_ = 0;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t last_ = nullptr;  // after the last work in the arena; never recorded in a capture
  bool waits_ = false;          // the current stream has yet to wait for it
  Buffers buffers_;
  Arena* arena_;
  std::unordered_map<Question, Kernel, QuestionHash> kernels_;
  std::vector<PreparedPlan*> retired_;  // used by CUDA graphs only
};

}  // namespace ucudnn

struct ucudnn_handle : ucudnn::Handle {
  using ucudnn::Handle::Handle;
};
#endif
