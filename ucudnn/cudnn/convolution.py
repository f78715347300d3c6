"""The three convolution operations: in micro-batches on a handle of `create`, else by cuDNN as it is."""
# ruff: noqa: N802, N803  # names and parameters are those of cuDNN and CuPy

from ucudnn.cudnn.algorithms import wants_determinism
from ucudnn.cudnn.handles import follow_current_stream, micro_handle
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

    On a handle of `create` in micro-batches, with workspace of the handle's own; the first call of a kernel benchmarks
    and plans it. Algorithm and workspace count only where cuDNN computes it whole: on other handles, and for
    convolutions that `ucudnn.ConvolutionProblem` cannot say.

    Args:
        handle: address of the handle.
        alpha: address of a host scalar, a float, or a double for double tensors.
        srcDesc: descriptor of the input.
        srcData: address of the input on the GPU.
        filterDesc: descriptor of the filters.
        filterData: address of the filters.
        convDesc: descriptor of the convolution.
        algo: number of the algorithm; see `ucudnn.cudnn.algorithms` for what it says to a handle of `create`.
        workSpace: address of the workspace.
        workSpaceSizeInBytes: its size.
        beta: address of a host scalar, as alpha; at 0, dest is not read.
        destDesc: descriptor of the output.
        destData: address of the output.

    Raises:
        CudnnError: if cuDNN cannot.
        InfeasibleError: if no division fits the kernel's limit.
        UcudnnError: as `ucudnn.Handle.convolve`.
    """
    micro = micro_handle(handle)
    if micro is not None:
        asked = micro.ask(Operation.FORWARD, srcDesc, filterDesc, convDesc, destDesc)
        if asked is not None:
            deterministic = wants_determinism(Operation.FORWARD, algo)
            micro.convolve(asked, srcData, filterData, destData, alpha=alpha, beta=beta, deterministic=deterministic)
            return
    follow_current_stream(handle)
    call(
        "cudnnConvolutionForward",
        handle,
        alpha,
        srcDesc,
        srcData,
        filterDesc,
        filterData,
        convDesc,
        algo,
        workSpace,
        workSpaceSizeInBytes,
        beta,
        destDesc,
        destData,
    )


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

    As `convolutionForward`; beta counts once, however many micro-batches there are.

    Args:
        handle: address of the handle.
        alpha: address of a host scalar.
        srcDesc: descriptor of the input.
        srcData: address of the input on the GPU.
        diffDesc: descriptor of the output's gradient.
        diffData: address of the output's gradient.
        convDesc: descriptor of the convolution.
        algo: number of the algorithm.
        workSpace: address of the workspace.
        workSpaceSizeInBytes: its size.
        beta: address of a host scalar; at 0, grad is not read.
        gradDesc: filter descriptor of the filters' gradient.
        gradData: address of the filters' gradient.

    Raises:
        UcudnnError: as `convolutionForward`.
    """
    micro = micro_handle(handle)
    if micro is not None:
        asked = micro.ask(Operation.BACKWARD_FILTER, srcDesc, gradDesc, convDesc, diffDesc)
        if asked is not None:
            deterministic = wants_determinism(Operation.BACKWARD_FILTER, algo)
            micro.convolve(asked, srcData, gradData, diffData, alpha=alpha, beta=beta, deterministic=deterministic)
            return
    follow_current_stream(handle)
    call(
        "cudnnConvolutionBackwardFilter",
        handle,
        alpha,
        srcDesc,
        srcData,
        diffDesc,
        diffData,
        convDesc,
        algo,
        workSpace,
        workSpaceSizeInBytes,
        beta,
        gradDesc,
        gradData,
    )


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

    As `convolutionForward`.

    Args:
        handle: address of the handle.
        alpha: address of a host scalar.
        filterDesc: descriptor of the filters.
        filterData: address of the filters on the GPU.
        diffDesc: descriptor of the output's gradient.
        diffData: address of the output's gradient.
        convDesc: descriptor of the convolution.
        algo: number of the algorithm.
        workSpace: address of the workspace.
        workSpaceSizeInBytes: its size.
        beta: address of a host scalar; at 0, grad is not read.
        gradDesc: tensor descriptor of the input's gradient.
        gradData: address of the input's gradient.

    Raises:
        UcudnnError: as `convolutionForward`.
    """
    micro = micro_handle(handle)
    if micro is not None:
        asked = micro.ask(Operation.BACKWARD_DATA, gradDesc, filterDesc, convDesc, diffDesc)
        if asked is not None:
            deterministic = wants_determinism(Operation.BACKWARD_DATA, algo)
            micro.convolve(asked, gradData, filterData, diffData, alpha=alpha, beta=beta, deterministic=deterministic)
            return
    follow_current_stream(handle)
    call(
        "cudnnConvolutionBackwardData",
        handle,
        alpha,
        filterDesc,
        filterData,
        diffDesc,
        diffData,
        convDesc,
        algo,
        workSpace,
        workSpaceSizeInBytes,
        beta,
        gradDesc,
        gradData,
    )
