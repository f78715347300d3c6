#include "handle.hpp"

namespace ucudnn {
namespace {

constexpr std::size_t kMostPacks = 64;        // the addresses that recur are few
constexpr std::int64_t kX = 1, kW = 2, kY = 3;  // unique ids of the tensors in plans, as in operation_graph.py

// A variant pack, or null if cuDNN cannot make it.
cudnnBackendDescriptor_t make_pack(char* x, char* w, char* y, char* workspace) {
  cudnnBackendDescriptor_t pack = nullptr;
  if (cudnnBackendCreateDescriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack) != CUDNN_STATUS_SUCCESS) {
    return nullptr;
  }
  const std::int64_t identities[3] = {kX, kW, kY};
  void* pointers[3] = {x, w, y};
  void* scratch = workspace;
  if (cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, 3, identities) ||
      cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, 3, pointers) ||
      cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &scratch) ||
      cudnnBackendFinalize(pack)) {
    cudnnBackendDestroyDescriptor(pack);
    return nullptr;
  }
  return pack;
}

void destroy(const Packs& packs) {
  for (cudnnBackendDescriptor_t each : packs.descriptors) {
    if (each) cudnnBackendDestroyDescriptor(each);
  }
}

}  // namespace

PreparedPlan::PreparedPlan(const Answer& answer, bool is_double, double alpha, double beta, int alignment)
    : steps_(answer.steps, answer.steps + answer.count),
      alpha_(alpha),
      beta_(beta),
      alignment_(alignment),
      divided_(answer.divided != 0),
      double_(is_double),
      alpha_single_(static_cast<float>(alpha)),
      beta_single_(static_cast<float>(beta)),
      generation_(answer.generation),
      workspace_bytes_(answer.workspace_bytes),
      offset_(answer.offset_bytes),
      token_(answer.token),
      calls_(answer.calls) {}

PreparedPlan::~PreparedPlan() {
  for (const Packs& packs : packs_) destroy(packs);
}

cudnnStatus_t PreparedPlan::run(cudnnHandle_t cudnn, int operation, char* x, char* w, char* y, char* workspace,
                         std::size_t* done) {
  const Packs* prepared = nullptr;
  for (*done = 0; *done < steps_.size(); ++*done) {
    const Step& step = steps_[*done];
    cudnnStatus_t status;
    if (step.kind == kGraph) {
      if (!prepared) prepared = packs(x, w, y, workspace);
      cudnnBackendDescriptor_t pack = prepared->descriptors[*done];
      status = pack ? cudnnBackendExecute(cudnn, static_cast<cudnnBackendDescriptor_t>(step.plan), pack)
                    : CUDNN_STATUS_INTERNAL_ERROR;
    } else {
      status = legacy(cudnn, operation, step, x, w, y, workspace);
    }
    if (status != CUDNN_STATUS_SUCCESS) return status;
  }
  return CUDNN_STATUS_SUCCESS;
}

const Packs* PreparedPlan::packs(char* x, char* w, char* y, char* workspace) {
  const auto fits = [=](const Packs& each) {
    return each.x == x && each.w == w && each.y == y && each.workspace == workspace;
  };
  if (latest_ < packs_.size() && fits(packs_[latest_])) return &packs_[latest_];
  for (latest_ = 0; latest_ < packs_.size(); ++latest_) {
    if (fits(packs_[latest_])) return &packs_[latest_];
  }
  Packs made = {x, w, y, workspace, {}};
  made.descriptors.reserve(steps_.size());
  for (const Step& step : steps_) {
    made.descriptors.push_back(
        step.kind == kGraph ? make_pack(x + step.x_offset, w, y + step.y_offset, workspace) : nullptr);
  }
  if (packs_.size() < kMostPacks) {
    packs_.push_back(std::move(made));
  } else {  // replace the oldest one
    latest_ = oldest_;
    oldest_ = (oldest_ + 1) % kMostPacks;
    destroy(packs_[latest_]);
    packs_[latest_] = std::move(made);
  }
  return &packs_[latest_];
}

cudnnStatus_t PreparedPlan::legacy(cudnnHandle_t cudnn, int operation, const Step& step, char* x, char* w, char* y,
                            char* workspace) const {
  static const float one_single = 1;
  static const double one = 1;
  const void* alpha = double_ ? static_cast<const void*>(&alpha_) : &alpha_single_;
  const void* beta = double_ ? static_cast<const void*>(&beta_) : &beta_single_;
  if (step.accumulates) beta = double_ ? static_cast<const void*>(&one) : &one_single;
  const auto xd = static_cast<cudnnTensorDescriptor_t>(step.x_descriptor);
  const auto wd = static_cast<cudnnFilterDescriptor_t>(step.w_descriptor);
  const auto yd = static_cast<cudnnTensorDescriptor_t>(step.y_descriptor);
  const auto convolution = static_cast<cudnnConvolutionDescriptor_t>(step.convolution);
  x += step.x_offset;
  y += step.y_offset;
  switch (operation) {
    case UCUDNN_FORWARD:
      return cudnnConvolutionForward(cudnn, alpha, xd, x, wd, w, convolution,
                                     static_cast<cudnnConvolutionFwdAlgo_t>(step.algorithm), workspace,
                                     step.workspace_bytes, beta, yd, y);
    case UCUDNN_BACKWARD_DATA:
      return cudnnConvolutionBackwardData(cudnn, alpha, wd, w, yd, y, convolution,
                                          static_cast<cudnnConvolutionBwdDataAlgo_t>(step.algorithm), workspace,
                                          step.workspace_bytes, beta, xd, x);
    default:
      return cudnnConvolutionBackwardFilter(cudnn, alpha, xd, x, yd, y, convolution,
                                            static_cast<cudnnConvolutionBwdFilterAlgo_t>(step.algorithm), workspace,
                                            step.workspace_bytes, beta, wd, w);
  }
}

}  // namespace ucudnn
