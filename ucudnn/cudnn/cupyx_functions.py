"""Convolutions on CuPy arrays, with the functions of `cupyx.cudnn`.

Each is one kernel of the μ-cuDNN handle of the current GPU and thread (`get_handle`). Its workspace limit is that of
`set_max_workspace_size`, else UCUDNN_DEFAULT_WORKSPACE_LIMIT, else 64 MiB. (CuPy's default was 8 MiB, beyond which it
took slower algorithms.) With UCUDNN_TOTAL_WORKSPACE_SIZE the workspace is divided again for each new kernel.
"""
# ruff: noqa: N803  # W and gW are CuPy's names

from array import array
from collections.abc import Sequence
from math import prod
from operator import index
from threading import get_ident
from typing import Any

from ucudnn.cudnn.algorithms import choose
from ucudnn.cudnn.constants import CUDNN_CROSS_CORRELATION, CUDNN_TENSOR_NCHW
from ucudnn.cudnn.convolution import convolutionBackwardData_v3, convolutionBackwardFilter_v3, convolutionForward
from ucudnn.cudnn.cupyx_descriptors import (
    Array,
    check_contiguous,
    convolution_descriptor,
    filter_descriptor,
    get_data_type,
    tensor_descriptor,
)
from ucudnn.cudnn.handles import create, destroy
from ucudnn.cudnn.passthrough import addTensor_v3
from ucudnn.errors import CudnnError
from ucudnn.problem import Operation
from ucudnn.settings import Settings

__all__ = [
    "convolution_backward_data",
    "convolution_backward_filter",
    "convolution_forward",
    "get_handle",
    "get_max_workspace_size",
    "reset_handles",
    "set_max_workspace_size",
]


_CONVOLVE = {
    Operation.FORWARD: convolutionForward,
    Operation.BACKWARD_DATA: convolutionBackwardData_v3,
    Operation.BACKWARD_FILTER: convolutionBackwardFilter_v3,
}
_FILTERS = {Operation.FORWARD: 1, Operation.BACKWARD_DATA: 0, Operation.BACKWARD_FILTER: 2}  # position among the arrays
_SCALARS = {code: (array(code, [1.0]), array(code, [0.0])) for code in "fd"}  # one and zero, at fixed addresses


_handles: dict[tuple[int, int], int] = {}  # by GPU and thread
_limit: dict[str, int] = {}  # 'bytes', if `set_max_workspace_size` set them


def get_handle() -> int:
    """Return the handle of the current GPU and thread; it is created at its first use.

    Raises:
        UcudnnError: as `create`.
    """
    key = (_cuda().runtime.getDevice(), get_ident())
    if key not in _handles:
        _handles[key] = create()
    return _handles[key]


def reset_handles() -> None:
    """Destroy the handles of all GPUs and threads; none may be computing."""
    while _handles:
        destroy(_handles.popitem()[1])


def get_max_workspace_size() -> int:
    """Return the limit in bytes of each kernel's workspace.

    Raises:
        SettingsError: if UCUDNN_DEFAULT_WORKSPACE_LIMIT cannot be read.
    """
    return _limit["bytes"] if _limit else Settings.load().workspace_limit_bytes


def set_max_workspace_size(size: int) -> None:
    """Set the limit in bytes of each kernel's workspace for later calls."""
    _limit["bytes"] = int(size)


def convolution_forward(
    x: Array,
    W: Array,
    b: Array | None,
    y: Array,
    pad: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    auto_tune: bool,
    tensor_core: str,
    d_layout: int = CUDNN_TENSOR_NCHW,
    w_layout: int = CUDNN_TENSOR_NCHW,
) -> None:
    """Compute y = conv(x, W) + b (cudnnConvolutionForward, cudnnAddTensor).

    Args:
        x: input, shape (N, C, spatial...), or (N, spatial..., C) in d_layout CUDNN_TENSOR_NHWC.
        W: filters, shape (K, C / groups, kernel...), or (K, kernel..., C / groups) in w_layout CUDNN_TENSOR_NHWC.
        b: bias, K elements, or None.
        y: output, C-contiguous, shape (N, K, output...), or (N, output..., K).
        pad: zeros on either side, for each spatial dimension.
        stride: distance between applications of the filter, for each spatial dimension.
        dilation: distance between taps of the filter, for each spatial dimension.
        groups: channel groups.
        auto_tune: has no effect, because each kernel is benchmarked once.
        tensor_core: 'always', 'auto' or 'never'; only for float16 does it request CUDNN_TENSOR_OP_MATH.
        d_layout: format of x and y.
        w_layout: format of W.

    Raises:
        ValueError: if y is not C-contiguous, or arrays lie on different GPUs.
        TypeError: if cuDNN has no such data type.
        UcudnnError: as `ucudnn.cudnn.convolutionForward`.
    """
    parameters = (pad, stride, dilation, groups, tensor_core, d_layout, w_layout)
    _convolve(Operation.FORWARD, x, W, y, b, False, parameters)


def convolution_backward_filter(
    x: Array,
    gy: Array,
    gW: Array,
    pad: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    deterministic: bool,
    auto_tune: bool,
    tensor_core: str,
    d_layout: int = CUDNN_TENSOR_NCHW,
    w_layout: int = CUDNN_TENSOR_NCHW,
) -> None:
    """Compute gW, the gradient of the filters (cudnnConvolutionBackwardFilter).

    gy is the gradient of the output, and gW, which is overwritten, must be C-contiguous. With `deterministic` results
    repeat bit for bit. Other arguments, shapes and errors are those of `convolution_forward`.
    """
    parameters = (pad, stride, dilation, groups, tensor_core, d_layout, w_layout)
    _convolve(Operation.BACKWARD_FILTER, x, gy, gW, None, deterministic, parameters)


def convolution_backward_data(
    W: Array,
    x: Array,
    b: Array | None,
    y: Array,
    pad: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    deterministic: bool,
    auto_tune: bool,
    tensor_core: str,
    d_layout: int = CUDNN_TENSOR_NCHW,
    w_layout: int = CUDNN_TENSOR_NCHW,
) -> None:
    """Compute y, the gradient of a convolution's input, from x, the gradient of its output, and add b (deconvolution).

    The names are those of a deconvolution with input x and output y (cudnnConvolutionBackwardData, cudnnAddTensor).

    So x has the shape (N, K, output...), b C elements, and y, which is overwritten and must be C-contiguous, the shape
    (N, C, spatial...). With `deterministic` results repeat bit for bit. Other arguments and errors are those of
    `convolution_forward`.
    """
    parameters = (pad, stride, dilation, groups, tensor_core, d_layout, w_layout)
    _convolve(Operation.BACKWARD_DATA, W, x, y, b, deterministic, parameters)


_Parameters = tuple[Sequence[int], Sequence[int], Sequence[int], int, str, int, int]


def _convolve(
    operation: Operation,
    first: Array,
    second: Array,
    written: Array,
    bias: Array | None,
    deterministic: bool,
    parameters: _Parameters,
) -> None:
    """Run one operation; arrays come in cuDNN's order, inputs before the output."""
    pad, stride, dilation, groups, tensor_core, d_layout, w_layout = parameters
    check_contiguous(written)
    devices = [each.data.device.id for each in (first, second, written, bias) if each is not None]
    if len(set(devices)) > 1:
        raise ValueError(f"arrays lie on different GPUs: {devices}")
    if tensor_core not in ("always", "auto", "never"):
        raise ValueError(f"tensor_core is {tensor_core!r}: give 'always', 'auto' or 'never'")
    first, second = _contiguous(first), _contiguous(second)
    data_type = get_data_type(first.dtype)
    tensor_cores = tensor_core != "never" and str(first.dtype) == "float16"
    # Descriptors are remembered, and 0.0 would find that of 0.
    lists = (tuple(map(index, each)) for each in (pad, stride, dilation))
    convolution = convolution_descriptor(data_type, *lists, CUDNN_CROSS_CORRELATION, tensor_cores, index(groups))
    made = [
        filter_descriptor(get_data_type(each.dtype), index(w_layout), tuple(each.shape))
        if place == _FILTERS[operation]
        else tensor_descriptor(get_data_type(each.dtype), index(d_layout), tuple(each.shape))
        for place, each in enumerate((first, second, written))
    ]
    a, b, c = (each.value for each in made)
    one, zero = (each.buffer_info()[0] for each in _SCALARS["d" if str(first.dtype) == "float64" else "f"])
    handle = get_handle()
    try:
        perf = choose(handle, operation, (a, b, convolution.value, c), _limit.get("bytes"), bool(deterministic))
        workspace = _cuda().alloc(perf.memory) if perf.memory else None  # only plain cuDNN asks for one
        at = workspace.ptr if workspace is not None else 0
        inputs = (a, first.data.ptr, b, second.data.ptr, convolution.value, perf.algo, at, perf.memory)
        _CONVOLVE[operation](handle, one, *inputs, zero, c, written.data.ptr)
        if bias is not None:
            bias = _contiguous(bias)
            shape = (1, prod(bias.shape), *(1,) * (len(written.shape) - 2))
            described = tensor_descriptor(get_data_type(bias.dtype), CUDNN_TENSOR_NCHW, shape)
            addTensor_v3(handle, one, described.value, bias.data.ptr, one, c, written.data.ptr)
    except CudnnError as error:
        for each in (first, second, written):
            error.add_info(f"{each.dtype} {tuple(each.shape)}, strides {each.strides}")
        error.add_info(f"{operation.value}, pad {pad}, stride {stride}, dilation {dilation}, groups {groups}")
        error.add_info(f"tensor_core {tensor_core!r}, d_layout {d_layout}, w_layout {w_layout}")
        raise


def _cuda() -> Any:
    from ucudnn.backends.cudnn.gpu.cupy_gpu import cupy_module  # imported here because it loads CuPy

    return cupy_module().cuda


def _contiguous(arr: Array) -> Array:
    return arr if arr.flags.c_contiguous else arr.copy()
