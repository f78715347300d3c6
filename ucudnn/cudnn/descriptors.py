"""Descriptors of tensors, filters and convolutions, and their contents.

The contents of a descriptor that this package created are read once after it was set, and kept until it is set again or
destroyed. The contents of other descriptors are read at every use. All functions raise CudnnError if cuDNN returns an
error status.
"""
# ruff: noqa: N802, N803, N816  # names and parameters are those of cuDNN and CuPy

from array import array
from collections.abc import Callable
from typing import Generic, TypeVar, final

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
from ucudnn.cudnn.signatures import calls, named

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


def _creates(cache: DescriptorCache[Facts], declaration: str) -> Callable[..., int]:
    create = calls(declaration, "Return the address of a new descriptor")
    return named(declaration, lambda: cache.made(create()), create.__doc__ or "")


def sets(cache: DescriptorCache[Facts], declaration: str, summary: str) -> Callable[..., None]:
    """Return a function that calls cuDNN's, and changes the descriptor that is its first argument; see `calls`."""
    change = calls(declaration, summary)

    def body(descriptor: int, *arguments: int) -> None:
        cache.changed(descriptor)
        change(descriptor, *arguments)

    return named(declaration, body, change.__doc__ or "")


def _destroys(cache: DescriptorCache[Facts], declaration: str) -> Callable[..., None]:
    destroy = calls(declaration, "Destroy a descriptor")

    def body(descriptor: int) -> None:
        cache.gone(descriptor)
        destroy(descriptor)

    return named(declaration, body, destroy.__doc__ or "")


createTensorDescriptor = _creates(TENSORS, "createTensorDescriptor()")
setTensor4dDescriptor = sets(
    TENSORS,
    "setTensor4dDescriptor(tensorDesc format dataType n c h w)",
    "Describe a dense tensor of n x c x h x w elements in a CUDNN_TENSOR_ format",
)
setTensor4dDescriptorEx = sets(
    TENSORS,
    "setTensor4dDescriptorEx(tensorDesc dataType n c h w nStride cStride hStride wStride)",
    "Describe a tensor of n x c x h x w elements by its strides in elements",
)
getTensor4dDescriptor = calls(
    "getTensor4dDescriptor(tensorDesc)", "Return (dataType, n, c, h, w, nStride, cStride, hStride, wStride)"
)
setTensorNdDescriptor = sets(
    TENSORS,
    "setTensorNdDescriptor(tensorDesc dataType nbDims dimA strideA)",
    "Describe a tensor by nbDims C ints at each of two addresses: sizes (N, C, spatial...), and strides in elements",
)
destroyTensorDescriptor = _destroys(TENSORS, "destroyTensorDescriptor(tensorDesc)")

createFilterDescriptor = _creates(FILTERS, "createFilterDescriptor()")
setFilter4dDescriptor_v4 = sets(
    FILTERS,
    "setFilter4dDescriptor_v4(filterDesc dataType format k c h w)",
    "Describe k filters of c x h x w in a CUDNN_TENSOR_ format, where c counts one group",
)
setFilterNdDescriptor_v4 = sets(
    FILTERS,
    "setFilterNdDescriptor_v4(filterDesc dataType format nbDims filterDimA)",
    "Describe filters by nbDims C ints (K, C / groups, kernel...) at an address",
)


def getFilterNdDescriptor(wDesc: int, nbDimsRequested: int) -> tuple[int, int, int, tuple[int, ...]]:
    """Return (dataType, format, nbDims, sizes) (cudnnGetFilterNdDescriptor).

    The sizes have nbDimsRequested entries, which are 0 after the last dimension.
    """
    sizes, address = _numbers(nbDimsRequested)
    data_type, layout, count = call("cudnnGetFilterNdDescriptor", wDesc, nbDimsRequested, address)
    return data_type, layout, count, tuple(sizes)


destroyFilterDescriptor = _destroys(FILTERS, "destroyFilterDescriptor(filterDesc)")

createConvolutionDescriptor = _creates(CONVOLUTIONS, "createConvolutionDescriptor()")
setConvolutionMathType = sets(
    CONVOLUTIONS,
    "setConvolutionMathType(convDesc mathType)",
    "Set the math type; all types but CUDNN_FMA_MATH allow TF32",
)
getConvolutionMathType = calls("getConvolutionMathType(convDesc)", "Return the math type")
setConvolutionGroupCount = sets(
    CONVOLUTIONS, "setConvolutionGroupCount(convDesc groupCount)", "Divide channels and filters into groups"
)
getConvolutionGroupCount = calls("getConvolutionGroupCount(convDesc)", "Return the number of groups")
# Micro-batches compute convolutions of mode CUDNN_CROSS_CORRELATION that accumulate in CUDNN_DATA_FLOAT, or doubles in
# CUDNN_DATA_DOUBLE. cuDNN itself computes others.
setConvolution2dDescriptor_v5 = sets(
    CONVOLUTIONS,
    "setConvolution2dDescriptor_v5(convDesc pad_h pad_w u v dilation_h dilation_w mode computeType)",
    "Describe a 2-D convolution by padding, strides u and v, and dilation",
)
setConvolution2dDescriptor_v4 = named(
    "setConvolution2dDescriptor_v4(convDesc pad_h pad_w u v dilation_h dilation_w mode)",
    lambda *given: setConvolution2dDescriptor_v5(*given, CUDNN_DATA_FLOAT),
    "Describe a 2-D convolution that accumulates in float32; see `setConvolution2dDescriptor_v5`.",
)
setConvolutionNdDescriptor_v3 = sets(
    CONVOLUTIONS,
    "setConvolutionNdDescriptor_v3(convDesc arrayLength padA filterStrideA dilationA mode dataType)",
    "Describe a convolution by arrayLength C ints at each of three addresses",
)
destroyConvolutionDescriptor = _destroys(CONVOLUTIONS, "destroyConvolutionDescriptor(convDesc)")
