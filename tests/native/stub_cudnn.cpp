// A stand-in for cuDNN, the CUDA runtime and its driver on host memory. It keeps descriptors, and computes convolutions
// with direct loops.
//
// Each operation has two algorithms in either API. Algorithm 0, which is engine 0, is slow and needs no workspace.
// Algorithm 1, which is engine 1, is fast and needs workspace that grows with the batch. Times are those of a simulated
// clock, so that plans do not depend on this machine. All calls are recorded. Pointers, alignment and workspaces are
// checked at least as strictly as by cuDNN.
//
// Streams can be captured into graphs. What CUDA does not allow in a capture is an error here too, and ends the capture.
// A graph that is launched needs its memory and its execution plans; if one is gone, the launch is an error.
#include <cudnn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

using Ints = std::vector<std::int64_t>;

struct cudnnContext { cudaStream_t stream = nullptr; };
struct cudnnTensorStruct { int type = 0; Ints size, stride; };
struct cudnnFilterStruct { int type = 0, format = 0; Ints size; };
struct cudnnConvolutionStruct { Ints padding, stride, dilation; int mode = 1, compute = 0, math = 0, groups = 1; };
using Nodes = std::vector<std::function<cudaError_t()>>;
struct CUgraph_st { Nodes nodes; };
struct CUgraphExec_st { Nodes nodes; };
struct CUevent_st { std::uint64_t capture = 0; };  // the capture in which it was recorded last

extern "C" struct StubCall {
  int api, operation, batch, algorithm;  // api: 0 graph, 1 legacy
  double alpha, beta;
  const void *x, *w, *y, *workspace, *handle, *stream;
};

namespace {

std::mutex mutex;
std::vector<StubCall> calls;
std::atomic<int> handles{0}, backend_descriptors{0};
std::atomic<std::int64_t> allocated{0}, largest_allocation{1ll << 40}, waits{0};
std::atomic<std::int64_t> clock_us{0};  // simulated time of the convolutions
std::atomic<int> fail_from{-1};  // calls that succeed before engine 1 fails; -1: it does not fail
std::atomic<bool> refuse_gaps{false};  // engine 1 refuses gaps between channels
std::atomic<bool> refuse_bias{false};  // no engine adds a bias
std::atomic<bool> refuse_lent{false};  // plans of another handle do not run
std::atomic<int> rows{0};  // rows of the volume: calls with fewer rows take less time; 0: all take the same time
std::atomic<void (*)()> interruption{nullptr};  // is called in each convolution, between its workspace and its result
std::atomic<bool> idle{false};  // calls return at once, and compute and record nothing
struct Block { std::size_t size; std::uint64_t number; };
std::map<void*, Block> blocks;
std::uint64_t block_numbers = 0;

// A capture, which several streams may have joined.
struct Capture {
  std::uint64_t number;
  bool ended = false;  // by a call that is not allowed
  Nodes nodes;
};
std::map<cudaStream_t, std::shared_ptr<Capture>> captures;
std::uint64_t capture_numbers = 0;
thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

std::shared_ptr<Capture> capture_of(cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = captures.find(stream);
  return found == captures.end() ? nullptr : found->second;
}

cudaError_t end(Capture& capture, cudaError_t error) {
  capture.ended = true;
  return error;
}

// The error of a call that is not allowed while any stream is captured; it ends the captures.
cudaError_t unsafe(bool is_relaxed) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (is_relaxed || captures.empty()) return cudaSuccess;
  for (auto& entry : captures) entry.second->ended = true;
  return cudaErrorStreamCaptureUnsupported;
}

// The number of the block that holds an address; 0 if none does.
std::uint64_t block_at(const void* address) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = blocks.upper_bound(const_cast<void*>(address));
  if (found == blocks.begin()) return 0;
  --found;
  return static_cast<const char*>(address) < static_cast<char*>(found->first) + found->second.size
             ? found->second.number : 0;
}

struct Problem {
  int operation, type, groups;
  Ints x, x_stride, w, w_stride, y, y_stride, padding, post_padding, stride, dilation;
  double alpha, beta;
  const void* bias = nullptr;  // dense
};

// Whether y has the size that x, w and the parameters give.
bool fits(const Problem& p) {
  for (std::size_t i = 0; i + 2 < p.x.size(); ++i) {
    const std::int64_t reach = (p.w[i + 2] - 1) * p.dilation[i] + 1;
    if (p.y[i + 2] != (p.x[i + 2] + p.padding[i] + p.post_padding[i] - reach) / p.stride[i] + 1) return false;
  }
  return true;
}

bool has_gaps(const Ints& size, const Ints& stride) {
  std::int64_t channel = 1;
  for (std::size_t i = 2; i < size.size(); ++i) channel *= size[i];
  return stride[1] != 1 && stride[1] > channel;
}

std::size_t item(int type) { return type == CUDNN_DATA_DOUBLE ? 8 : 4; }

std::int64_t sample(const Ints& size) {
  std::int64_t product = 1;
  for (std::size_t i = 1; i < size.size(); ++i) product *= size[i];
  return product;
}

// How many times the bytes of x the fast algorithm needs.
std::size_t scale() {
  static const char* asked = std::getenv("STUB_WORKSPACE_SCALE");
  static const std::size_t times = asked ? std::strtoul(asked, nullptr, 10) : 1;
  return times;
}

std::size_t need(const Problem& p, int algorithm) {
  return algorithm ? p.x[0] * sample(p.x) * item(p.type) * scale() : 0;
}

// A spatial dimension; missing ones have size 1.
struct Axis {
  std::int64_t inputs = 1, taps = 1, outputs = 1, stride = 1, padding = 0, dilation = 1;
  std::int64_t x_step = 0, w_step = 0, y_step = 0;

  // Where a tap reads x; below 0 where that is outside.
  std::int64_t place(std::int64_t output, std::int64_t tap) const {
    const std::int64_t found = output * stride - padding + tap * dilation;
    return found < inputs ? found : -1;
  }
};

template <typename T>
void compute(const Problem& p, T* x, T* w, T* y) {
  Axis axes[3];
  for (std::size_t i = 0; i + 2 < p.x.size(); ++i)
    axes[i] = {p.x[i + 2], p.w[i + 2], p.y[i + 2], p.stride[i], p.padding[i], p.dilation[i],
               p.x_stride[i + 2], p.w_stride[i + 2], p.y_stride[i + 2]};
  const Axis a0 = axes[0], a1 = axes[1], a2 = axes[2];
  const int operation = p.operation;
  const std::int64_t channels = p.w[1], filters = p.w[0] / p.groups;
  T* out = p.operation == 0 ? y : p.operation == 1 ? x : w;
  const Ints& out_size = p.operation == 0 ? p.y : p.operation == 1 ? p.x : p.w;
  const Ints& out_stride = p.operation == 0 ? p.y_stride : p.operation == 1 ? p.x_stride : p.w_stride;
  std::int64_t extent = 1;
  for (std::size_t i = 0; i < out_size.size(); ++i) extent += (out_size[i] - 1) * out_stride[i];
  std::vector<double> sums(extent);
  for (std::int64_t b = 0; b < p.x[0]; ++b)
  for (std::int64_t g = 0; g < p.groups; ++g)
  for (std::int64_t k = 0; k < filters; ++k)
  for (std::int64_t c = 0; c < channels; ++c) {
    const std::int64_t xc = b * p.x_stride[0] + (g * channels + c) * p.x_stride[1];
    const std::int64_t wc = (g * filters + k) * p.w_stride[0] + c * p.w_stride[1];
    const std::int64_t yc = b * p.y_stride[0] + (g * filters + k) * p.y_stride[1];
    for (std::int64_t o0 = 0; o0 < a0.outputs; ++o0)
    for (std::int64_t o1 = 0; o1 < a1.outputs; ++o1)
    for (std::int64_t o2 = 0; o2 < a2.outputs; ++o2) {
      const std::int64_t ya = yc + o0 * a0.y_step + o1 * a1.y_step + o2 * a2.y_step;
      for (std::int64_t f0 = 0; f0 < a0.taps; ++f0) {
        const std::int64_t i0 = a0.place(o0, f0);
        for (std::int64_t f1 = 0; i0 >= 0 && f1 < a1.taps; ++f1) {
          const std::int64_t i1 = a1.place(o1, f1);
          for (std::int64_t f2 = 0; i1 >= 0 && f2 < a2.taps; ++f2) {
            const std::int64_t i2 = a2.place(o2, f2);
            if (i2 < 0) continue;
            const std::int64_t xa = xc + i0 * a0.x_step + i1 * a1.x_step + i2 * a2.x_step;
            const std::int64_t wa = wc + f0 * a0.w_step + f1 * a1.w_step + f2 * a2.w_step;
            if (operation == 0) sums[ya] += double(x[xa]) * w[wa];
            else if (operation == 1) sums[xa] += double(y[ya]) * w[wa];
            else sums[wa] += double(x[xa]) * y[ya];
          }
        }
      }
    }
  }
  Ints index(out_size.size(), 0);
  for (bool more = true; more;) {
    std::int64_t address = 0;
    for (std::size_t i = 0; i < index.size(); ++i) address += index[i] * out_stride[i];
    const double added = p.bias ? double(static_cast<const T*>(p.bias)[index[1]]) : 0;
    const double value = p.alpha * sums[address] + added;
    out[address] = static_cast<T>(p.beta == 0 ? value : value + p.beta * out[address]);
    more = false;
    for (std::size_t i = index.size(); i-- > 0 && !more;) {
      if (++index[i] < out_size[i]) more = true;
      else index[i] = 0;
    }
  }
}

void perform(int api, const Problem& p, int algorithm, void* x, void* w, void* y, void* workspace, const void* handle,
             const void* stream) {
  const std::size_t used = workspace ? need(p, algorithm) : 0;
  if (used) std::memset(workspace, 0xA5, used);  // a write past the end shows
  if (void (*interrupt)() = interruption) {
    const int mine = int(calls.size()) & 0x7F;
    if (used) std::memset(workspace, mine, used);
    interrupt();
    if (used && static_cast<char*>(workspace)[0] != mine) std::abort();  // another call overwrote the workspace
  }
  if (p.type == CUDNN_DATA_DOUBLE) {
    compute(p, static_cast<double*>(x), static_cast<double*>(w), static_cast<double*>(y));
  } else {
    compute(p, static_cast<float*>(x), static_cast<float*>(w), static_cast<float*>(y));
  }
  const std::int64_t share = rows ? 100 * (p.operation == 1 ? p.x : p.y)[2] / rows : 100;  // percent
  // Much longer than the host's time, because legacy calls count at least that.
  // Engines that add a bias are faster than the same engines without one, so that programs which are tuned choose them.
  clock_us += (p.bias ? 18 : 20) * (algorithm ? 100 + share * p.x[0] : 20 * share * p.x[0]);
  const std::lock_guard<std::mutex> lock(mutex);
  calls.push_back({api, p.operation, int(p.x[0]), algorithm, p.alpha, p.beta, x, w, y, workspace, handle, stream});
}

cudnnStatus_t execute(int api, const Problem& p, int algorithm, void* x, void* w, void* y, void* workspace,
                      cudnnHandle_t handle, std::weak_ptr<void> plan = {}) {
  if (!x || !w || !y || (need(p, algorithm) && !workspace)) return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
  if (!fits(p)) return CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH;
  if (algorithm && fail_from >= 0 && fail_from-- == 0) {
    fail_from = 0;
    return CUDNN_STATUS_EXECUTION_FAILED;
  }
  const cudaStream_t stream = handle->stream;
  const auto capture = capture_of(stream);
  if (!capture) {
    perform(api, p, algorithm, x, w, y, workspace, handle, stream);
    return CUDNN_STATUS_SUCCESS;
  }
  if (capture->ended) return CUDNN_STATUS_EXECUTION_FAILED;
  const bool needs = need(p, algorithm) > 0, planned = plan.lock() != nullptr;
  const std::uint64_t block = needs ? block_at(workspace) : 0;
  capture->nodes.push_back([=] {
    if (planned && plan.expired()) return cudaErrorInvalidResourceHandle;  // its compiled kernels are unloaded
    if (needs && (!block || block_at(workspace) != block)) return cudaErrorIllegalAddress;
    perform(api, p, algorithm, x, w, y, needs ? workspace : nullptr, handle, stream);
    return cudaSuccess;
  });
  return CUDNN_STATUS_SUCCESS;
}

Ints dense(const Ints& size, bool last) {
  Ints stride(size.size());
  std::int64_t step = 1;
  if (last) { stride[1] = 1; step = size[1]; }
  for (std::size_t i = size.size(); i-- > (last ? 2 : 1);) { stride[i] = step; step *= size[i]; }
  stride[0] = step;
  return stride;
}

double scalar(const void* value, int type) {
  return type == CUDNN_DATA_DOUBLE ? *static_cast<const double*>(value) : *static_cast<const float*>(value);
}

Problem problem_of(int operation, cudnnTensorDescriptor_t x, cudnnFilterDescriptor_t w,
                   cudnnConvolutionDescriptor_t c, cudnnTensorDescriptor_t y, double alpha, double beta) {
  return {operation, x->type, c->groups, x->size, x->stride, w->size, dense(w->size, w->format == 1), y->size,
          y->stride, c->padding, c->padding, c->stride, c->dilation, alpha, beta};
}

// The backend API; attributes are kept as they are set.
struct Data {
  int kind = 0;
  bool finalized = false;
  std::map<int, std::vector<char>> values;
  std::map<int, std::vector<std::shared_ptr<Data>>> parts;

  template <typename T>
  std::vector<T> get(int attribute) const {
    const auto found = values.find(attribute);
    if (found == values.end()) return {};
    std::vector<T> result(found->second.size() / sizeof(T));
    std::memcpy(result.data(), found->second.data(), found->second.size());
    return result;
  }
  const Data& part(int attribute) const { return *parts.at(attribute).at(0); }
};

struct Holder { std::shared_ptr<Data> data = std::make_shared<Data>(); };

std::size_t size_of(int type) {
  switch (type) {
    case CUDNN_TYPE_BOOLEAN: return 1;
    case CUDNN_TYPE_INT64: case CUDNN_TYPE_DOUBLE: case CUDNN_TYPE_VOID_PTR: case CUDNN_TYPE_HANDLE: return 8;
    default: return 4;
  }
}

Problem problem_of(const Data& graph) {
  const Data& operation = graph.part(CUDNN_ATTR_OPERATIONGRAPH_OPS);
  const int which = operation.kind == CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR ? 0
                    : operation.kind == CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR ? 1 : 2;
  const int first = which == 0 ? CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA
                    : which == 1 ? CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA
                                 : CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA;
  const Data& c = operation.part(first + 2);
  const Data& w = operation.part(first + 3);
  const Data& x = operation.part(first + 4);
  const Data& y = operation.part(first + 5);
  const auto ints = [](const Data& data, int attribute) { return data.get<std::int64_t>(attribute); };
  const int type = x.get<int>(CUDNN_ATTR_TENSOR_DATA_TYPE)[0];
  const auto factor = [&](int attribute) {
    return type == CUDNN_DATA_DOUBLE ? operation.get<double>(attribute)[0] : operation.get<float>(attribute)[0];
  };
  const Ints xs = ints(x, CUDNN_ATTR_TENSOR_DIMENSIONS), ws = ints(w, CUDNN_ATTR_TENSOR_DIMENSIONS);
  return {which, type, int(xs[1] / ws[1]), xs, ints(x, CUDNN_ATTR_TENSOR_STRIDES), ws,
          ints(w, CUDNN_ATTR_TENSOR_STRIDES), ints(y, CUDNN_ATTR_TENSOR_DIMENSIONS),
          ints(y, CUDNN_ATTR_TENSOR_STRIDES), ints(c, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS),
          ints(c, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS), ints(c, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES),
          ints(c, CUDNN_ATTR_CONVOLUTION_DILATIONS), factor(first), factor(first + 1)};
}

std::int64_t alignment_of(const Data& graph) {
  const Data& operation = graph.part(CUDNN_ATTR_OPERATIONGRAPH_OPS);
  for (const auto& entry : operation.parts) {
    const auto found = entry.second[0]->get<std::int64_t>(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
    if (!found.empty()) return found[0];
  }
  return 1;
}

bool adds_bias(const Data& graph) { return graph.parts.at(CUDNN_ATTR_OPERATIONGRAPH_OPS).size() > 1; }

// Whether a graph that adds a bias is one that the stand-in computes: the sum before the bias has no memory, and the
// bias one dense element for each channel.
bool is_sound(const Data& graph) {
  const Data& addition = *graph.parts.at(CUDNN_ATTR_OPERATIONGRAPH_OPS)[1];
  const Data& sum = addition.part(CUDNN_ATTR_OPERATION_POINTWISE_XDESC);
  const Data& bias = addition.part(CUDNN_ATTR_OPERATION_POINTWISE_BDESC);
  const auto size = bias.get<std::int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS);
  Ints expected(size.size(), 1);
  expected[1] = problem_of(graph).y[1];
  return sum.get<char>(CUDNN_ATTR_TENSOR_IS_VIRTUAL) == std::vector<char>{1} && size == expected &&
         bias.get<std::int64_t>(CUDNN_ATTR_TENSOR_STRIDES)[1] == 1 &&
         addition.part(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR).get<int>(CUDNN_ATTR_POINTWISE_MODE)[0] ==
             CUDNN_POINTWISE_ADD;
}

std::shared_ptr<Data> engine_configuration(const std::shared_ptr<Data>& graph, std::int64_t index) {
  auto engine = std::make_shared<Data>(), configuration = std::make_shared<Data>();
  engine->kind = CUDNN_BACKEND_ENGINE_DESCRIPTOR;
  engine->parts[CUDNN_ATTR_ENGINE_OPERATION_GRAPH] = {graph};
  engine->values[CUDNN_ATTR_ENGINE_GLOBAL_INDEX].assign(reinterpret_cast<char*>(&index),
                                                        reinterpret_cast<char*>(&index + 1));
  configuration->kind = CUDNN_BACKEND_ENGINECFG_DESCRIPTOR;
  configuration->parts[CUDNN_ATTR_ENGINECFG_ENGINE] = {engine};
  engine->finalized = configuration->finalized = true;
  return configuration;
}

int index_of(const Data& configuration) {
  return int(configuration.part(CUDNN_ATTR_ENGINECFG_ENGINE).get<std::int64_t>(CUDNN_ATTR_ENGINE_GLOBAL_INDEX)[0]);
}

const Data& graph_of(const Data& configuration) {
  return configuration.part(CUDNN_ATTR_ENGINECFG_ENGINE).part(CUDNN_ATTR_ENGINE_OPERATION_GRAPH);
}

}  // namespace

extern "C" {

int stub_calls(StubCall* found, int most) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (int i = 0; i < most && i < int(calls.size()); ++i) found[i] = calls[i];
  const int count = int(calls.size());
  calls.clear();
  return count;
}
void stub_fail_from(int count) { fail_from = count; }
void stub_refuse_gaps(int refuse) { refuse_gaps = refuse; }
void stub_refuse_bias(int refuse) { refuse_bias = refuse; }
void stub_refuse_lent(int refuse) { refuse_lent = refuse; }
void stub_rows(int count) { rows = count; }
void stub_interruption(void (*call)()) { interruption = call; }
void stub_idle(int idle_from_now) { idle = idle_from_now; }
void stub_largest_allocation(std::int64_t bytes) { largest_allocation = bytes; }
std::int64_t stub_allocated() { return allocated; }
std::int64_t stub_waits() { return waits; }
std::int64_t stub_clock() { return clock_us; }
int stub_handles() { return handles; }
int stub_backend_descriptors() { return backend_descriptors; }

// The CUDA runtime.
constexpr std::size_t kGuard = 64;

cudaError_t cudaMalloc(void** memory, size_t size) {
  const cudaError_t refused = unsafe(mode == cudaStreamCaptureModeRelaxed);
  if (refused != cudaSuccess) return refused;
  if (std::int64_t(size) > largest_allocation) return cudaErrorMemoryAllocation;
  char* block = static_cast<char*>(std::aligned_alloc(256, (size + kGuard + 255) / 256 * 256));
  std::memset(block + size, 0x5A, kGuard);
  const std::lock_guard<std::mutex> lock(mutex);
  blocks[block] = {size, ++block_numbers};
  allocated += size;
  *memory = block;
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  if (!memory) return cudaSuccess;
  const cudaError_t refused = unsafe(mode == cudaStreamCaptureModeRelaxed);
  if (refused != cudaSuccess) return refused;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::size_t size = blocks.at(memory).size;
  for (std::size_t i = 0; i < kGuard; ++i) {
    if (static_cast<unsigned char*>(memory)[size + i] != 0x5A) std::abort();
  }
  blocks.erase(memory);
  allocated -= size;
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return unsafe(false); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const auto capture = capture_of(stream);
  return capture ? end(*capture, cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { delete event; return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const auto capture = capture_of(stream);
  event->capture = capture ? capture->number : 0;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const auto capture = capture_of(stream);
  if (capture) {
    if (event->capture != capture->number) return end(*capture, cudaErrorStreamCaptureIsolation);
  } else if (event->capture) {
    return cudaErrorCapturedEvent;  // stricter: while that capture lasts, the stream would join it
  }
  ++waits;
  return cudaSuccess;
}

// Captures.
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* other) { std::swap(mode, *other); return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (!stream || stream == cudaStreamLegacy) return cudaErrorStreamCaptureUnsupported;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& capture = captures[stream];
  if (capture) return cudaErrorIllegalState;
  capture = std::make_shared<Capture>();
  capture->number = ++capture_numbers;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  if ((!stream || stream == cudaStreamLegacy) && unsafe(false) != cudaSuccess) return cudaErrorStreamCaptureImplicit;
  const auto capture = capture_of(stream);
  *status = !capture ? cudaStreamCaptureStatusNone
            : capture->ended ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const auto capture = capture_of(stream);
  if (!capture) return cudaErrorIllegalState;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    captures.erase(stream);
  }
  if (capture->ended) return cudaErrorStreamCaptureInvalidated;
  *graph = new CUgraph_st{capture->nodes};
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = new CUgraphExec_st{graph->nodes};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  for (const auto& node : executable->nodes) {
    const cudaError_t error = node();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { delete executable; return cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { delete graph; return cudaSuccess; }

// The CUDA driver.
int cuThreadExchangeStreamCaptureMode(int* other) {
  auto given = static_cast<cudaStreamCaptureMode>(*other);
  cudaThreadExchangeStreamCaptureMode(&given);
  *other = given;
  return 0;
}

// Library and handles.
size_t cudnnGetVersion() { return 91900; }
const char* cudnnGetErrorString(cudnnStatus_t status) {
  return status == CUDNN_STATUS_SUCCESS ? "CUDNN_STATUS_SUCCESS"
         : status == CUDNN_STATUS_EXECUTION_FAILED ? "CUDNN_STATUS_EXECUTION_FAILED" : "CUDNN_STATUS_OTHER";
}
void cudnnGetLastErrorString(char* text, size_t size) { if (size) text[0] = 0; }
cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) { ++handles; *handle = new cudnnContext; return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) { --handles; delete handle; return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t* stream) {
  *stream = handle->stream;
  return CUDNN_STATUS_SUCCESS;
}

// Descriptors of the legacy API.
cudnnStatus_t cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t* d) { *d = new cudnnTensorStruct; return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnDestroyTensorDescriptor(cudnnTensorDescriptor_t d) { delete d; return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnSetTensorNdDescriptor(cudnnTensorDescriptor_t d, cudnnDataType_t type, int dims, const int size[],
                                         const int stride[]) {
  if (!d || !size || !stride) return CUDNN_STATUS_BAD_PARAM;
  d->type = type;
  d->size.assign(size, size + dims);
  d->stride.assign(stride, stride + dims);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetTensorNdDescriptor(const cudnnTensorDescriptor_t d, int most, cudnnDataType_t* type, int* dims,
                                         int size[], int stride[]) {
  if (!d) return CUDNN_STATUS_BAD_PARAM;
  *type = static_cast<cudnnDataType_t>(d->type);
  *dims = int(d->size.size());
  for (int i = 0; i < most; ++i) {
    size[i] = i < *dims ? int(d->size[i]) : 0;
    stride[i] = i < *dims ? int(d->stride[i]) : 0;
  }
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnCreateFilterDescriptor(cudnnFilterDescriptor_t* d) { *d = new cudnnFilterStruct; return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnDestroyFilterDescriptor(cudnnFilterDescriptor_t d) { delete d; return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnSetFilterNdDescriptor(cudnnFilterDescriptor_t d, cudnnDataType_t type, cudnnTensorFormat_t format,
                                         int dims, const int size[]) {
  d->type = type;
  d->format = format;
  d->size.assign(size, size + dims);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetFilterNdDescriptor(const cudnnFilterDescriptor_t d, int most, cudnnDataType_t* type,
                                         cudnnTensorFormat_t* format, int* dims, int size[]) {
  if (!d) return CUDNN_STATUS_BAD_PARAM;
  *type = static_cast<cudnnDataType_t>(d->type);
  *format = static_cast<cudnnTensorFormat_t>(d->format);
  *dims = int(d->size.size());
  for (int i = 0; i < most; ++i) size[i] = i < *dims ? int(d->size[i]) : 0;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnCreateConvolutionDescriptor(cudnnConvolutionDescriptor_t* d) { *d = new cudnnConvolutionStruct; return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnDestroyConvolutionDescriptor(cudnnConvolutionDescriptor_t d) { delete d; return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnSetConvolutionNdDescriptor(cudnnConvolutionDescriptor_t d, int dims, const int padding[],
                                              const int stride[], const int dilation[], cudnnConvolutionMode_t mode,
                                              cudnnDataType_t compute) {
  d->padding.assign(padding, padding + dims);
  d->stride.assign(stride, stride + dims);
  d->dilation.assign(dilation, dilation + dims);
  d->mode = mode;
  d->compute = compute;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetConvolutionNdDescriptor(const cudnnConvolutionDescriptor_t d, int most, int* dims, int padding[],
                                              int stride[], int dilation[], cudnnConvolutionMode_t* mode,
                                              cudnnDataType_t* compute) {
  if (!d) return CUDNN_STATUS_BAD_PARAM;
  *dims = int(d->padding.size());
  for (int i = 0; i < most && i < *dims; ++i) {
    padding[i] = int(d->padding[i]);
    stride[i] = int(d->stride[i]);
    dilation[i] = int(d->dilation[i]);
  }
  *mode = static_cast<cudnnConvolutionMode_t>(d->mode);
  *compute = static_cast<cudnnDataType_t>(d->compute);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetConvolutionMathType(cudnnConvolutionDescriptor_t d, cudnnMathType_t math) { d->math = math; return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnGetConvolutionMathType(cudnnConvolutionDescriptor_t d, cudnnMathType_t* math) {
  *math = static_cast<cudnnMathType_t>(d->math);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetConvolutionGroupCount(cudnnConvolutionDescriptor_t d, int groups) { d->groups = groups; return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnGetConvolutionGroupCount(cudnnConvolutionDescriptor_t d, int* groups) { *groups = d->groups; return CUDNN_STATUS_SUCCESS; }

cudnnStatus_t cudnnAddTensor(cudnnHandle_t, const void* alpha, const cudnnTensorDescriptor_t b, const void* bias,
                             const void* beta, const cudnnTensorDescriptor_t y, void* out) {
  if (scalar(alpha, y->type) != 1 || scalar(beta, y->type) != 1 || b->size[1] != y->size[1]) return CUDNN_STATUS_NOT_SUPPORTED;
  Ints index(y->size.size(), 0);
  for (bool more = true; more;) {
    std::int64_t address = 0;
    for (std::size_t i = 0; i < index.size(); ++i) address += index[i] * y->stride[i];
    const std::int64_t channel = index[1] * b->stride[1];
    if (y->type == CUDNN_DATA_DOUBLE) static_cast<double*>(out)[address] += static_cast<const double*>(bias)[channel];
    else static_cast<float*>(out)[address] += static_cast<const float*>(bias)[channel];
    more = false;
    for (std::size_t i = index.size(); i-- > 0 && !more;) {
      if (++index[i] < y->size[i]) more = true;
      else index[i] = 0;
    }
  }
  return CUDNN_STATUS_SUCCESS;
}

// The legacy API's convolutions.
#define OPERATION(NAME, ENUM, SHORT, FIRST, A, SECOND, B, THIRD, C)                                                   \
  cudnnStatus_t cudnnGetConvolution##NAME##WorkspaceSize(cudnnHandle_t, FIRST A, SECOND B,                            \
      const cudnnConvolutionDescriptor_t c, THIRD C, cudnnConvolution##SHORT##Algo_t algorithm, size_t* size) {        \
    if (algorithm > 1) return CUDNN_STATUS_NOT_SUPPORTED;                                                             \
    *size = need(problem_of(ENUM, x, w, c, y, 1, 0), algorithm);                                                      \
    return CUDNN_STATUS_SUCCESS;                                                                                      \
  }                                                                                                                   \
  cudnnStatus_t cudnnGetConvolution##NAME##Algorithm_v7(cudnnHandle_t handle, FIRST A, SECOND B,                      \
      const cudnnConvolutionDescriptor_t c, THIRD C, const int requested, int* returned,                              \
      cudnnConvolution##SHORT##AlgoPerf_t* results) {                                                                 \
    *returned = requested < 2 ? requested : 2;                                                                        \
    for (int i = 0; i < *returned; ++i) {                                                                             \
      results[i] = {};                                                                                                \
      results[i].algo = static_cast<cudnnConvolution##SHORT##Algo_t>(1 - i);                                          \
      cudnnGetConvolution##NAME##WorkspaceSize(handle, A, B, c, C, results[i].algo, &results[i].memory);              \
    }                                                                                                                 \
    return CUDNN_STATUS_SUCCESS;                                                                                      \
  }                                                                                                                   \
  cudnnStatus_t cudnnConvolution##NAME(cudnnHandle_t handle, const void* alpha, FIRST A, const void* A##_data,        \
      SECOND B, const void* B##_data, const cudnnConvolutionDescriptor_t c,                                           \
      cudnnConvolution##SHORT##Algo_t algorithm, void* workspace, size_t size, const void* beta, THIRD C,             \
      void* C##_data) {                                                                                               \
    const Problem p = problem_of(ENUM, x, w, c, y, scalar(alpha, x->type), scalar(beta, x->type));                    \
    if (algorithm > 1) return CUDNN_STATUS_NOT_SUPPORTED;                                                             \
    if (size < need(p, algorithm)) return CUDNN_STATUS_BAD_PARAM;                                                     \
    return execute(1, p, algorithm, const_cast<void*>(static_cast<const void*>(x_data)),                              \
                   const_cast<void*>(static_cast<const void*>(w_data)),                                               \
                   const_cast<void*>(static_cast<const void*>(y_data)), workspace, handle);                           \
  }
OPERATION(Forward, 0, Fwd, const cudnnTensorDescriptor_t, x, const cudnnFilterDescriptor_t, w,
          const cudnnTensorDescriptor_t, y)
OPERATION(BackwardData, 1, BwdData, const cudnnFilterDescriptor_t, w, const cudnnTensorDescriptor_t, y,
          const cudnnTensorDescriptor_t, x)
OPERATION(BackwardFilter, 2, BwdFilter, const cudnnTensorDescriptor_t, x, const cudnnTensorDescriptor_t, y,
          const cudnnFilterDescriptor_t, w)

// The backend API.
cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t kind, cudnnBackendDescriptor_t* descriptor) {
  Holder* holder = new Holder;
  holder->data->kind = kind;
  ++backend_descriptors;
  *descriptor = holder;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  --backend_descriptors;
  delete static_cast<Holder*>(descriptor);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t attribute,
                                       cudnnBackendAttributeType_t type, int64_t count, const void* values) {
  Data& data = *static_cast<Holder*>(descriptor)->data;
  if (data.finalized) return CUDNN_STATUS_NOT_INITIALIZED;
  if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    auto& parts = data.parts[attribute];
    parts.clear();
    for (int64_t i = 0; i < count; ++i) {
      const auto part = static_cast<Holder*>(static_cast<const cudnnBackendDescriptor_t*>(values)[i])->data;
      if (!part->finalized) return CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED;
      parts.push_back(part);
    }
  } else {
    const char* bytes = static_cast<const char*>(values);
    data.values[attribute].assign(bytes, bytes + count * size_of(type));
  }
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
  Data& data = *static_cast<Holder*>(descriptor)->data;
  if (data.kind == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR &&
      data.get<int>(CUDNN_ATTR_ENGINEHEUR_MODE)[0] == CUDNN_HEUR_MODE_B) {
    return CUDNN_STATUS_NOT_SUPPORTED;
  }
  if (data.kind == CUDNN_BACKEND_ENGINE_DESCRIPTOR &&
      data.get<std::int64_t>(CUDNN_ATTR_ENGINE_GLOBAL_INDEX)[0] > 1) {
    return CUDNN_STATUS_NOT_SUPPORTED;
  }
  if (data.kind == CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR && adds_bias(data) && (refuse_bias || !is_sound(data))) {
    return CUDNN_STATUS_NOT_SUPPORTED;
  }
  if (data.kind == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR && refuse_gaps) {
    const Data& configuration = data.part(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
    const Problem p = problem_of(graph_of(configuration));
    if (index_of(configuration) && (has_gaps(p.x, p.x_stride) || has_gaps(p.y, p.y_stride))) {
      return CUDNN_STATUS_NOT_SUPPORTED;
    }
  }
  data.finalized = true;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendGetAttribute(const cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t attribute, cudnnBackendAttributeType_t,
                                       int64_t most, int64_t* count, void* values) {
  const Data& data = *static_cast<Holder*>(descriptor)->data;
  int64_t unused;
  if (!count) count = &unused;
  const auto put = [&](std::int64_t value) {
    *count = 1;
    if (most) std::memcpy(values, &value, sizeof value);
    return CUDNN_STATUS_SUCCESS;
  };
  const auto give = [&](int64_t i, const std::shared_ptr<Data>& part) {
    static_cast<Holder*>(static_cast<cudnnBackendDescriptor_t*>(values)[i])->data = part;
  };
  switch (attribute) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS: {
      const bool fallback = data.get<int>(CUDNN_ATTR_ENGINEHEUR_MODE)[0] == CUDNN_HEUR_MODE_FALLBACK;
      *count = fallback ? 1 : 2;
      for (int64_t i = 0; i < most && i < *count; ++i) {
        give(i, engine_configuration(data.parts.at(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH)[0], fallback ? 0 : 1 - i));
      }
      return CUDNN_STATUS_SUCCESS;
    }
    case CUDNN_ATTR_ENGINECFG_ENGINE:
      *count = 1;
      if (most) give(0, data.parts.at(attribute)[0]);
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_ENGINE_GLOBAL_INDEX:
      return put(data.get<std::int64_t>(attribute)[0]);
    case CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE:
      return put(need(problem_of(graph_of(data)), index_of(data)));
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE: {
      const Data& configuration = data.part(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
      return put(need(problem_of(graph_of(configuration)), index_of(configuration)));
    }
    default:  // there are no notes and no knobs
      *count = 0;
      return CUDNN_STATUS_SUCCESS;
  }
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack) {
  if (idle) return CUDNN_STATUS_SUCCESS;
  const Data& own = *static_cast<Holder*>(plan)->data;
  const Data& pointers = *static_cast<Holder*>(pack)->data;
  if (!own.finalized || !pointers.finalized) return CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED;
  if (refuse_lent && own.get<void*>(CUDNN_ATTR_EXECUTION_PLAN_HANDLE)[0] != handle) return CUDNN_STATUS_BAD_PARAM;
  const Data& configuration = own.part(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
  const auto identities = pointers.get<std::int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
  const auto addresses = pointers.get<void*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
  void* tensors[6] = {};
  for (std::size_t i = 0; i < identities.size(); ++i) {
    tensors[identities[i]] = addresses[i];
    if (reinterpret_cast<std::uintptr_t>(addresses[i]) % alignment_of(graph_of(configuration))) {
      return CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER;
    }
  }
  Problem p = problem_of(graph_of(configuration));
  p.bias = tensors[4];
  if (adds_bias(graph_of(configuration)) != (p.bias != nullptr)) return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
  return execute(0, p, index_of(configuration), tensors[1], tensors[2], tensors[3],
                 pointers.get<void*>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE)[0], handle,
                 static_cast<Holder*>(plan)->data);
}

}  // extern "C"
