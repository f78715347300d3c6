"""Functions that call cuDNN's: bias, pooling, activation, softmax, batch normalization, dropout, tensor operations.

Each row of the table is one function, with CuPy's name and parameters and the function of cuDNN that takes the same.
Addresses are ints; alpha and beta are addresses of host scalars, doubles for double tensors and floats otherwise.
Functions that compute are queued on CuPy's current stream. All raise CudnnError if cuDNN returns an error status.
"""
# ruff: noqa: N816  # names are those of CuPy

from collections.abc import Callable
from operator import index
from typing import Any

from ucudnn.backends.cudnn.api.declarations import DECLARATIONS
from ucudnn.cudnn.descriptors import TENSORS
from ucudnn.cudnn.handles import follow_current_stream
from ucudnn.cudnn.loading import call, library
from ucudnn.cudnn.signatures import named

__all__ = [
    "activationBackward_v4",
    "activationForward_v4",
    "addTensor_v3",
    "batchNormalizationBackward",
    "batchNormalizationBackwardEx",
    "batchNormalizationForwardInference",
    "batchNormalizationForwardTraining",
    "batchNormalizationForwardTrainingEx",
    "convolutionBackwardBias",
    "createActivationDescriptor",
    "createDropoutDescriptor",
    "createOpTensorDescriptor",
    "createPoolingDescriptor",
    "createReduceTensorDescriptor",
    "deriveBNTensorDescriptor",
    "destroyActivationDescriptor",
    "destroyDropoutDescriptor",
    "destroyOpTensorDescriptor",
    "destroyPoolingDescriptor",
    "destroyReduceTensorDescriptor",
    "dropoutBackward",
    "dropoutForward",
    "dropoutGetStatesSize",
    "getBatchNormalizationBackwardExWorkspaceSize",
    "getBatchNormalizationForwardTrainingExWorkspaceSize",
    "getBatchNormalizationTrainingExReserveSpaceSize",
    "getDropoutReserveSpaceSize",
    "getOpTensorDescriptor",
    "getReduceTensorDescriptor",
    "getReductionIndicesSize",
    "getReductionWorkspaceSize",
    "opTensor",
    "poolingBackward",
    "poolingForward",
    "reduceTensor",
    "scaleTensor",
    "setActivationDescriptor",
    "setDropoutDescriptor",
    "setOpTensorDescriptor",
    "setPooling2dDescriptor_v4",
    "setPoolingNdDescriptor_v4",
    "setReduceTensorDescriptor",
    "setTensor",
    "softmaxBackward",
    "softmaxForward",
]


def _row(name: str, function: str, parameters: str, summary: str) -> Callable[..., Any]:
    """Return a function that calls cuDNN's under CuPy's name and parameters; integers may be NumPy's."""
    inputs = [letter for letter in DECLARATIONS[function] if letter.islower()]
    if len(inputs) != len(parameters.split()):
        raise AssertionError(f"{name} takes {parameters}, but {function} {inputs}")
    casts = [float if letter in "fd" else index for letter in inputs]

    def body(*arguments: Any) -> Any:
        return library().call(function, *[cast(each) for cast, each in zip(casts, arguments, strict=True)])

    return named(
        name, parameters, body, f"{summary} ({function}).\n\nRaises:\n    CudnnError: if cuDNN reports an error."
    )


def _computes(name: str, function: str, parameters: str, summary: str) -> Callable[..., None]:
    """Return such a function that computes on CuPy's current stream; its first parameter is the handle."""
    compute = _row(name, function, parameters, summary)

    def body(handle: int, *arguments: Any) -> None:
        follow_current_stream(handle)
        compute(handle, *arguments)

    return named(name, parameters, body, compute.__doc__ or "")


# Bias, and operations on whole tensors

addTensor_v3 = _computes(
    "addTensor_v3", "cudnnAddTensor", "handle alpha bDesc b beta yDesc y", "Compute y = alpha * b + beta * y"
)
setTensor = _computes("setTensor", "cudnnSetTensor", "handle yDesc y valuePtr", "Fill y with the scalar at valuePtr")
scaleTensor = _computes("scaleTensor", "cudnnScaleTensor", "handle yDesc y alpha", "Multiply y by alpha")
convolutionBackwardBias = _computes(
    "convolutionBackwardBias",
    "cudnnConvolutionBackwardBias",
    "handle alpha srcDesc srcData beta destDesc destData",
    "Compute the gradient of a bias from that of the output",
)
createOpTensorDescriptor = _row(
    "createOpTensorDescriptor", "cudnnCreateOpTensorDescriptor", "", "Return the address of a new descriptor"
)
setOpTensorDescriptor = _row(
    "setOpTensorDescriptor",
    "cudnnSetOpTensorDescriptor",
    "opTensorDesc opTensorOp opTensorCompType opTensorNanOpt",
    "Describe an operation of two tensors",
)
getOpTensorDescriptor = _row(
    "getOpTensorDescriptor",
    "cudnnGetOpTensorDescriptor",
    "opTensorDesc",
    "Return (opTensorOp, opTensorCompType, opTensorNanOpt)",
)
destroyOpTensorDescriptor = _row(
    "destroyOpTensorDescriptor", "cudnnDestroyOpTensorDescriptor", "opTensorDesc", "Destroy a descriptor"
)
opTensor = _computes(
    "opTensor",
    "cudnnOpTensor",
    "handle opTensorDesc alpha1 aDesc A alpha2 bDesc B beta cDesc C",
    "Compute C = op(alpha1 * A, alpha2 * B) + beta * C",
)
createReduceTensorDescriptor = _row(
    "createReduceTensorDescriptor", "cudnnCreateReduceTensorDescriptor", "", "Return the address of a new descriptor"
)
setReduceTensorDescriptor = _row(
    "setReduceTensorDescriptor",
    "cudnnSetReduceTensorDescriptor",
    "reduceTensorDesc reduceTensorOp reduceTensorCompType reduceTensorNanOpt reduceTensorIndices"
    " reduceTensorIndicesType",
    "Describe a reduction",
)
getReduceTensorDescriptor = _row(
    "getReduceTensorDescriptor",
    "cudnnGetReduceTensorDescriptor",
    "reduceTensorDesc",
    "Return (op, compute type, NaN option, indices, type of indices)",
)
destroyReduceTensorDescriptor = _row(
    "destroyReduceTensorDescriptor", "cudnnDestroyReduceTensorDescriptor", "reduceTensorDesc", "Destroy a descriptor"
)
getReductionIndicesSize = _row(
    "getReductionIndicesSize",
    "cudnnGetReductionIndicesSize",
    "handle reduceTensorDesc aDesc cDesc",
    "Return the bytes of a reduction's indices",
)
getReductionWorkspaceSize = _row(
    "getReductionWorkspaceSize",
    "cudnnGetReductionWorkspaceSize",
    "handle reduceTensorDesc aDesc cDesc",
    "Return the bytes of a reduction's workspace",
)
reduceTensor = _computes(
    "reduceTensor",
    "cudnnReduceTensor",
    "handle reduceTensorDesc indices indicesSizeInBytes workspace workspaceSizeInBytes alpha aDesc A beta cDesc C",
    "Compute C = alpha * reduction(A) + beta * C",
)

# Pooling

createPoolingDescriptor = _row(
    "createPoolingDescriptor", "cudnnCreatePoolingDescriptor", "", "Return the address of a new descriptor"
)
setPooling2dDescriptor_v4 = _row(
    "setPooling2dDescriptor_v4",
    "cudnnSetPooling2dDescriptor",
    "poolingDesc mode maxpoolingNanOpt windowHeight windowWidth verticalPadding horizontalPadding verticalStride"
    " horizontalStride",
    "Describe pooling in two dimensions",
)
setPoolingNdDescriptor_v4 = _row(
    "setPoolingNdDescriptor_v4",
    "cudnnSetPoolingNdDescriptor",
    "poolingDesc mode maxpoolingNanOpt nbDims windowDimA paddingA strideA",
    "Describe pooling by nbDims C ints at each of three addresses",
)
destroyPoolingDescriptor = _row(
    "destroyPoolingDescriptor", "cudnnDestroyPoolingDescriptor", "poolingDesc", "Destroy a descriptor"
)
poolingForward = _computes(
    "poolingForward",
    "cudnnPoolingForward",
    "handle poolingDesc alpha srcDesc srcData beta dstDesc dstData",
    "Compute dst = alpha * pooling(src) + beta * dst",
)
poolingBackward = _computes(
    "poolingBackward",
    "cudnnPoolingBackward",
    "handle poolingDesc alpha srcDesc srcData srcDiffDesc srcDiffData destDesc destData beta destDiffDesc destDiffData",
    "Compute the gradient of pooling's input, dest, from its output, src, and that one's gradient",
)

# Activation and softmax

createActivationDescriptor = _row(
    "createActivationDescriptor", "cudnnCreateActivationDescriptor", "", "Return the address of a new descriptor"
)
setActivationDescriptor = _row(
    "setActivationDescriptor",
    "cudnnSetActivationDescriptor",
    "activationDesc mode reluNanOpt reluCeiling",
    "Describe an activation; the last argument is ReLU's ceiling, or ELU's alpha",
)
destroyActivationDescriptor = _row(
    "destroyActivationDescriptor", "cudnnDestroyActivationDescriptor", "activationDesc", "Destroy a descriptor"
)
activationForward_v4 = _computes(
    "activationForward_v4",
    "cudnnActivationForward",
    "handle activationDesc alpha srcDesc srcData beta dstDesc dstData",
    "Compute dst = alpha * activation(src) + beta * dst",
)
activationBackward_v4 = _computes(
    "activationBackward_v4",
    "cudnnActivationBackward",
    "handle activationDesc alpha srcDesc srcData srcDiffDesc srcDiffData destDesc destData beta destDiffDesc"
    " destDiffData",
    "Compute the gradient of an activation's input, dest, from its output, src, and that one's gradient",
)
softmaxForward = _computes(
    "softmaxForward",
    "cudnnSoftmaxForward",
    "handle algorithm mode alpha srcDesc srcData beta dstDesc dstData",
    "Compute dst = alpha * softmax(src) + beta * dst",
)
softmaxBackward = _computes(
    "softmaxBackward",
    "cudnnSoftmaxBackward",
    "handle algorithm mode alpha srcDesc srcData srcDiffDesc srcDiffData beta destDiffDesc destDiffData",
    "Compute the gradient of softmax's input from its output, src, and that one's gradient",
)

# Dropout

createDropoutDescriptor = _row(
    "createDropoutDescriptor", "cudnnCreateDropoutDescriptor", "", "Return the address of a new descriptor"
)
destroyDropoutDescriptor = _row(
    "destroyDropoutDescriptor", "cudnnDestroyDropoutDescriptor", "dropoutDesc", "Destroy a descriptor"
)
dropoutGetStatesSize = _row(
    "dropoutGetStatesSize", "cudnnDropoutGetStatesSize", "handle", "Return the bytes of the random generator's states"
)
setDropoutDescriptor = _row(
    "setDropoutDescriptor",
    "cudnnSetDropoutDescriptor",
    "dropoutDesc handle dropout states stateSizeInBytes seed",
    "Describe dropout, and seed its generator on the handle's stream",
)
getDropoutReserveSpaceSize = _row(
    "getDropoutReserveSpaceSize",
    "cudnnDropoutGetReserveSpaceSize",
    "xDesc",
    "Return the bytes that backward needs of forward",
)
dropoutForward = _computes(
    "dropoutForward",
    "cudnnDropoutForward",
    "handle dropoutDesc srcDesc srcData dstDesc dstData reserveSpace reserveSpaceSizeInBytes",
    "Compute dropout",
)
dropoutBackward = _computes(
    "dropoutBackward",
    "cudnnDropoutBackward",
    "handle dropoutDesc dyDesc dyData dxDesc dxData reserveSpace reserveSpaceSizeInBytes",
    "Compute the gradient of dropout's input",
)


def _derive(derived: int, *arguments: int) -> None:
    TENSORS.changed(derived)
    call("cudnnDeriveBNTensorDescriptor", derived, *arguments)


# Batch normalization

deriveBNTensorDescriptor = named(
    "deriveBNTensorDescriptor",
    "derivedBnDesc xDesc mode",
    _derive,
    "Describe the scale, bias, mean and variance of a tensor's normalization (cudnnDeriveBNTensorDescriptor).",
)
batchNormalizationForwardTraining = _computes(
    "batchNormalizationForwardTraining",
    "cudnnBatchNormalizationForwardTraining",
    "handle mode alpha beta xDesc x yDesc y bnScaleBiasMeanVarDesc bnScale bnBias exponentialAverageFactor"
    " resultRunningMean resultRunningVariance epsilon resultSaveMean resultSaveInvVariance",
    "Normalize a batch by its own mean and variance",
)
batchNormalizationForwardInference = _computes(
    "batchNormalizationForwardInference",
    "cudnnBatchNormalizationForwardInference",
    "handle mode alpha beta xDesc x yDesc y bnScaleBiasMeanVarDesc bnScale bnBias estimatedMean estimatedVariance"
    " epsilon",
    "Normalize a batch by estimated mean and variance",
)
batchNormalizationBackward = _computes(
    "batchNormalizationBackward",
    "cudnnBatchNormalizationBackward",
    "handle mode alphaDataDiff betaDataDiff alphaParamDiff betaParamDiff xDesc x dyDesc dy dxDesc dx dBnScaleBiasDesc"
    " bnScale dBnScaleResult dBnBiasResult epsilon savedMean savedInvVariance",
    "Compute the gradients of normalization's input, scale and bias",
)
batchNormalizationForwardTrainingEx = _computes(
    "batchNormalizationForwardTrainingEx",
    "cudnnBatchNormalizationForwardTrainingEx",
    "handle mode bnOps alpha beta xDesc x zDesc z yDesc y bnScaleBiasMeanVarDesc bnScale bnBias"
    " exponentialAverageFactor resultRunningMean resultRunningVariance epsilon resultSaveMean resultSaveInvVariance"
    " activationDesc workSpace workSpaceSizeInBytes reserveSpace reserveSpaceSizeInBytes",
    "Normalize a batch, and add and activate where bnOps says so",
)
getBatchNormalizationForwardTrainingExWorkspaceSize = _row(
    "getBatchNormalizationForwardTrainingExWorkspaceSize",
    "cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize",
    "handle mode bnOps xDesc zDesc yDesc bnScaleBiasMeanVarDesc activationDesc",
    "Return the bytes of workspace that it needs",
)
batchNormalizationBackwardEx = _computes(
    "batchNormalizationBackwardEx",
    "cudnnBatchNormalizationBackwardEx",
    "handle mode bnops alphaDataDiff betaDataDiff alphaParamDiff betaParamDiff xDesc x yDesc y dyDesc dy dzDesc dz"
    " dxDesc dx dBnScaleBiasDesc bnScaleData bnBiasData dBnScaleData dBnBiasData epsilon savedMean savedInvVariance"
    " activationDesc workSpace workSpaceSizeInBytes reserveSpace reserveSpaceSizeInBytes",
    "Compute the gradients of what batchNormalizationForwardTrainingEx computed",
)
getBatchNormalizationBackwardExWorkspaceSize = _row(
    "getBatchNormalizationBackwardExWorkspaceSize",
    "cudnnGetBatchNormalizationBackwardExWorkspaceSize",
    "handle mode bnOps xDesc yDesc dyDesc dzDesc dxDesc dBnScaleBiasDesc activationDesc",
    "Return the bytes of workspace that it needs",
)
getBatchNormalizationTrainingExReserveSpaceSize = _row(
    "getBatchNormalizationTrainingExReserveSpaceSize",
    "cudnnGetBatchNormalizationTrainingExReserveSpaceSize",
    "handle mode bnOps activationDesc xDesc",
    "Return the bytes that backward needs of forward",
)
