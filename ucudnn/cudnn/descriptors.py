"""Descriptors of tensors, filters and convolutions, and their contents.

The contents of a descriptor that this package created are read once after it was set, and kept until it is set again or
destroyed. The contents of other descriptors are read at every use. All functions raise CudnnError if cuDNN returns an
error status.
"""
# ruff: noqa: N802, N803  # names and parameters are those of cuDNN and CuPy

from array import array
from collections.abc import Callable
from typing import Generic, TypeVar, cast, final

from ucudnn.backends.cudnn.api.described import (
    ConvolutionFacts,
    FilterFacts,
    TensorFacts,
    convolution_facts,
    filter_facts,
    tensor_facts,
)
from ucudnn.cudnn.constants import CUDNN_DATA_FLOAT
from ucudnn.cudnn.loading import call

__all__ = [
    "createConvolutionDescriptor",
    "createFilterDescriptor",
    "createTensorDescriptor",
    "destroyConvolutionDescriptor",
    "destroyFilterDescriptor",
    "destroyTensorDescriptor",
    "getConvolutionGroupCount",
    "getConvolutionMathType",
    "getFilterNdDescriptor",
    "getTensor4dDescriptor",
    "setConvolution2dDescriptor_v4",
    "setConvolution2dDescriptor_v5",
    "setConvolutionGroupCount",
    "setConvolutionMathType",
    "setConvolutionNdDescriptor_v3",
    "setFilter4dDescriptor_v4",
    "setFilterNdDescriptor_v4",
    "setTensor4dDescriptor",
    "setTensor4dDescriptorEx",
    "setTensorNdDescriptor",
]


Facts = TypeVar("Facts")

_MOST_DIMENSIONS = 8  # CUDNN_DIM_MAX


@final
class DescriptorCache(Generic[Facts]):
    """Contents of descriptors by their addresses; `read` reads one from cuDNN."""

    def __init__(self, read: Callable[[int], Facts]) -> None:
        self._read = read
        self._facts: dict[int, Facts | None] = {}

    def made(self, descriptor: int) -> int:
        """Keep the contents of a descriptor from now on, and return the descriptor."""
        self._facts[descriptor] = None
        return descriptor

    def changed(self, descriptor: int) -> None:
        """Forget the contents of a descriptor, because it is set."""
        if descriptor in self._facts:
            self._facts[descriptor] = None

    def gone(self, descriptor: int) -> None:
        """Forget a descriptor, because another descriptor may get its address."""
        self._facts.pop(descriptor, None)

    def __getitem__(self, descriptor: int) -> Facts:
        facts = self._facts.get(descriptor)
        if facts is None:
            facts = self._read(descriptor)
            if descriptor in self._facts:
                self._facts[descriptor] = facts
        return facts


def _numbers(count: int) -> tuple["array[int]", int]:
    numbers = array("i", bytes(4 * count))
    return numbers, numbers.buffer_info()[0]


def _read_tensor(descriptor: int) -> TensorFacts:
    sizes, sizes_at = _numbers(_MOST_DIMENSIONS)
    strides, strides_at = _numbers(_MOST_DIMENSIONS)
    data_type, count = call("cudnnGetTensorNdDescriptor", descriptor, _MOST_DIMENSIONS, sizes_at, strides_at)
    return tensor_facts(data_type, tuple(sizes[:count]), tuple(strides[:count]))


def _read_filter(descriptor: int) -> FilterFacts:
    data_type, layout, count, sizes = getFilterNdDescriptor(descriptor, _MOST_DIMENSIONS)
    return filter_facts(data_type, layout, sizes[:count])


def _read_convolution(descriptor: int) -> ConvolutionFacts:
    most = _MOST_DIMENSIONS - 2
    (padding, padding_at), (stride, stride_at), (dilation, dilation_at) = (_numbers(most) for _ in range(3))
    count, mode, compute_type = call(
        "cudnnGetConvolutionNdDescriptor", descriptor, most, padding_at, stride_at, dilation_at
    )
    return convolution_facts(
        tuple(padding[:count]),
        tuple(stride[:count]),
        tuple(dilation[:count]),
        mode,
        compute_type,
        call("cudnnGetConvolutionMathType", descriptor),
        call("cudnnGetConvolutionGroupCount", descriptor),
    )


TENSORS = DescriptorCache(_read_tensor)
FILTERS = DescriptorCache(_read_filter)
CONVOLUTIONS = DescriptorCache(_read_convolution)


def createTensorDescriptor() -> int:
    """Return the address of a new tensor descriptor (cudnnCreateTensorDescriptor)."""
    return TENSORS.made(call("cudnnCreateTensorDescriptor"))


def setTensor4dDescriptor(tensorDesc: int, format: int, dataType: int, n: int, c: int, h: int, w: int) -> None:
    """Describe a dense tensor of n x c x h x w elements in a CUDNN_TENSOR_ format (cudnnSetTensor4dDescriptor)."""
    TENSORS.changed(tensorDesc)
    call("cudnnSetTensor4dDescriptor", tensorDesc, format, dataType, n, c, h, w)


def setTensor4dDescriptorEx(
    tensorDesc: int,
    dataType: int,
    n: int,
    c: int,
    h: int,
    w: int,
    nStride: int,
    cStride: int,
    hStride: int,
    wStride: int,
) -> None:
    """Describe a tensor of n x c x h x w elements by its strides in elements (cudnnSetTensor4dDescriptorEx)."""
    TENSORS.changed(tensorDesc)
    call("cudnnSetTensor4dDescriptorEx", tensorDesc, dataType, n, c, h, w, nStride, cStride, hStride, wStride)


def getTensor4dDescriptor(tensorDesc: int) -> tuple[int, ...]:
    """Return (dataType, n, c, h, w, nStride, cStride, hStride, wStride) (cudnnGetTensor4dDescriptor)."""
    return cast("tuple[int, ...]", call("cudnnGetTensor4dDescriptor", tensorDesc))


def setTensorNdDescriptor(tensorDesc: int, dataType: int, nbDims: int, dimA: int, strideA: int) -> None:
    """Describe a tensor by nbDims C ints at each of two addresses (cudnnSetTensorNdDescriptor).

    dimA has the sizes (N, C, spatial...), and strideA the strides in elements.
    """
    TENSORS.changed(tensorDesc)
    call("cudnnSetTensorNdDescriptor", tensorDesc, dataType, nbDims, dimA, strideA)


def destroyTensorDescriptor(tensorDesc: int) -> None:
    """Destroy a tensor descriptor (cudnnDestroyTensorDescriptor)."""
    TENSORS.gone(tensorDesc)
    call("cudnnDestroyTensorDescriptor", tensorDesc)


def createFilterDescriptor() -> int:
    """Return the address of a new filter descriptor (cudnnCreateFilterDescriptor)."""
    return FILTERS.made(call("cudnnCreateFilterDescriptor"))


def setFilter4dDescriptor_v4(filterDesc: int, dataType: int, format: int, k: int, c: int, h: int, w: int) -> None:
    """Describe k filters of c x h x w in a CUDNN_TENSOR_ format; c counts one group (cudnnSetFilter4dDescriptor)."""
    FILTERS.changed(filterDesc)
    call("cudnnSetFilter4dDescriptor", filterDesc, dataType, format, k, c, h, w)


def setFilterNdDescriptor_v4(filterDesc: int, dataType: int, format: int, nbDims: int, filterDimA: int) -> None:
    """Describe filters by nbDims C ints (K, C / groups, kernel...) at an address (cudnnSetFilterNdDescriptor)."""
    FILTERS.changed(filterDesc)
    call("cudnnSetFilterNdDescriptor", filterDesc, dataType, format, nbDims, filterDimA)


def getFilterNdDescriptor(wDesc: int, nbDimsRequested: int) -> tuple[int, int, int, tuple[int, ...]]:
    """Return (dataType, format, nbDims, sizes) (cudnnGetFilterNdDescriptor).

    The sizes have nbDimsRequested entries, which are 0 after the last dimension.
    """
    sizes, address = _numbers(nbDimsRequested)
    data_type, layout, count = call("cudnnGetFilterNdDescriptor", wDesc, nbDimsRequested, address)
    return data_type, layout, count, tuple(sizes)


def destroyFilterDescriptor(filterDesc: int) -> None:
    """Destroy a filter descriptor (cudnnDestroyFilterDescriptor)."""
    FILTERS.gone(filterDesc)
    call("cudnnDestroyFilterDescriptor", filterDesc)


def createConvolutionDescriptor() -> int:
    """Return the address of a new convolution descriptor (cudnnCreateConvolutionDescriptor)."""
    return CONVOLUTIONS.made(call("cudnnCreateConvolutionDescriptor"))


def setConvolutionMathType(convDesc: int, mathType: int) -> None:
    """Set the math type (cudnnSetConvolutionMathType); all types but CUDNN_FMA_MATH allow TF32."""
    CONVOLUTIONS.changed(convDesc)
    call("cudnnSetConvolutionMathType", convDesc, mathType)


def getConvolutionMathType(convDesc: int) -> int:
    """Return the math type (cudnnGetConvolutionMathType)."""
    return cast("int", call("cudnnGetConvolutionMathType", convDesc))


def setConvolutionGroupCount(convDesc: int, groupCount: int) -> None:
    """Divide channels and filters into groups (cudnnSetConvolutionGroupCount)."""
    CONVOLUTIONS.changed(convDesc)
    call("cudnnSetConvolutionGroupCount", convDesc, groupCount)


def getConvolutionGroupCount(convDesc: int) -> int:
    """Return the number of groups (cudnnGetConvolutionGroupCount)."""
    return cast("int", call("cudnnGetConvolutionGroupCount", convDesc))


def setConvolution2dDescriptor_v4(
    convDesc: int, pad_h: int, pad_w: int, u: int, v: int, dilation_h: int, dilation_w: int, mode: int
) -> None:
    """Describe a 2-D convolution that accumulates in float32; see `setConvolution2dDescriptor_v5`."""
    setConvolution2dDescriptor_v5(convDesc, pad_h, pad_w, u, v, dilation_h, dilation_w, mode, CUDNN_DATA_FLOAT)


def setConvolution2dDescriptor_v5(
    convDesc: int, pad_h: int, pad_w: int, u: int, v: int, dilation_h: int, dilation_w: int, mode: int, computeType: int
) -> None:
    """Describe a 2-D convolution by padding, strides u and v, and dilation (cudnnSetConvolution2dDescriptor).

    Micro-batches compute convolutions of mode CUDNN_CROSS_CORRELATION that accumulate in CUDNN_DATA_FLOAT, or doubles
    in CUDNN_DATA_DOUBLE. cuDNN itself computes others.
    """
    CONVOLUTIONS.changed(convDesc)
    sizes = (pad_h, pad_w, u, v, dilation_h, dilation_w)
    call("cudnnSetConvolution2dDescriptor", convDesc, *sizes, mode, computeType)


def setConvolutionNdDescriptor_v3(
    convDesc: int, arrayLength: int, padA: int, filterStrideA: int, dilationA: int, mode: int, dataType: int
) -> None:
    """Describe a convolution by arrayLength C ints at each of three addresses (cudnnSetConvolutionNdDescriptor)."""
    CONVOLUTIONS.changed(convDesc)
    call("cudnnSetConvolutionNdDescriptor", convDesc, arrayLength, padA, filterStrideA, dilationA, mode, dataType)


def destroyConvolutionDescriptor(convDesc: int) -> None:
    """Destroy a convolution descriptor (cudnnDestroyConvolutionDescriptor)."""
    CONVOLUTIONS.gone(convDesc)
    call("cudnnDestroyConvolutionDescriptor", convDesc)
