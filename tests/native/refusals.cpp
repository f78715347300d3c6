// Calls that would give wrong numbers: a handle is entered again, or an output shares memory with an input. The argument
// names what is tried.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include <ucudnn.hpp>

extern "C" void stub_interruption(void (*)());

namespace {

void check(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "refusals: %s\n", what);
  std::exit(3);
}
#define CHECK(condition) check(condition, #condition)

UcudnnHandle_t handle, other;
cudnnTensorDescriptor_t x, y;
cudnnFilterDescriptor_t f;
cudnnConvolutionDescriptor_t c;
float weight = 2;
std::string what;
int interruptions = 0;

cudnnStatus_t forward(const UcudnnHandle_t& on, const float* from, float* to) {
  const float one = 1, zero = 0;
  return cudnnConvolutionForward(on, &one, x, from, f, &weight, c, CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM, nullptr, 0,
      &zero, y, to);
}

cudnnStatus_t data(float* to, const float* from, const float* filter) {
  const float one = 1, zero = 0;
  return cudnnConvolutionBackwardData(handle, &one, f, filter, y, from, c, CUDNN_CONVOLUTION_BWD_DATA_ALGO_0, nullptr,
      0, &zero, x, to);
}

cudnnStatus_t filter(const float* from, const float* gradient, float* to) {
  const float one = 1, zero = 0;
  return cudnnConvolutionBackwardFilter(handle, &one, x, from, y, gradient, c, CUDNN_CONVOLUTION_BWD_FILTER_ALGO_0,
      nullptr, 0, &zero, f, to);
}

// n samples of 2 channels; the distances are in elements.
void describe(int n, int x_sample, int y_sample) {
  const int size[] = {n, 1, 4, 4}, xs[] = {x_sample, 16, 4, 1}, ys[] = {y_sample, 16, 4, 1};
  const int one[] = {1, 1, 1, 1}, zero[] = {0, 0};
  CHECK(!cudnnSetTensorNdDescriptor(x, CUDNN_DATA_FLOAT, 4, size, xs));
  CHECK(!cudnnSetTensorNdDescriptor(y, CUDNN_DATA_FLOAT, 4, size, ys));
  CHECK(!cudnnSetFilterNdDescriptor(f, CUDNN_DATA_FLOAT, CUDNN_TENSOR_NCHW, 4, one));
  CHECK(!cudnnSetConvolutionNdDescriptor(c, 2, zero, one, one, CUDNN_CROSS_CORRELATION, CUDNN_DATA_FLOAT));
}

void try_again(int = 0) {
  static std::vector<float> from(1024, 3), to(1024);
  const bool same = what != "another handle";
  CHECK(forward(same ? handle : other, from.data(), to.data()) == CUDNN_STATUS_BAD_PARAM);
  if (same) {
    CHECK(cudnnSetStream(handle, reinterpret_cast<cudaStream_t>(0x2000)) == CUDNN_STATUS_BAD_PARAM);
    CHECK(cudnnDestroy(handle) == CUDNN_STATUS_BAD_PARAM);
  }
}

void interrupt() {
  if (what == "another thread") {
    std::thread(try_again, 0).join();
  } else {
    std::raise(SIGUSR1);
  }
  ++interruptions;
}

void enter_again() {
  describe(8, 16, 16);
  std::vector<float> from(128), to(128, -1);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = float(i);
  std::signal(SIGUSR1, try_again);
  if (what != "while it plans") CHECK(!forward(handle, from.data(), to.data()));  // plans
  stub_interruption(interrupt);
  CHECK(!forward(handle, from.data(), to.data()));
  stub_interruption(nullptr);
  CHECK(interruptions > 0);
  for (std::size_t i = 0; i < from.size(); ++i) CHECK(to[i] == 2 * from[i]);
  CHECK(!forward(other, from.data(), to.data()));  // and nothing is refused afterwards
}

void overlap() {
  std::vector<float> memory(1024, 1);
  float* const at = memory.data();
  describe(8, 16, 16);
  CHECK(forward(handle, at, at) == CUDNN_STATUS_BAD_PARAM);
  CHECK(forward(handle, at, at + 127) == CUDNN_STATUS_BAD_PARAM);
  CHECK(forward(handle, at + 127, at) == CUDNN_STATUS_BAD_PARAM);
  CHECK(data(at, at + 64, &weight) == CUDNN_STATUS_BAD_PARAM);
  CHECK(data(at, at + 256, at + 64) == CUDNN_STATUS_BAD_PARAM);
  CHECK(filter(at, at + 256, at + 5) == CUDNN_STATUS_BAD_PARAM);
  CHECK(filter(at, at + 256, at + 260) == CUDNN_STATUS_BAD_PARAM);
  for (float each : memory) CHECK(each == 1);
  CHECK(!forward(handle, at, at + 128));
  CHECK(!filter(at, at, at + 128));  // inputs may share memory
  describe(8, 32, 32);  // channels of one array in turn
  CHECK(!forward(handle, at, at + 16));
  CHECK(forward(handle, at, at + 15) == CUDNN_STATUS_BAD_PARAM);
}

}  // namespace

int main(int, char** values) {
  what = values[1];
  CHECK(!cudnnCreate(&handle) && !cudnnCreate(&other));
  CHECK(!cudnnCreateTensorDescriptor(&x) && !cudnnCreateTensorDescriptor(&y));
  CHECK(!cudnnCreateFilterDescriptor(&f) && !cudnnCreateConvolutionDescriptor(&c));
  if (what == "overlap") overlap();
  else enter_again();
  CHECK(!cudnnDestroy(handle) && !cudnnDestroy(other));
  std::puts("computed");
}
