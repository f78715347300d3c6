"""What descriptors of cuDNN hold, and the problem that four of them pose to a convolution.

Facts of one kind that are equal are the same object, so that a call finds its problem by identities.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import final

from ucudnn.cudnn.constants import (
    CUDNN_CROSS_CORRELATION,
    CUDNN_DATA_BFLOAT16,
    CUDNN_DATA_DOUBLE,
    CUDNN_DATA_FLOAT,
    CUDNN_DATA_HALF,
    CUDNN_FMA_MATH,
    CUDNN_TENSOR_NCHW,
    CUDNN_TENSOR_NHWC,
)
from ucudnn.errors import InvalidProblemError
from ucudnn.problem import ConvolutionProblem, DataType, Layout, MathMode, Operation

Sizes = tuple[int, ...]

DATA_TYPES = {
    CUDNN_DATA_FLOAT: DataType.FLOAT32,
    CUDNN_DATA_DOUBLE: DataType.FLOAT64,
    CUDNN_DATA_HALF: DataType.FLOAT16,
    CUDNN_DATA_BFLOAT16: DataType.BFLOAT16,
}
"""The data types that a problem can have, by cudnnDataType_t."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class TensorFacts:
    """What a tensor descriptor holds.

    Attributes:
        data_type: cudnnDataType_t.
        sizes: (N, C, spatial...).
        strides: elements from one to the next, in the order of `sizes`.
    """

    data_type: int
    sizes: Sizes
    strides: Sizes


@final
@dataclass(frozen=True, slots=True, eq=False)
class FilterFacts:
    """What a filter descriptor holds.

    Attributes:
        data_type: cudnnDataType_t.
        format: cudnnTensorFormat_t.
        sizes: (K, C / groups, kernel...), whatever the format.
    """

    data_type: int
    format: int
    sizes: Sizes


@final
@dataclass(frozen=True, slots=True, eq=False)
class ConvolutionFacts:
    """What a convolution descriptor holds.

    Attributes:
        padding: zeros on either side, for each spatial dimension.
        stride: distance between two applications of the filter, likewise.
        dilation: distance between two taps of the filter, likewise.
        mode: cudnnConvolutionMode_t.
        compute_type: cudnnDataType_t of the accumulation.
        math_type: cudnnMathType_t.
        groups: channel groups.
    """

    padding: Sizes
    stride: Sizes
    dilation: Sizes
    mode: int
    compute_type: int
    math_type: int
    groups: int


tensor_facts = cache(TensorFacts)
filter_facts = cache(FilterFacts)
convolution_facts = cache(ConvolutionFacts)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What the descriptors of one call ask for.

    Attributes:
        problem: with no promise of determinism, and the key under which a limit is kept.
        deterministic: the same with that promise.
        double: whether alpha and beta are doubles.
        math_type: the cudnnMathType_t of the convolution descriptor.
    """

    problem: ConvolutionProblem
    deterministic: ConvolutionProblem
    double: bool
    math_type: int


@cache
def asked(
    operation: Operation, x: TensorFacts, w: FilterFacts, convolution: ConvolutionFacts, y: TensorFacts
) -> Asked | str:
    """Return what is asked, or, in words, why it cannot be said as a problem."""
    try:
        problem = problem_from(operation, x, w, convolution, y)
    except InvalidProblemError as error:
        return str(error)
    return Asked(
        problem=problem,
        deterministic=replace(problem, deterministic=True),
        double=problem.dtype is DataType.FLOAT64,
        math_type=convolution.math_type,
    )


def problem_from(
    operation: Operation, x: TensorFacts, w: FilterFacts, convolution: ConvolutionFacts, y: TensorFacts
) -> ConvolutionProblem:
    """Return the problem that descriptors pose.

    Samples may be further apart than they are long, as in a part of a larger tensor; inside a sample a tensor must be
    dense, channels first or channels last. Where sizes of 1 leave both open, the filter's format decides.

    Args:
        operation: which of the tensors is written follows from it.
        x: input or its gradient.
        w: filters or their gradient.
        convolution: padding, stride, dilation, groups and how to compute.
        y: output or its gradient.

    Raises:
        InvalidProblemError: if they do not make a convolution, or one that cannot be said as a problem.
    """
    if not len(x.sizes) == len(w.sizes) == len(y.sizes) == len(convolution.padding) + 2:
        raise InvalidProblemError(
            f"x has {len(x.sizes)} dimensions, w {len(w.sizes)}, y {len(y.sizes)}, and the convolution"
            f" {len(convolution.padding)} spatial ones"
        )
    dtype = _data_type(x, w, convolution, y)
    last = _channels_last(x, w, y)
    batch, channels, *spatial = x.sizes
    filters, _, *kernel = w.sizes
    problem = ConvolutionProblem(
        operation=operation,
        batch=batch,
        channels=channels,
        spatial=tuple(spatial),
        filters=filters,
        kernel=tuple(kernel),
        padding=convolution.padding,
        stride=convolution.stride,
        dilation=convolution.dilation,
        groups=convolution.groups,
        dtype=dtype,
        layout=_layout(len(spatial), last),
        x_batch_stride=_batch_strides(x)[last],
        y_batch_stride=_batch_strides(y)[last],
        math=MathMode.FMA if convolution.math_type == CUDNN_FMA_MATH else MathMode.TF32,
    )
    if w.sizes[1] * convolution.groups != channels or y.sizes != (batch, filters, *problem.output):
        raise InvalidProblemError(f"y {y.sizes} is not what x {x.sizes} and w {w.sizes} make for {problem}")
    return problem


def _data_type(x: TensorFacts, w: FilterFacts, convolution: ConvolutionFacts, y: TensorFacts) -> DataType:
    if not x.data_type == w.data_type == y.data_type or x.data_type not in DATA_TYPES:
        raise InvalidProblemError(f"data types {x.data_type} of x, {w.data_type} of w and {y.data_type} of y")
    dtype = DATA_TYPES[x.data_type]
    # Half tensors may be accumulated in half: a problem always accumulates in float32, float64 in itself.
    accumulation = CUDNN_DATA_DOUBLE if dtype is DataType.FLOAT64 else CUDNN_DATA_FLOAT
    if convolution.compute_type != accumulation:
        raise InvalidProblemError(f"{dtype.value} accumulated in data type {convolution.compute_type}")
    if convolution.mode != CUDNN_CROSS_CORRELATION:
        raise InvalidProblemError("a convolution that flips its filters (CUDNN_CONVOLUTION)")
    return dtype


def _channels_last(x: TensorFacts, w: FilterFacts, y: TensorFacts) -> bool:
    if w.format not in (CUDNN_TENSOR_NCHW, CUDNN_TENSOR_NHWC):
        raise InvalidProblemError(f"filters of format {w.format}")
    preferred = w.format == CUDNN_TENSOR_NHWC
    either = w.sizes[1] == 1 or prod(w.sizes[2:]) == 1  # the same bytes in both formats
    for last in (preferred, not preferred) if either else (preferred,):
        if last in _batch_strides(x) and last in _batch_strides(y):
            return last
    raise InvalidProblemError(f"strides {x.strides} of x and {y.strides} of y with filters of format {w.format}")


@cache
def _batch_strides(tensor: TensorFacts) -> dict[bool, int]:
    """Return the elements from sample to sample, by whether channels come last, for each order that is dense."""
    batch, channels, *spatial = zip(tensor.sizes, tensor.strides, strict=True)
    found = {}
    for last in (False, True):
        dense = 1
        for size, stride in reversed([*spatial, channels] if last else [channels, *spatial]):
            if size > 1 and stride != dense:
                break
            dense *= size
        else:
            step = batch[1] if batch[0] > 1 else dense  # of a single sample the stride says nothing
            if step >= dense:
                found[last] = step
    return found


def _layout(dimensions: int, channels_last: bool) -> Layout:
    first = Layout.channels_first(dimensions)
    return Layout(first.value.replace("C", "") + "C") if channels_last else first
