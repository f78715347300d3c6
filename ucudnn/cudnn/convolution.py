"""The three convolution operations: in micro-batches on a handle of `create`, else by cuDNN itself."""
# ruff: noqa: N802, N803  # names and parameters are those of cuDNN and CuPy

from ucudnn.cudnn.algorithms import ask, in_order, wants_determinism
from ucudnn.cudnn.handles import follow_current_stream
from ucudnn.cudnn.loading import call
from ucudnn.problem import Operation

__all__ = [
    "convolutionBackwardData_v3",
    "convolutionBackwardFilter_v3",
    "convolutionForward",
]


def convolutionForward(
    handle: int,
    alpha: int,
    srcDesc: int,
    srcData: int,
    filterDesc: int,
    filterData: int,
    convDesc: int,
    algo: int,
    workSpace: int,
    workSpaceSizeInBytes: int,
    beta: int,
    destDesc: int,
    destData: int,
) -> None:
    """Compute dest = alpha * conv(src, filter) + beta * dest on CuPy's current stream (cudnnConvolutionForward).

    A handle of `create` computes it in micro-batches, in its own workspace. The first call of a kernel benchmarks and
    plans it. cuDNN itself computes it on other handles, and if `ucudnn.ConvolutionProblem` cannot express it. Only then
    do the given algorithm and workspace matter.

    Args:
        handle: address of the handle.
        alpha: address of a host scalar: a double for double tensors, else a float.
        srcDesc: descriptor of the input.
        srcData: address of the input on the GPU.
        filterDesc: descriptor of the filters.
        filterData: address of the filters.
        convDesc: descriptor of the convolution.
        algo: number of the algorithm; for a handle of `create` see `ucudnn.cudnn.algorithms`.
        workSpace: address of the workspace.
        workSpaceSizeInBytes: size of the workspace.
        beta: address of a host scalar like alpha; at 0 dest is not read.
        destDesc: descriptor of the output.
        destData: address of the output.

    Raises:
        CudnnError: if cuDNN reports an error.
        InfeasibleError: if no configuration fits the kernel's limit.
        UcudnnError: as `ucudnn.Handle.convolve`.
    """
    inputs = (srcDesc, srcData, filterDesc, filterData, convDesc, algo, workSpace, workSpaceSizeInBytes)
    _convolve(Operation.FORWARD, handle, alpha, inputs, beta, (destDesc, destData))


def convolutionBackwardFilter_v3(
    handle: int,
    alpha: int,
    srcDesc: int,
    srcData: int,
    diffDesc: int,
    diffData: int,
    convDesc: int,
    algo: int,
    workSpace: int,
    workSpaceSizeInBytes: int,
    beta: int,
    gradDesc: int,
    gradData: int,
) -> None:
    """Compute grad = alpha * (gradient of the filters) + beta * grad (cudnnConvolutionBackwardFilter).

    src is the input, and diff the gradient of the output. beta is applied once, not once for each micro-batch.
    Arguments and errors are those of `convolutionForward`.
    """
    inputs = (srcDesc, srcData, diffDesc, diffData, convDesc, algo, workSpace, workSpaceSizeInBytes)
    _convolve(Operation.BACKWARD_FILTER, handle, alpha, inputs, beta, (gradDesc, gradData))


def convolutionBackwardData_v3(
    handle: int,
    alpha: int,
    filterDesc: int,
    filterData: int,
    diffDesc: int,
    diffData: int,
    convDesc: int,
    algo: int,
    workSpace: int,
    workSpaceSizeInBytes: int,
    beta: int,
    gradDesc: int,
    gradData: int,
) -> None:
    """Compute grad = alpha * (gradient of the input) + beta * grad (cudnnConvolutionBackwardData).

    diff is the gradient of the output. Arguments and errors are those of `convolutionForward`.
    """
    inputs = (filterDesc, filterData, diffDesc, diffData, convDesc, algo, workSpace, workSpaceSizeInBytes)
    _convolve(Operation.BACKWARD_DATA, handle, alpha, inputs, beta, (gradDesc, gradData))


def _convolve(
    operation: Operation, handle: int, alpha: int, inputs: tuple[int, ...], beta: int, output: tuple[int, int]
) -> None:
    """Compute an operation, given what stands between alpha and beta in cuDNN's order of arguments, and behind beta."""
    first, first_data, second, second_data, convolution, algo, *_ = inputs
    written, written_data = output
    answer = ask(handle, operation, in_order(operation, first, second, convolution, written))
    if answer is None:
        follow_current_stream(handle)
        call(f"cudnnConvolution{operation.value}", handle, alpha, *inputs, beta, *output)
        return
    micro, found = answer
    x, w, _, y = in_order(operation, first_data, second_data, convolution, written_data)
    deterministic = wants_determinism(operation, algo)
    micro.convolve(found, x, w, y, alpha=alpha, beta=beta, deterministic=deterministic)
