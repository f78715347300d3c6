// A program like Caffe. Each group has three handles on their own streams and strided descriptors, and each iteration
// asks for all algorithms again. Arguments are key=value. Tensors are read from a file and written to one. The calls of
// cuDNN are printed.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <ucudnn.hpp>

extern "C" struct StubCall {
  int api, operation, batch, algorithm;
  double alpha, beta;
  const void *x, *w, *y, *workspace, *handle, *stream;
};
extern "C" {
int stub_calls(StubCall*, int);
void stub_fail_from(int);
void stub_largest_allocation(std::int64_t);
std::int64_t stub_allocated();
std::int64_t stub_waits();
int stub_handles();
int stub_backend_descriptors();
}

namespace {

std::map<std::string, std::string> arguments;

int number(const char* name, int otherwise = 0) {
  const auto found = arguments.find(name);
  return found == arguments.end() ? otherwise : std::atoi(found->second.c_str());
}

void check(cudnnStatus_t status, const char* what) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  std::fprintf(stderr, "driver: %s: %s\n", what, cudnnGetErrorString(status));
  std::exit(3);
}
#define CHECK(call) check(call, #call)

template <typename T>
struct Layer {
  int n = number("n"), c = number("c"), h = number("h"), w = number("w"), k = number("k"), r = number("r"),
      pad = number("pad"), stride = number("stride", 1), groups = number("groups", 1);
  int oh = (h + 2 * pad - r) / stride + 1, ow = (w + 2 * pad - r) / stride + 1;
  std::size_t limit = number("limit", 8 << 20);
  int preference = number("preference", 2);
  std::vector<UcudnnHandle_t> handles = std::vector<UcudnnHandle_t>(std::size_t(3 * groups));
  cudnnTensorDescriptor_t x, y;
  cudnnFilterDescriptor_t f;
  cudnnConvolutionDescriptor_t conv;
  cudnnConvolutionFwdAlgo_t forward;
  cudnnConvolutionBwdDataAlgo_t data;
  cudnnConvolutionBwdFilterAlgo_t filter;
  std::vector<std::size_t> sizes{1, 1, 1};

  Layer() {
    for (int i = 0; i < 3 * groups; ++i) {
      CHECK(cudnnCreate(&handles[i]));
      CHECK(cudnnSetStream(handles[i], reinterpret_cast<cudaStream_t>(std::size_t(0x1000 + 16 * i))));
    }
    CHECK(cudnnCreateTensorDescriptor(&x));
    CHECK(cudnnCreateTensorDescriptor(&y));
    CHECK(cudnnCreateFilterDescriptor(&f));
    CHECK(cudnnCreateConvolutionDescriptor(&conv));
  }

  ~Layer() {
    for (auto& handle : handles) CHECK(cudnnDestroy(handle));
  }

  void reshape() {
    const cudnnDataType_t type = sizeof(T) == 8 ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT;
    const int xs[] = {n, c / groups, h, w}, xt[] = {c * h * w, h * w, w, 1};
    const int ys[] = {n, k / groups, oh, ow}, yt[] = {k * oh * ow, oh * ow, ow, 1};
    const int fs[] = {k / groups, c / groups, r, r}, p[] = {pad, pad}, s[] = {stride, stride}, d[] = {1, 1};
    CHECK(cudnnSetTensorNdDescriptor(x, type, 4, xs, xt));
    CHECK(cudnnSetTensorNdDescriptor(y, type, 4, ys, yt));
    CHECK(cudnnSetFilterNdDescriptor(f, type, CUDNN_TENSOR_NCHW, 4, fs));
    const auto mode = number("flip") ? CUDNN_CONVOLUTION : CUDNN_CROSS_CORRELATION;
    CHECK(cudnnSetConvolutionNdDescriptor(conv, 2, p, s, d, mode, type));
    if (number("seven")) {
      cudnnConvolutionFwdAlgoPerf_t results[3];
      int count = 0;
      CHECK(cudnnGetConvolutionForwardAlgorithm_v7(handles[0], x, f, conv, y, 3, &count, results));
      std::printf("{\"v7\": [%d, %d, %d, %zu]}\n", count, results[0].algo, results[1].determinism, results[0].memory);
      forward = results[number("seven") - 1].algo;
    } else {
      CHECK(cudnnGetConvolutionForwardAlgorithm(handles[0], x, f, conv, y,
          static_cast<cudnnConvolutionFwdPreference_t>(preference), limit, &forward));
    }
    CHECK(cudnnGetConvolutionForwardWorkspaceSize(handles[0], x, f, conv, y, forward, &sizes[0]));
    CHECK(cudnnGetConvolutionBackwardFilterAlgorithm(handles[0], x, y, conv, f,
        static_cast<cudnnConvolutionBwdFilterPreference_t>(preference), limit, &filter));
    CHECK(cudnnGetConvolutionBackwardFilterWorkspaceSize(handles[0], x, y, conv, f, filter, &sizes[1]));
    CHECK(cudnnGetConvolutionBackwardDataAlgorithm(handles[0], f, y, conv, x,
        static_cast<cudnnConvolutionBwdDataPreference_t>(preference), limit, &data));
    CHECK(cudnnGetConvolutionBackwardDataWorkspaceSize(handles[0], f, y, conv, x, data, &sizes[2]));
  }

  void run(T* xv, T* wv, T* yv, T* dx, T* dw, T* dy, T alpha, T beta) {
    const std::size_t most = std::max(sizes[0], std::max(sizes[1], sizes[2]));
    std::vector<char> workspace(most + 1);
    const T one = 1, zero = 0;
    for (int g = 0; g < groups; ++g) {
      const int xo = g * c / groups * h * w, yo = g * k / groups * oh * ow, wo = g * (k / groups) * (c / groups) * r * r;
      CHECK(cudnnConvolutionForward(handles[g], &alpha, x, xv + xo, f, wv + wo, conv, forward, workspace.data(),
          sizes[0], &beta, y, yv + yo));
      CHECK(cudnnConvolutionBackwardFilter(handles[groups + g], &one, x, xv + xo, y, dy + yo, conv, filter,
          workspace.data(), sizes[1], &one, f, dw + wo));
      CHECK(cudnnConvolutionBackwardData(handles[2 * groups + g], &one, f, wv + wo, y, dy + yo, conv, data,
          workspace.data(), sizes[2], &zero, x, dx + xo));
    }
  }
};

void print_calls() {
  static std::vector<StubCall> calls(1 << 20);
  const int count = stub_calls(calls.data(), int(calls.size()));
  for (int i = 0; i < count; ++i) {
    const StubCall& each = calls[i];
    // Calls of measurements are on the null stream.
    if (!each.stream) continue;
    std::printf("{\"api\": %d, \"operation\": %d, \"batch\": %d, \"algorithm\": %d, \"alpha\": %g, \"beta\": %g, "
                "\"workspace\": %zu, \"stream\": %zu}\n", each.api, each.operation, each.batch, each.algorithm,
                each.alpha, each.beta, reinterpret_cast<std::size_t>(each.workspace),
                reinterpret_cast<std::size_t>(each.stream));
  }
}

template <typename T>
int main_of() {
  {
    Layer<T> layer;
    layer.reshape();
    const int shift = number("shift");  // elements by which tensors are misaligned
    const std::size_t nx = std::size_t(layer.n) * layer.c * layer.h * layer.w;
    const std::size_t nw = std::size_t(layer.k) * (layer.c / layer.groups) * layer.r * layer.r;
    const std::size_t ny = std::size_t(layer.n) * layer.k * layer.oh * layer.ow;
    std::vector<T> tensors[6];
    T* at[6];
    std::ifstream in(arguments["in"], std::ios::binary);
    const std::size_t counts[6] = {nx, nw, ny, nx, nw, ny};
    for (int i = 0; i < 6; ++i) {
      tensors[i].resize(counts[i] + 16);
      // vectors are aligned to 16 bytes
      at[i] = tensors[i].data() + shift;
      in.read(reinterpret_cast<char*>(at[i]), std::streamsize(counts[i] * sizeof(T)));
    }
    if (arguments.count("room")) stub_largest_allocation(number("room"));
    const int repeats = number("repeats", 1);
    for (int i = 0; i < repeats; ++i) {
      if (i > 0) layer.limit = number("limit_then", int(layer.limit));
      layer.reshape();
      if (arguments.count("fail") && i == number("fail_at")) stub_fail_from(number("fail"));
      layer.run(at[0], at[1], at[2], at[3], at[4], at[5], T(std::atof(arguments["alpha"].c_str())),
                T(std::atof(arguments["beta"].c_str())));
      if (i == number("fail_at")) stub_fail_from(-1);
      std::printf("{\"iteration\": %d, \"allocated\": %lld, \"sizes\": [%zu, %zu, %zu]}\n", i,
                  static_cast<long long>(stub_allocated()), layer.sizes[0], layer.sizes[1], layer.sizes[2]);
      print_calls();
      if (number("streams")) {  // another stream, whose kernels may run beside those of the first
        for (int g = 0; g < 3 * layer.groups; ++g) {
          const auto stream = reinterpret_cast<cudaStream_t>(std::size_t(0x9000 + 16 * g));
          if (number("streams") == 1) CHECK(cudnnSetStream(layer.handles[g], stream));
          else CHECK(cudnnSetStream(static_cast<cudnnHandle_t>(layer.handles[g]), stream));
        }
      }
    }
    std::ofstream out(arguments["out"], std::ios::binary);
    for (int i = 0; i < 6; ++i) out.write(reinterpret_cast<char*>(at[i]), std::streamsize(counts[i] * sizeof(T)));
  }
  std::printf("{\"left\": %lld, \"waits\": %lld}\n", static_cast<long long>(stub_allocated()),
              static_cast<long long>(stub_waits()));
  return 0;
}

}  // namespace

int main(int count, char** values) {
  for (int i = 1; i < count; ++i) {
    const char* equals = std::strchr(values[i], '=');
    if (equals) arguments[std::string(values[i], equals - values[i])] = equals + 1;
  }
  int status = 0;
  for (int i = 0; i <= number("again") && status == 0; ++i) {
    status = number("double") ? main_of<double>() : main_of<float>();
  }
  return status;
}
