#include "handle.hpp"

#include <algorithm>
#include <atomic>
#include <string>

namespace ucudnn {
namespace {

constexpr int kMostReplacements = 8;  // in one call; so many failures are not the fault of algorithms
constexpr int kMostAlignment = 16;
constexpr int kMostAlgorithms = CUDNN_CONVOLUTION_FWD_ALGO_COUNT;  // Forward has the most algorithms
constexpr std::size_t kMostPlans = 64;

std::atomic<std::uint64_t> handles{0};

int alignment_of(const void* x, const void* w, const void* y) {
  const std::uintptr_t low = (reinterpret_cast<std::uintptr_t>(x) | reinterpret_cast<std::uintptr_t>(w) |
                              reinterpret_cast<std::uintptr_t>(y)) & (kMostAlignment - 1);
  return low ? static_cast<int>(low & -low) : kMostAlignment;
}

// Whether cuDNN did nothing, because it does not support the call.
bool is_refused(cudnnStatus_t status) { return status / 1000 == 2 || status / 1000 == 3; }

}  // namespace

Handle::Handle(cudnnHandle_t cudnn) : cudnn_(cudnn), number_(++handles) {
  cudaGetDevice(&device_);
  arena_ = &arena_of(device_);
  arena_->join();
  cudnnGetStream(cudnn_, &stream_);
  buffers_.select(stream_);
}

Handle::~Handle() {
  int device = device_;
  cudaGetDevice(&device);
  if (device != device_) cudaSetDevice(device_);
  if (!kernels_.empty()) cudaDeviceSynchronize();  // waits for its work, even on streams that were destroyed
  for (auto& entry : kernels_) {
    for (PreparedPlan* each : entry.second.plans) delete each;
  }
  for (PreparedPlan* each : retired_) delete each;
  if (const Callbacks* python = planner()) python->forget(number_, 0);
  if (last_) cudaEventDestroy(last_);
  arena_->leave();
  if (device != device_) cudaSetDevice(device);
}

cudnnStatus_t Handle::set_stream(cudaStream_t stream) {
  const cudnnStatus_t status = cudnnSetStream(cudnn_, stream);
  return status == CUDNN_STATUS_SUCCESS ? follow(stream) : status;
}

cudnnStatus_t Handle::follow(cudaStream_t stream) {
  if (stream == stream_) return CUDNN_STATUS_SUCCESS;
  stream_ = stream;
  buffers_.select(stream);
  waits_ = true;
  return CUDNN_STATUS_SUCCESS;
}

// Whether a CUDA graph is being captured on the current stream. CUDA refuses to synchronize and to wait for earlier
// work then, and an event that is recorded then cannot be waited for later.
bool Handle::capturing() const {
  // The null stream cannot be captured, and asking about it would end the capture of another stream.
  if (stream_ == nullptr || stream_ == cudaStreamLegacy) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream_, &status) != cudaSuccess) {
    cudaGetLastError();  // an ended stream, say; what is called next tells
    return false;
  }
  return status != cudaStreamCaptureStatusNone;
}

bool Handle::divides(int operation, const ucudnn_descriptors& descriptors, std::int64_t limit) {
  const Callbacks* python = planner();
  Question question;
  if (!python || !read_question(operation, descriptors, &question)) return false;
  Kernel& kernel = kernels_[question];
  if (!kernel.asked || (limit != kUnstated && limit != kernel.limit)) {
    const bool captured = capturing();
    if (captured && !kernel.asked) return false;  // nothing is planned in a capture
    Answer answer = {};
    kernel.plain = python->ask(number_, device_, &question, limit, &answer) != 0;
    stop_at_exit();  // the report tells of what is plain, too
    if (kernel.plain) {
      say_plain(answer.text ? answer.text : "");
    } else {
      kernel.generation = answer.generation;  // after a change of a limit, plans are out of date
      if (!captured) arena_->divide(answer.generation, answer.arena_bytes);
    }
    kernel.asked = true;
    kernel.limit = limit;
  }
  return !kernel.plain;
}

cudnnStatus_t Handle::convolve(const Call& call) {
  const Callbacks* python = planner();
  Question question;
  if (!python || !call.alpha || !call.beta || !read_question(call.operation, *call.descriptors, &question)) {
    return plain(call);
  }
  if (wants_determinism(call.operation, call.plain->algorithm)) {
    const auto registered = kernels_.find(question);  // if that one is plain, the caller got cuDNN's algorithm
    if (registered != kernels_.end() && registered->second.plain) return plain(call);
    question.deterministic = 1;
  }
  Kernel& kernel = kernels_[question];
  if (!kernel.extents.known) kernel.extents = extents_of(question);
  const std::string overlapping = overlap(call.operation, kernel.extents, call.x, call.w, call.y);
  if (!overlapping.empty()) {
    say_once(overlapping);
    return CUDNN_STATUS_BAD_PARAM;
  }
  if (kernel.plain) return plain(call);
  cudaStream_t stream = stream_;
  cudnnGetStream(cudnn_, &stream);  // it may have been set on cuDNN's own handle, and each stream has a workspace
  const cudnnStatus_t followed = follow(stream);
  if (followed != CUDNN_STATUS_SUCCESS) return followed;
  const bool is_double = question.x_type == CUDNN_DATA_DOUBLE;
  Request request = {};
  request.question = &question;
  request.handle = number_;
  request.cudnn = cudnn_;
  request.device = device_;
  request.alignment = alignment_of(call.x, call.w, call.y);
  request.alpha = is_double ? *static_cast<const double*>(call.alpha) : *static_cast<const float*>(call.alpha);
  request.beta = is_double ? *static_cast<const double*>(call.beta) : *static_cast<const float*>(call.beta);
  request.most_bytes = UINT64_MAX;
  if (capturing()) return run_captured(kernel, request, call);
  // A handle has the same segments on all streams, so a new stream waits for the work of the old one in them.
  if (waits_ && last_ && cudaStreamWaitEvent(stream_, last_, 0) != cudaSuccess) return CUDNN_STATUS_EXECUTION_FAILED;
  waits_ = false;
  PreparedPlan* prepared = find(kernel, request);
  if (!prepared) {
    kernel.plain = true;  // so that the reason is not written at every call
    return plain(call);
  }
  prepared->count();
  std::size_t done = 0;
  const cudnnStatus_t status = run(prepared, call, false, &done);
  return status == CUDNN_STATUS_SUCCESS ? status : recover(kernel, request, call, prepared, done, status);
}

// In a capture, nothing is planned, measured, allocated or waited for; the caller keeps the order of graphs and calls.
cudnnStatus_t Handle::run_captured(const Kernel& kernel, const Request& request, const Call& call) {
  PreparedPlan* prepared = ready(kernel, request);
  if (!prepared) {
    say_plain("a convolution is captured in a CUDA graph before it was planned; call it once before the capture");
    return plain(call);
  }
  prepared->count();
  std::size_t done = 0;
  const cudnnStatus_t status = run(prepared, call, true, &done);
  if (status == CUDNN_STATUS_SUCCESS || done > 0) return status;
  say_plain(std::string(cudnnGetErrorString(status)) + " from " + prepared->steps()[0].name + " in a capture");
  return plain(call);
}

// A plan that can be executed as things are, or null.
PreparedPlan* Handle::ready(const Kernel& kernel, const Request& request) const {
  const std::uint64_t generation = arena_->generation();
  for (PreparedPlan* each : kernel.plans) {
    if (each->is_for(request.alpha, request.beta, request.alignment)) {
      const bool fits = each->divided() || each->workspace_bytes() <= buffers_.current().size;
      return fits && each->generation() == generation && generation >= kernel.generation ? each : nullptr;
    }
  }
  return nullptr;
}

// If there is a prepared plan, this calls no Python, takes no lock and allocates nothing.
PreparedPlan* Handle::find(Kernel& kernel, Request request) {
  if (PreparedPlan* prepared = ready(kernel, request)) return prepared;
  const std::uint64_t generation = arena_->generation();
  for (std::size_t i = 0; i < kernel.plans.size(); ++i) {
    PreparedPlan* each = kernel.plans[i];
    if (!each->is_for(request.alpha, request.beta, request.alignment)) continue;
    if (each->generation() == generation && generation >= kernel.generation) {
      if (buffers_.grow(each->workspace_bytes(), stream_)) return each;  // the first call on another stream
      request.most_bytes = each->workspace_bytes() / 2;
    }
    drop(kernel, each);
    break;
  }
  return plan(kernel, request);
}

PreparedPlan* Handle::plan(Kernel& kernel, Request request) {
  const Callbacks* python = planner();
  for (int attempt = 0; python && attempt < kMostReplacements; ++attempt) {
    Answer answer = {};
    // A callback that ends with a Python exception returns 0 too.
    if (python->plan(&request, &answer) != 0 || answer.count < 1 || !answer.steps) {
      say_plain(answer.text ? answer.text : "nothing was planned");
      return nullptr;
    }
    stop_at_exit();
    if (!make_room(answer)) {
      python->forget(number_, answer.token);
      if (answer.divided) {
        say_plain("no room for a total workspace of " + std::to_string(answer.arena_bytes) + " bytes");
        return nullptr;
      }
      request.most_bytes = answer.workspace_bytes / 2;
      continue;
    }
    if (answer.generation < arena_->generation()) {  // another handle divided the arena meanwhile
      python->forget(number_, answer.token);
      continue;
    }
    if (verbose() && answer.text) say("%s", answer.text);
    if (kernel.plans.size() >= kMostPlans) {
      while (!kernel.plans.empty()) drop(kernel, kernel.plans.back());
    }
    const bool is_double = request.question->x_type == CUDNN_DATA_DOUBLE;
    kernel.plans.push_back(new PreparedPlan(answer, is_double, request.alpha, request.beta, request.alignment));
    return kernel.plans.back();
  }
  say_plain("the GPU's memory has no room for a workspace");
  return nullptr;
}

bool Handle::make_room(const Answer& answer) {
  if (!arena_->divide(answer.generation, answer.arena_bytes)) return false;
  if (!answer.divided) return buffers_.grow(answer.workspace_bytes, stream_);
  return last_ || cudaEventCreateWithFlags(&last_, cudaEventDisableTiming) == cudaSuccess;
}

cudnnStatus_t Handle::run(PreparedPlan* prepared, const Call& call, bool captured, std::size_t* done) {
  if (captured) {  // the graph keeps addresses
    prepared->capture();
    if (prepared->divided()) arena_->capture();
    else if (prepared->workspace_bytes()) buffers_.capture();
  }
  char* workspace = prepared->divided() ? arena_->memory() + prepared->offset() : buffers_.current().memory;
  const cudnnStatus_t status = prepared->run(cudnn_, call.operation, call.x, call.w, call.y, workspace, done);
  if (prepared->divided() && !captured) cudaEventRecord(last_, stream_);
  return status;
}

// Compute the samples that a failed plan left with other algorithms.
cudnnStatus_t Handle::recover(Kernel& kernel, Request request, const Call& call, PreparedPlan* prepared,
                              std::size_t done, cudnnStatus_t status) {
  std::string failed;
  for (int attempt = 0; attempt < kMostReplacements; ++attempt) {
    const Step& step = prepared->steps()[done];
    failed = step.name;
    request.start = step.start;
    request.failed = failed.c_str();
    say("%s from %s: going on with the next best", cudnnGetErrorString(status), failed.c_str());
    drop(kernel, prepared);
    prepared = plan(kernel, request);
    if (!prepared) {
      kernel.plain = true;
      return request.start == 0 ? plain(call) : status;
    }
    status = run(prepared, call, false, &done);
    if (status == CUDNN_STATUS_SUCCESS) {
      if (request.start > 0) drop(kernel, prepared);  // the plan was only for the rest of this call
      return status;
    }
  }
  return status;
}

void Handle::drop(Kernel& kernel, PreparedPlan* prepared) {
  const std::uint64_t token = prepared->token();
  kernel.plans.erase(std::remove(kernel.plans.begin(), kernel.plans.end(), prepared), kernel.plans.end());
  // A plan owns its compiled kernels, which may still run on another stream, or be in a graph.
  if (prepared->captured() || cudaDeviceSynchronize() != cudaSuccess) {
    retired_.push_back(prepared);
    return;
  }
  delete prepared;
  if (const Callbacks* python = planner()) python->forget(number_, token);
}

cudnnStatus_t Handle::plain(const Call& call) const {
  const int asked = call.plain->algorithm;
  const cudnnStatus_t status = plain(call, asked);
  if (call.plain->workspace_bytes || !is_refused(status)) return status;
  // The caller may have got algorithm 0 or 1 as one without workspace. Then any algorithm without workspace serves.
  const bool repeats = wants_determinism(call.operation, asked);
  for (int other = 0; other < kMostAlgorithms; ++other) {
    if (other == asked || (repeats && call.operation != UCUDNN_FORWARD && !wants_determinism(call.operation, other))) {
      continue;
    }
    const cudnnStatus_t then = plain(call, other);
    if (!is_refused(then)) return then;
  }
  return status;
}

cudnnStatus_t Handle::plain(const Call& call, int algorithm) const {
  const ucudnn_descriptors& own = *call.descriptors;
  const ucudnn_plain& how = *call.plain;
  switch (call.operation) {
    case UCUDNN_FORWARD:
      return cudnnConvolutionForward(cudnn_, call.alpha, own.x, call.x, own.w, call.w, own.convolution,
                                     static_cast<cudnnConvolutionFwdAlgo_t>(algorithm), how.workspace,
                                     how.workspace_bytes, call.beta, own.y, call.y);
    case UCUDNN_BACKWARD_DATA:
      return cudnnConvolutionBackwardData(cudnn_, call.alpha, own.w, call.w, own.y, call.y, own.convolution,
                                          static_cast<cudnnConvolutionBwdDataAlgo_t>(algorithm), how.workspace,
                                          how.workspace_bytes, call.beta, own.x, call.x);
    default:
      return cudnnConvolutionBackwardFilter(cudnn_, call.alpha, own.x, call.x, own.y, call.y, own.convolution,
                                            static_cast<cudnnConvolutionBwdFilterAlgo_t>(algorithm),
                                            how.workspace, how.workspace_bytes, call.beta, own.w, call.w);
  }
}

}  // namespace ucudnn
