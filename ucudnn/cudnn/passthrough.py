"""Functions that call cuDNN's: bias, pooling, activation, softmax, batch normalization, dropout, tensor operations.

Each row of the table is one function, with CuPy's name and parameters; cuDNN's function of nearly that name takes the
same. Addresses are ints; alpha and beta are addresses of host scalars, doubles for double tensors and floats otherwise.
Functions that compute are queued on CuPy's current stream. All raise CudnnError if cuDNN returns an error status.
"""
# ruff: noqa: N816  # names are those of CuPy

from collections.abc import Callable as _Callable
from typing import Any as _Any

from ucudnn.cudnn.descriptors import TENSORS as _TENSORS
from ucudnn.cudnn.descriptors import sets as _sets
from ucudnn.cudnn.handles import follow_current_stream as _follow_current_stream
from ucudnn.cudnn.signatures import calls as _calls
from ucudnn.cudnn.signatures import named as _named

_NEW = "Return the address of a new descriptor"


def _computes(declaration: str, summary: str) -> _Callable[..., None]:
    """Return a function that computes on CuPy's current stream; its first parameter is the handle."""
    compute = _calls(declaration, summary)

    def body(handle: int, *arguments: _Any) -> None:
        _follow_current_stream(handle)
        compute(handle, *arguments)

    return _named(declaration, body, compute.__doc__ or "")


# Bias, and operations on whole tensors

addTensor_v3 = _computes("addTensor_v3(handle alpha bDesc b beta yDesc y)", "Compute y = alpha * b + beta * y")
setTensor = _computes("setTensor(handle yDesc y valuePtr)", "Fill y with the scalar at valuePtr")
scaleTensor = _computes("scaleTensor(handle yDesc y alpha)", "Multiply y by alpha")
convolutionBackwardBias = _computes(
    "convolutionBackwardBias(handle alpha srcDesc srcData beta destDesc destData)",
    "Compute the gradient of a bias from that of the output",
)
createOpTensorDescriptor = _calls("createOpTensorDescriptor()", _NEW)
setOpTensorDescriptor = _calls(
    "setOpTensorDescriptor(opTensorDesc opTensorOp opTensorCompType opTensorNanOpt)",
    "Describe an operation of two tensors",
)
getOpTensorDescriptor = _calls(
    "getOpTensorDescriptor(opTensorDesc)", "Return (opTensorOp, opTensorCompType, opTensorNanOpt)"
)
destroyOpTensorDescriptor = _calls("destroyOpTensorDescriptor(opTensorDesc)", "Destroy a descriptor")
opTensor = _computes(
    "opTensor(handle opTensorDesc alpha1 aDesc A alpha2 bDesc B beta cDesc C)",
    "Compute C = op(alpha1 * A, alpha2 * B) + beta * C",
)
createReduceTensorDescriptor = _calls("createReduceTensorDescriptor()", _NEW)
setReduceTensorDescriptor = _calls(
    "setReduceTensorDescriptor(reduceTensorDesc reduceTensorOp reduceTensorCompType reduceTensorNanOpt"
    " reduceTensorIndices reduceTensorIndicesType)",
    "Describe a reduction",
)
getReduceTensorDescriptor = _calls(
    "getReduceTensorDescriptor(reduceTensorDesc)", "Return (op, compute type, NaN option, indices, type of indices)"
)
destroyReduceTensorDescriptor = _calls("destroyReduceTensorDescriptor(reduceTensorDesc)", "Destroy a descriptor")
getReductionIndicesSize = _calls(
    "getReductionIndicesSize(handle reduceTensorDesc aDesc cDesc)", "Return the bytes of a reduction's indices"
)
getReductionWorkspaceSize = _calls(
    "getReductionWorkspaceSize(handle reduceTensorDesc aDesc cDesc)", "Return the bytes of a reduction's workspace"
)
reduceTensor = _computes(
    "reduceTensor(handle reduceTensorDesc indices indicesSizeInBytes workspace workspaceSizeInBytes alpha aDesc A"
    " beta cDesc C)",
    "Compute C = alpha * reduction(A) + beta * C",
)

# Pooling

createPoolingDescriptor = _calls("createPoolingDescriptor()", _NEW)
setPooling2dDescriptor_v4 = _calls(
    "setPooling2dDescriptor_v4(poolingDesc mode maxpoolingNanOpt windowHeight windowWidth verticalPadding"
    " horizontalPadding verticalStride horizontalStride)",
    "Describe pooling in two dimensions",
)
setPoolingNdDescriptor_v4 = _calls(
    "setPoolingNdDescriptor_v4(poolingDesc mode maxpoolingNanOpt nbDims windowDimA paddingA strideA)",
    "Describe pooling by nbDims C ints at each of three addresses",
)
destroyPoolingDescriptor = _calls("destroyPoolingDescriptor(poolingDesc)", "Destroy a descriptor")
poolingForward = _computes(
    "poolingForward(handle poolingDesc alpha srcDesc srcData beta dstDesc dstData)",
    "Compute dst = alpha * pooling(src) + beta * dst",
)
poolingBackward = _computes(
    "poolingBackward(handle poolingDesc alpha srcDesc srcData srcDiffDesc srcDiffData destDesc destData beta"
    " destDiffDesc destDiffData)",
    "Compute the gradient of pooling's input, dest, from its output, src, and that one's gradient",
)

# Activation and softmax

createActivationDescriptor = _calls("createActivationDescriptor()", _NEW)
setActivationDescriptor = _calls(
    "setActivationDescriptor(activationDesc mode reluNanOpt reluCeiling)",
    "Describe an activation; the last argument is ReLU's ceiling, or ELU's alpha",
)
destroyActivationDescriptor = _calls("destroyActivationDescriptor(activationDesc)", "Destroy a descriptor")
activationForward_v4 = _computes(
    "activationForward_v4(handle activationDesc alpha srcDesc srcData beta dstDesc dstData)",
    "Compute dst = alpha * activation(src) + beta * dst",
)
activationBackward_v4 = _computes(
    "activationBackward_v4(handle activationDesc alpha srcDesc srcData srcDiffDesc srcDiffData destDesc destData beta"
    " destDiffDesc destDiffData)",
    "Compute the gradient of an activation's input, dest, from its output, src, and that one's gradient",
)
softmaxForward = _computes(
    "softmaxForward(handle algorithm mode alpha srcDesc srcData beta dstDesc dstData)",
    "Compute dst = alpha * softmax(src) + beta * dst",
)
softmaxBackward = _computes(
    "softmaxBackward(handle algorithm mode alpha srcDesc srcData srcDiffDesc srcDiffData beta destDiffDesc"
    " destDiffData)",
    "Compute the gradient of softmax's input from its output, src, and that one's gradient",
)

# Dropout

createDropoutDescriptor = _calls("createDropoutDescriptor()", _NEW)
destroyDropoutDescriptor = _calls("destroyDropoutDescriptor(dropoutDesc)", "Destroy a descriptor")
dropoutGetStatesSize = _calls("dropoutGetStatesSize(handle)", "Return the bytes of the random generator's states")
setDropoutDescriptor = _calls(
    "setDropoutDescriptor(dropoutDesc handle dropout states stateSizeInBytes seed)",
    "Describe dropout, and seed its generator on the handle's stream",
)
getDropoutReserveSpaceSize = _calls(
    "getDropoutReserveSpaceSize(xDesc)",
    "Return the bytes that backward needs of forward",
    "cudnnDropoutGetReserveSpaceSize",
)
dropoutForward = _computes(
    "dropoutForward(handle dropoutDesc srcDesc srcData dstDesc dstData reserveSpace reserveSpaceSizeInBytes)",
    "Compute dropout",
)
dropoutBackward = _computes(
    "dropoutBackward(handle dropoutDesc dyDesc dyData dxDesc dxData reserveSpace reserveSpaceSizeInBytes)",
    "Compute the gradient of dropout's input",
)

# Batch normalization

deriveBNTensorDescriptor = _sets(
    _TENSORS,
    "deriveBNTensorDescriptor(derivedBnDesc xDesc mode)",
    "Describe the scale, bias, mean and variance of a tensor's normalization",
)
batchNormalizationForwardTraining = _computes(
    "batchNormalizationForwardTraining(handle mode alpha beta xDesc x yDesc y bnScaleBiasMeanVarDesc bnScale bnBias"
    " exponentialAverageFactor resultRunningMean resultRunningVariance epsilon resultSaveMean resultSaveInvVariance)",
    "Normalize a batch by its own mean and variance",
)
batchNormalizationForwardInference = _computes(
    "batchNormalizationForwardInference(handle mode alpha beta xDesc x yDesc y bnScaleBiasMeanVarDesc bnScale bnBias"
    " estimatedMean estimatedVariance epsilon)",
    "Normalize a batch by estimated mean and variance",
)
batchNormalizationBackward = _computes(
    "batchNormalizationBackward(handle mode alphaDataDiff betaDataDiff alphaParamDiff betaParamDiff xDesc x dyDesc dy"
    " dxDesc dx dBnScaleBiasDesc bnScale dBnScaleResult dBnBiasResult epsilon savedMean savedInvVariance)",
    "Compute the gradients of normalization's input, scale and bias",
)
batchNormalizationForwardTrainingEx = _computes(
    "batchNormalizationForwardTrainingEx(handle mode bnOps alpha beta xDesc x zDesc z yDesc y bnScaleBiasMeanVarDesc"
    " bnScale bnBias exponentialAverageFactor resultRunningMean resultRunningVariance epsilon resultSaveMean"
    " resultSaveInvVariance activationDesc workSpace workSpaceSizeInBytes reserveSpace reserveSpaceSizeInBytes)",
    "Normalize a batch, and add and activate where bnOps says so",
)
getBatchNormalizationForwardTrainingExWorkspaceSize = _calls(
    "getBatchNormalizationForwardTrainingExWorkspaceSize(handle mode bnOps xDesc zDesc yDesc bnScaleBiasMeanVarDesc"
    " activationDesc)",
    "Return the bytes of workspace that it needs",
)
batchNormalizationBackwardEx = _computes(
    "batchNormalizationBackwardEx(handle mode bnops alphaDataDiff betaDataDiff alphaParamDiff betaParamDiff xDesc x"
    " yDesc y dyDesc dy dzDesc dz dxDesc dx dBnScaleBiasDesc bnScaleData bnBiasData dBnScaleData dBnBiasData epsilon"
    " savedMean savedInvVariance activationDesc workSpace workSpaceSizeInBytes reserveSpace reserveSpaceSizeInBytes)",
    "Compute the gradients of what batchNormalizationForwardTrainingEx computed",
)
getBatchNormalizationBackwardExWorkspaceSize = _calls(
    "getBatchNormalizationBackwardExWorkspaceSize(handle mode bnOps xDesc yDesc dyDesc dzDesc dxDesc dBnScaleBiasDesc"
    " activationDesc)",
    "Return the bytes of workspace that it needs",
)
getBatchNormalizationTrainingExReserveSpaceSize = _calls(
    "getBatchNormalizationTrainingExReserveSpaceSize(handle mode bnOps activationDesc xDesc)",
    "Return the bytes that backward needs of forward",
)
