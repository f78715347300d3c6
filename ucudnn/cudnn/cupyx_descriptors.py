"""Descriptors of CuPy arrays, with the functions of `cupyx.cudnn`."""

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, final
from weakref import finalize

from ucudnn.cudnn import descriptors
from ucudnn.cudnn.constants import (
    CUDNN_CROSS_CORRELATION,
    CUDNN_DATA_BFLOAT16,
    CUDNN_DATA_DOUBLE,
    CUDNN_DATA_FLOAT,
    CUDNN_DATA_HALF,
    CUDNN_TENSOR_NCHW,
    CUDNN_TENSOR_NHWC,
    CUDNN_TENSOR_OP_MATH,
)

__all__ = [
    "Descriptor",
    "create_convolution_descriptor",
    "create_filter_descriptor",
    "create_tensor_descriptor",
    "get_data_type",
]


Array = Any
"""A CuPy array. Used are its data.ptr, data.device, dtype, shape, strides and flags."""

Sizes = tuple[int, ...]

_DATA_TYPES = {
    "float32": CUDNN_DATA_FLOAT,
    "float64": CUDNN_DATA_DOUBLE,
    "float16": CUDNN_DATA_HALF,
    "bfloat16": CUDNN_DATA_BFLOAT16,
}


@final
class Descriptor:
    """Owns a descriptor of cuDNN.

    Args:
        descriptor: address of the descriptor.
        destroyer: destroys the descriptor when nothing refers to this object any more.

    Attributes:
        value: address of the descriptor.
    """

    def __init__(self, descriptor: int, destroyer: Callable[[int], None]) -> None:
        self.value = descriptor
        # At the end of the process cuDNN may be unloaded before its descriptors are deleted.
        finalize(self, destroyer, descriptor).atexit = False


def create_tensor_descriptor(arr: Array, format: int = CUDNN_TENSOR_NCHW) -> Descriptor:
    """Return a descriptor of an array: (N, C, spatial...), or (N, spatial..., C) in CUDNN_TENSOR_NHWC.

    Raises:
        TypeError: if cuDNN has no such data type.
        ValueError: if the array is not C-contiguous, or the format is not known.
        CudnnError: if cuDNN reports an error.
    """
    check_contiguous(arr)
    return _tensor(get_data_type(arr.dtype), format, tuple(arr.shape))


def create_filter_descriptor(arr: Array, format: int = CUDNN_TENSOR_NCHW) -> Descriptor:
    """Return a descriptor of filters: (K, C / groups, kernel...), or (K, kernel..., C / groups) in CUDNN_TENSOR_NHWC.

    Raises:
        TypeError: if cuDNN has no such data type.
        ValueError: if the array is not C-contiguous, or the format is not known.
        CudnnError: if cuDNN reports an error.
    """
    check_contiguous(arr)
    return _filter(get_data_type(arr.dtype), format, tuple(arr.shape))


def create_convolution_descriptor(
    pad: Sequence[int],
    stride: Sequence[int],
    dtype: Any,
    mode: int = CUDNN_CROSS_CORRELATION,
    dilation: Sequence[int] | None = None,
    use_tensor_core: bool = False,
    groups: int = 1,
) -> Descriptor:
    """Return a descriptor of a convolution on arrays of a type.

    Args:
        pad: zeros on either side, for each spatial dimension.
        stride: distance between applications of the filter, for each spatial dimension.
        dtype: type of the arrays; products of halves are accumulated in float32.
        mode: CUDNN_CROSS_CORRELATION or CUDNN_CONVOLUTION.
        dilation: distance between taps of the filter, for each spatial dimension; 1 by default.
        use_tensor_core: whether to request tensor cores (CUDNN_TENSOR_OP_MATH).
        groups: channel groups.

    Raises:
        ValueError: if pad, stride and dilation differ in length.
        CudnnError: if cuDNN reports an error.
    """
    sizes = (tuple(pad), tuple(stride), (1,) * len(pad) if dilation is None else tuple(dilation))
    return _convolution(get_data_type(dtype), *sizes, mode, use_tensor_core, groups)


def get_data_type(dtype: Any) -> int:
    """Return the cudnnDataType_t of a NumPy or CuPy type.

    Raises:
        TypeError: if cuDNN has no such type.
    """
    name = getattr(dtype, "name", None) or str(dtype)
    if name not in _DATA_TYPES:
        raise TypeError(f"type {name} is not supported in cuDNN: use one of {', '.join(_DATA_TYPES)}")
    return _DATA_TYPES[name]


def check_contiguous(arr: Array) -> None:
    """Check that an array is C-contiguous.

    Raises:
        ValueError: if it is not.
    """
    if not arr.flags.c_contiguous:
        raise ValueError(f"strides {arr.strides} of an array {arr.shape} are not C-contiguous: copy the array first")


def _channels_first(format: int, shape: Sizes) -> Sizes:
    """Return a shape in cuDNN's order for all formats: (N, C, spatial...)."""
    if format not in (CUDNN_TENSOR_NCHW, CUDNN_TENSOR_NHWC):
        raise ValueError(f"format {format} is not known: give CUDNN_TENSOR_NCHW or CUDNN_TENSOR_NHWC")
    return shape if format == CUDNN_TENSOR_NCHW else (shape[0], shape[-1], *shape[1:-1])


def _tensor(data_type: int, format: int, shape: Sizes) -> Descriptor:
    sizes = array("i", _channels_first(format, shape))
    strides = array("i", _channels_first(format, tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))))
    descriptor = Descriptor(descriptors.createTensorDescriptor(), descriptors.destroyTensorDescriptor)
    descriptors.setTensorNdDescriptor(
        descriptor.value, data_type, len(sizes), sizes.buffer_info()[0], strides.buffer_info()[0]
    )
    return descriptor


def _filter(data_type: int, format: int, shape: Sizes) -> Descriptor:
    sizes = array("i", _channels_first(format, shape))
    descriptor = Descriptor(descriptors.createFilterDescriptor(), descriptors.destroyFilterDescriptor)
    descriptors.setFilterNdDescriptor_v4(descriptor.value, data_type, format, len(sizes), sizes.buffer_info()[0])
    return descriptor


def _convolution(
    data_type: int, pad: Sizes, stride: Sizes, dilation: Sizes, mode: int, tensor_cores: bool, groups: int
) -> Descriptor:
    if not len(pad) == len(stride) == len(dilation):
        raise ValueError(f"pad {pad}, stride {stride} and dilation {dilation} differ in length")
    accumulation = CUDNN_DATA_DOUBLE if data_type == CUDNN_DATA_DOUBLE else CUDNN_DATA_FLOAT
    pads, strides, dilations = (array("i", each) for each in (pad, stride, dilation))
    descriptor = Descriptor(descriptors.createConvolutionDescriptor(), descriptors.destroyConvolutionDescriptor)
    pads_at, strides_at, dilations_at = (each.buffer_info()[0] for each in (pads, strides, dilations))
    descriptors.setConvolutionNdDescriptor_v3(
        descriptor.value, len(pad), pads_at, strides_at, dilations_at, mode, accumulation
    )
    if tensor_cores:
        descriptors.setConvolutionMathType(descriptor.value, CUDNN_TENSOR_OP_MATH)
    descriptors.setConvolutionGroupCount(descriptor.value, groups)
    return descriptor


# Descriptors that are shared by equal arrays, so callers must not get them: the functions above make new ones.
tensor_descriptor = lru_cache(maxsize=4096)(_tensor)
filter_descriptor = lru_cache(maxsize=4096)(_filter)
convolution_descriptor = lru_cache(maxsize=4096)(_convolution)
