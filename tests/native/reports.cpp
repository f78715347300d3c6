// Writes a report after the first call, forks a child that exits, computes twice more, and exits. The argument is the
// path of the first report.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include <ucudnn.hpp>

namespace {

void check(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "reports: %s\n", what);
  std::exit(3);
}
#define CHECK(call) check((call) == CUDNN_STATUS_SUCCESS, #call)

}  // namespace

int main(int, char** arguments) {
  UcudnnHandle_t handle;
  cudnnTensorDescriptor_t t;
  cudnnFilterDescriptor_t f;
  cudnnConvolutionDescriptor_t c;
  CHECK(cudnnCreate(&handle));
  CHECK(cudnnCreateTensorDescriptor(&t));
  CHECK(cudnnCreateFilterDescriptor(&f));
  CHECK(cudnnCreateConvolutionDescriptor(&c));
  const int size[] = {8, 1, 4, 4}, stride[] = {16, 16, 4, 1}, filter[] = {1, 1, 1, 1}, zero[] = {0, 0}, one[] = {1, 1};
  CHECK(cudnnSetTensorNdDescriptor(t, CUDNN_DATA_FLOAT, 4, size, stride));
  CHECK(cudnnSetFilterNdDescriptor(f, CUDNN_DATA_FLOAT, CUDNN_TENSOR_NCHW, 4, filter));
  CHECK(cudnnSetConvolutionNdDescriptor(c, 2, zero, one, one, CUDNN_CROSS_CORRELATION, CUDNN_DATA_FLOAT));
  float x[128] = {}, y[128], two = 2, alpha = 1, beta = 0;
  cudnnConvolutionFwdAlgo_t algorithm;
  CHECK(cudnnGetConvolutionForwardAlgorithm(handle, t, f, c, t, CUDNN_CONVOLUTION_FWD_SPECIFY_WORKSPACE_LIMIT, 300,
                                            &algorithm));
  for (int call = 0; call < 3; ++call) {
    CHECK(cudnnConvolutionForward(handle, &alpha, t, x, f, &two, c, algorithm, nullptr, 0, &beta, t, y));
    if (call > 0) continue;
    CHECK(ucudnn_report(arguments[1]));
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) std::exit(0);  // with the exit handlers
    int status = 0;
    check(waitpid(child, &status, 0) == child && status == 0, "the child failed");
    std::FILE* report = std::fopen(std::getenv("UCUDNN_REPORT"), "r");
    check(report == nullptr, "the child wrote the report of its parent");
  }
  CHECK(cudnnDestroy(handle));
  std::puts("computed");
}
