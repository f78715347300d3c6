// Convolutions are captured in CUDA graphs, other calls follow, and the graphs are launched. The argument names what
// happens. The stand-in for CUDA refuses what CUDA refuses in captures, and graphs whose memory or plans are gone. With
// ON_GPU it is a program for a GPU, on managed memory; what only the stand-in can do is left out.
#include <cstdio>
#include <cstdlib>
#include <string>

#include <cuda_runtime_api.h>
#include <ucudnn.hpp>

#ifndef ON_GPU
extern "C" void stub_fail_from(int);
extern "C" std::int64_t stub_allocated();
#endif

namespace {

void check(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "captures: %s\n", what);
  std::exit(3);
}
#define CHECK(call) check((call) == 0, #call)

#ifdef ON_GPU
void stub_fail_from(int) {}
std::int64_t stub_allocated() { return 0; }

cudaStream_t streams[10];

void open_streams() {
  for (cudaStream_t& each : streams) CHECK(cudaStreamCreateWithFlags(&each, cudaStreamNonBlocking));
}
cudaStream_t stream_of(std::size_t number) { return streams[number]; }

float* allocate(std::size_t count) {
  void* memory = nullptr;
  CHECK(cudaMallocManaged(&memory, count * sizeof(float)));
  return static_cast<float*>(memory);
}
#else
void open_streams() {}
cudaStream_t stream_of(std::size_t number) { return reinterpret_cast<cudaStream_t>(0x1000 + 16 * number); }
float* allocate(std::size_t count) { return new float[count]; }
#endif

constexpr std::size_t kSample = 16;  // elements; a sample needs 64 bytes of workspace

// y = alpha * 2x, on n samples.
struct Convolution {
  cudnnTensorDescriptor_t t;
  cudnnFilterDescriptor_t f;
  cudnnConvolutionDescriptor_t c;
  std::size_t count;
  float *x, *y, *two;  // never freed
  cudnnConvolutionFwdAlgo_t algorithm = {};

  explicit Convolution(int n) : count(n * kSample), x(allocate(count)), y(allocate(count)), two(allocate(1)) {
    *two = 2;
    CHECK(cudnnCreateTensorDescriptor(&t));
    CHECK(cudnnCreateFilterDescriptor(&f));
    CHECK(cudnnCreateConvolutionDescriptor(&c));
    const int size[] = {n, 1, 4, 4}, stride[] = {16, 16, 4, 1}, filter[] = {1, 1, 1, 1}, zero[] = {0, 0}, one[] = {1, 1};
    CHECK(cudnnSetTensorNdDescriptor(t, CUDNN_DATA_FLOAT, 4, size, stride));
    CHECK(cudnnSetFilterNdDescriptor(f, CUDNN_DATA_FLOAT, CUDNN_TENSOR_NCHW, 4, filter));
    CHECK(cudnnSetConvolutionNdDescriptor(c, 2, zero, one, one, CUDNN_CROSS_CORRELATION, CUDNN_DATA_FLOAT));
    for (std::size_t i = 0; i < count; ++i) x[i] = float(i) + 1;
    poison();
  }

  void state(const UcudnnHandle_t& handle, std::size_t limit) {
    CHECK(cudnnGetConvolutionForwardAlgorithm(handle, t, f, c, t, CUDNN_CONVOLUTION_FWD_SPECIFY_WORKSPACE_LIMIT, limit,
        &algorithm));
  }
  void poison() {
    for (std::size_t i = 0; i < count; ++i) y[i] = -1;
  }
  void queue(const UcudnnHandle_t& handle, float alpha = 1) {
    const float zero = 0;
    poison();
    CHECK(cudnnConvolutionForward(handle, &alpha, t, x, f, two, c, algorithm, nullptr, 0, &zero, t, y));
  }
  void verify(float alpha = 1) const {
    for (std::size_t i = 0; i < count; ++i) check(y[i] == alpha * 2 * x[i], "wrong numbers");
  }
  void run(const UcudnnHandle_t& handle, float alpha = 1) {
    queue(handle, alpha);
    CHECK(cudaDeviceSynchronize());
    verify(alpha);
  }
};

struct Graph {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;

  void begin(cudaStream_t stream) { CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal)); }
  void end(cudaStream_t stream) {
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
  }
  void capture(Convolution& convolution, const UcudnnHandle_t& handle, cudaStream_t stream) {
    begin(stream);
    convolution.queue(handle);
    end(stream);
    CHECK(cudaDeviceSynchronize());
    for (std::size_t i = 0; i < convolution.count; ++i) check(convolution.y[i] == -1, "a capture computed");
  }
  void launch(Convolution& convolution) {
    convolution.poison();
    CHECK(cudaGraphLaunch(executable, stream_of(7)));
    CHECK(cudaDeviceSynchronize());
    convolution.verify();
  }
  ~Graph() {
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
  }
};

void run(const std::string& what, const UcudnnHandle_t& handle) {
  const cudaStream_t stream = stream_of(0);
  Convolution small(4), large(64);
  Graph graph;
  CHECK(cudnnSetStream(handle, stream));
  if (what == "unplanned") {
    graph.begin(stream);
    small.state(handle, 300);
    small.queue(handle);
    graph.end(stream);
    graph.launch(small);
    small.state(handle, 300);
    small.run(handle);
    return;
  }
  if (what == "a lower limit in the capture") {
    large.state(handle, 4096);
    large.run(handle);
    graph.begin(stream);
    large.state(handle, 300);
    large.queue(handle);
    graph.end(stream);
    graph.launch(large);
    large.run(handle);
    return;
  }
  small.state(handle, 300);
  small.run(handle);
  if (what == "another stream") {
    CHECK(cudnnSetStream(handle, stream_of(1)));
    small.run(handle);  // there is a workspace for it
    CHECK(cudnnSetStream(handle, stream));
    small.run(handle);
    CHECK(cudnnSetStream(handle, stream_of(1)));
    graph.capture(small, handle, stream_of(1));
    CHECK(cudnnSetStream(handle, stream));  // an event of the capture cannot be waited for
    small.run(handle);
  } else if (what == "another stream in the capture") {
    CHECK(cudnnSetStream(handle, stream_of(1)));
    small.run(handle);
    CHECK(cudnnSetStream(handle, stream));
    small.run(handle);
    graph.begin(stream_of(1));
    CHECK(cudnnSetStream(handle, stream_of(1)));  // earlier work cannot be waited for
    small.queue(handle);
    graph.end(stream_of(1));
    small.run(handle);
  } else if (what == "a failure in the capture") {
    graph.begin(stream);
    stub_fail_from(0);
    small.queue(handle);
    stub_fail_from(-1);
    graph.end(stream);
  } else if (what == "another's capture") {
    graph.begin(stream_of(9));
    large.state(handle, 4096);
    large.queue(handle);
    graph.end(stream_of(9));
    CHECK(cudaDeviceSynchronize());
    large.verify();
    return;
  } else {
    graph.capture(small, handle, stream);
  }
  if (what == "a larger workspace" || what == "another division") {
    large.state(handle, 4096);
    large.run(handle);
  } else if (what == "many scalings") {
    for (int i = 2; i < 200; ++i) small.run(handle, float(i));
  } else if (what == "another limit") {
    small.state(handle, 100);
    small.run(handle);
  } else if (what == "a failure") {
    stub_fail_from(0);
    small.run(handle);
    stub_fail_from(-1);
  }
  graph.launch(small);
  small.run(handle);
  graph.launch(small);
}

}  // namespace

int main(int, char** values) {
  UcudnnHandle_t handle;
  open_streams();
  CHECK(cudnnCreate(&handle));
  run(values[1], handle);
  CHECK(cudnnDestroy(handle));
  check(stub_allocated() == 0, "memory is left");
  std::puts("computed");
}
