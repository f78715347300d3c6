"""From the arguments of PyTorch's convolutions to a problem."""

from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch

from ucudnn.errors import InvalidProblemError
from ucudnn.problem import ConvolutionProblem, DataType, Layout, MathMode, Operation

_DTYPES = {
    torch.float16: DataType.FLOAT16,
    torch.bfloat16: DataType.BFLOAT16,
    torch.float32: DataType.FLOAT32,
    torch.float64: DataType.FLOAT64,
}
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

Sizes = tuple[int, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A convolution as PyTorch asks for it, as problems of ours.

    A transposed convolution computes the gradient of another one's input: what it reads is that one's y, and what it
    writes that one's x.

    Attributes:
        problem: Forward of the convolution, or of the other one.
        transposed: whether it is transposed.
        out_shape: shape of what it returns, channels first.
        memory_format: of all of its tensors.
    """

    problem: ConvolutionProblem
    transposed: bool
    out_shape: Sizes
    memory_format: torch.memory_format

    @property
    def forward(self) -> ConvolutionProblem:
        """What computes the output."""
        return self._as(Operation.BACKWARD_DATA if self.transposed else Operation.FORWARD)

    @property
    def backward_input(self) -> ConvolutionProblem:
        """What computes the gradient of the input."""
        return self._as(Operation.FORWARD if self.transposed else Operation.BACKWARD_DATA)

    @property
    def backward_weight(self) -> ConvolutionProblem:
        """What computes the gradient of the weight."""
        return self._as(Operation.BACKWARD_FILTER)

    def _as(self, operation: Operation) -> ConvolutionProblem:
        return _with(self.problem, operation)


@lru_cache(maxsize=1 << 14)
def _with(problem: ConvolutionProblem, operation: Operation) -> ConvolutionProblem:
    return problem.with_operation(operation)


def memory_format_of(x: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """Return channels last where one of the tensors is, as PyTorch does for cuDNN, else channels first."""
    last = _FORMATS.get(x.dim())
    if last is not None:
        for tensor in (x, weight):
            if not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last):
                return last
    return torch.contiguous_format


def call_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    *,
    math: MathMode,
    deterministic: bool,
) -> Call | None:
    """Return what a convolution asks for, or None where it is none of ours: empty, or of a type that cuDNN has not."""
    if x.dtype is not weight.dtype:
        return None
    return _call(
        tuple(x.shape),
        tuple(weight.shape),
        x.dtype,
        tuple(stride),
        tuple(padding),
        tuple(dilation),
        transposed,
        tuple(output_padding),
        groups,
        memory_format_of(x, weight),
        math,
        deterministic,
    )


@lru_cache(maxsize=1 << 14)
def _call(
    x_shape: Sizes,
    w_shape: Sizes,
    dtype: torch.dtype,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    memory_format: torch.memory_format,
    math: MathMode,
    deterministic: bool,
) -> Call | None:
    known = _DTYPES.get(dtype)
    dimensions = len(x_shape) - 2
    if known is None or not 1 <= dimensions <= 3 or 0 in x_shape or 0 in w_shape:
        return None
    last = memory_format is not torch.contiguous_format
    layout = next(each for each in Layout if each.dimensions == dimensions and each.channels_last is last)
    kernel = w_shape[2:]
    if transposed:
        channels, filters = w_shape[1] * groups, w_shape[0]
        sizes = zip(x_shape[2:], kernel, stride, padding, dilation, output_padding, strict=True)
        spatial = tuple((n - 1) * s - 2 * p + d * (k - 1) + 1 + o for n, k, s, p, d, o in sizes)
    else:
        channels, filters, spatial = x_shape[1], w_shape[0], x_shape[2:]
    try:
        problem = ConvolutionProblem(
            operation=Operation.FORWARD,
            batch=x_shape[0],
            channels=channels,
            spatial=spatial,
            filters=filters,
            kernel=kernel,
            padding=padding,
            stride=stride,
            dilation=dilation,
            groups=groups,
            dtype=known,
            layout=layout,
            math=math if known is DataType.FLOAT32 else MathMode.TF32,
            deterministic=deterministic,
        )
    except InvalidProblemError:
        return None  # PyTorch says what is wrong with it
    y_shape = (x_shape[0], filters, *problem.output)
    if transposed and y_shape != x_shape:
        return None
    out_shape = (x_shape[0], channels, *spatial) if transposed else y_shape
    return Call(problem=problem, transposed=transposed, out_shape=out_shape, memory_format=memory_format)
