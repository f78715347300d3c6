"""The contents of cuDNN's descriptors, and the problem that four descriptors describe.

Facts of one type that are equal are the same object, so that a call finds its problem by identities.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import final

from ucudnn.backends.cudnn.api.enums import (
    CROSS_CORRELATION,
    DATA_DOUBLE,
    DATA_FLOAT,
    DATA_HALF,
    DATA_TYPES,
    FMA_MATH,
    TENSOR_NCHW,
    TENSOR_NHWC,
)
from ucudnn.errors import InvalidProblemError
from ucudnn.problem import ConvolutionProblem, DataType, Layout, MathMode, Operation

_DATA_TYPE_OF = {number: dtype for dtype, number in DATA_TYPES.items()}


@final
@dataclass(frozen=True, slots=True, eq=False)
class TensorFacts:
    """The contents of a tensor descriptor: cudnnDataType_t, sizes (N, C, spatial...), and strides in elements."""

    data_type: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True, eq=False)
class FilterFacts:
    """The contents of a filter descriptor: its cudnn enumerations, and (K, C / groups, kernel...) in any format."""

    data_type: int
    format: int
    sizes: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True, eq=False)
class ConvolutionFacts:
    """The contents of a convolution descriptor.

    Attributes:
        padding: zeros on either side; like stride and dilation, one number for each spatial dimension.
        mode: cudnnConvolutionMode_t.
        compute_type: cudnnDataType_t of the accumulation.
        math_type: cudnnMathType_t.
    """

    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    mode: int
    compute_type: int
    math_type: int
    groups: int


tensor_facts = cache(TensorFacts)
filter_facts = cache(FilterFacts)
convolution_facts = cache(ConvolutionFacts)


@final
@dataclass(frozen=True, slots=True, eq=False)
class DescribedProblem:
    """The problem that the descriptors of one call describe.

    Attributes:
        problem: the problem without a promise of determinism; limits are kept under it.
        deterministic: the same problem with that promise.
        double: whether alpha and beta are doubles.
        math_type: the cudnnMathType_t of the convolution descriptor.
    """

    problem: ConvolutionProblem
    deterministic: ConvolutionProblem
    double: bool
    math_type: int


@cache
def described_problem(
    operation: Operation, x: TensorFacts, w: FilterFacts, convolution: ConvolutionFacts, y: TensorFacts
) -> DescribedProblem | str:
    """Return the problem that descriptors describe, or a text that says why no problem can express it."""
    try:
        problem = problem_from(operation, x, w, convolution, y)
    except InvalidProblemError as error:
        return str(error)
    return DescribedProblem(
        problem=problem,
        deterministic=replace(problem, deterministic=True),
        double=problem.dtype is DataType.FLOAT64,
        math_type=convolution.math_type,
    )


def problem_from(
    operation: Operation, x: TensorFacts, w: FilterFacts, convolution: ConvolutionFacts, y: TensorFacts
) -> ConvolutionProblem:
    """Return the problem that descriptors describe.

    There may be gaps between samples, as in a part of a larger tensor. Within a sample a tensor must be dense, with
    channels first or last. If sizes of 1 allow both layouts, the format of the filters decides.
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
    first = Layout.channels_first(len(spatial))
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
        layout=Layout(first.value.replace("C", "") + "C") if last else first,
        x_batch_stride=_batch_strides(x)[last],
        y_batch_stride=_batch_strides(y)[last],
        math=MathMode.FMA if convolution.math_type == FMA_MATH else MathMode.TF32,
    )
    if w.sizes[1] * convolution.groups != channels or y.sizes != (batch, filters, *problem.output):
        raise InvalidProblemError(f"y {y.sizes} is not what x {x.sizes} and w {w.sizes} make for {problem}")
    return problem


def _data_type(x: TensorFacts, w: FilterFacts, convolution: ConvolutionFacts, y: TensorFacts) -> DataType:
    if not x.data_type == w.data_type == y.data_type or x.data_type not in _DATA_TYPE_OF:
        raise InvalidProblemError(f"data types {x.data_type} of x, {w.data_type} of w and {y.data_type} of y")
    dtype = _DATA_TYPE_OF[x.data_type]
    # A problem accumulates in float32, or in float64 for float64. A program that lets cuDNN accumulate half tensors in
    # half allows both: algorithms that do so are candidates (legacy-API names that end in +half), if they are exact.
    half = (DATA_HALF,) if dtype is DataType.FLOAT16 else ()
    if convolution.compute_type not in (DATA_DOUBLE if dtype is DataType.FLOAT64 else DATA_FLOAT, *half):
        raise InvalidProblemError(f"{dtype.value} accumulated in data type {convolution.compute_type}")
    if convolution.mode != CROSS_CORRELATION:
        raise InvalidProblemError("a convolution that flips its filters (CUDNN_CONVOLUTION)")
    return dtype


def _channels_last(x: TensorFacts, w: FilterFacts, y: TensorFacts) -> bool:
    if w.format not in (TENSOR_NCHW, TENSOR_NHWC):
        raise InvalidProblemError(f"filters of format {w.format}")
    preferred = w.format == TENSOR_NHWC
    either = w.sizes[1] == 1 or prod(w.sizes[2:]) == 1  # the same bytes in both formats
    for last in (preferred, not preferred) if either else (preferred,):
        if last in _batch_strides(x) and last in _batch_strides(y):
            return last
    raise InvalidProblemError(f"strides {x.strides} of x and {y.strides} of y with filters of format {w.format}")


@cache
def _batch_strides(tensor: TensorFacts) -> dict[bool, int]:
    """Return the batch stride in elements for each layout in which samples are dense; the key says channels last."""
    batch, channels, *spatial = zip(tensor.sizes, tensor.strides, strict=True)
    found = {}
    for last in (False, True):
        dense = 1
        for size, stride in reversed([*spatial, channels] if last else [channels, *spatial]):
            if size > 1 and stride != dense:
                break
            dense *= size
        else:
            step = batch[1] if batch[0] > 1 else dense  # the batch stride of a single sample has no meaning
            if step >= dense:
                found[last] = step
    return found
