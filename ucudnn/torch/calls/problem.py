"""The problem that the arguments of a PyTorch convolution pose, and the form of its output."""

from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import NamedTuple, final

import torch
from torch._prims_common import suggest_memory_format

from ucudnn.errors import InvalidProblemError
from ucudnn.problem import ConvolutionProblem, DataType, Layout, MathMode, Operation
from ucudnn.torch.device.gpu import Sizes, current_device, empty_of

DTYPES = {
    DataType.FLOAT16: torch.float16,
    DataType.BFLOAT16: torch.bfloat16,
    DataType.FLOAT32: torch.float32,
    DataType.FLOAT64: torch.float64,
}
"""PyTorch's types of ours."""

_KNOWN = {theirs: ours for ours, theirs in DTYPES.items()}
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@final
class Geometry(NamedTuple):
    """The arguments of a convolution besides its tensors, as PyTorch orders them; lists have an entry per dimension."""

    stride: Sizes
    padding: Sizes
    dilation: Sizes
    transposed: bool
    output_padding: Sizes
    groups: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TorchConvolution:
    """A convolution that PyTorch asks for.

    A transposed convolution is the gradient of a plain convolution's input: its input is the y of the plain one, and
    its output the x.

    Attributes:
        problem: Forward of the convolution; if it is transposed, of the plain one.
        transposed: whether it is transposed.
        out_shape: shape of its output, (N, K, spatial...) whatever the layout.
        memory_format: memory format of all its tensors.
    """

    problem: ConvolutionProblem
    transposed: bool
    out_shape: Sizes
    memory_format: torch.memory_format

    @property
    def forward(self) -> ConvolutionProblem:
        """The problem whose result is the output."""
        return _with(self.problem, Operation.BACKWARD_DATA if self.transposed else Operation.FORWARD)

    @property
    def backward_input(self) -> ConvolutionProblem:
        """The problem whose result is the gradient of the input."""
        return _with(self.problem, Operation.FORWARD if self.transposed else Operation.BACKWARD_DATA)

    @property
    def backward_weight(self) -> ConvolutionProblem:
        """The problem whose result is the gradient of the weight."""
        return _with(self.problem, Operation.BACKWARD_FILTER)


@lru_cache(maxsize=1 << 14)
def _with(problem: ConvolutionProblem, operation: Operation) -> ConvolutionProblem:
    return problem.with_operation(operation)


def shapes_of(problem: ConvolutionProblem) -> tuple[Sizes, Sizes, Sizes]:
    """Return the shapes of x, w and y in PyTorch, which puts channels first whatever the layout."""
    return (
        (problem.batch, problem.channels, *problem.spatial),
        (problem.filters, problem.channels // problem.groups, *problem.kernel),
        (problem.batch, problem.filters, *problem.output),
    )


def format_of(problem: ConvolutionProblem) -> torch.memory_format:
    """Return the memory format of a problem's tensors."""
    last = problem.layout.channels_last
    return _FORMATS[len(problem.spatial) + 2] if last else torch.contiguous_format


def memory_format_of(x: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """Return channels last if the strides of one tensor are in that order, as PyTorch does; else channels first.

    Strides tell it even for a tensor with one channel, which is both in memory.
    """
    last = _FORMATS.get(x.dim())
    if last is not None and any(suggest_memory_format(tensor) is last for tensor in (x, weight)):
        return last
    return torch.contiguous_format


@lru_cache(maxsize=1 << 14)
def convolution_of(
    x_shape: Sizes,
    w_shape: Sizes,
    dtype: torch.dtype,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    *,
    memory_format: torch.memory_format,
    math: MathMode,
    deterministic: bool,
) -> TorchConvolution | None:
    """Return a convolution, or None if ucudnn does not compute it.

    It does not if the convolution is empty, has a type that cuDNN has not, or has shapes that PyTorch will refuse.
    Shapes have channels first, whatever the memory format, and lists one value for each dimension, or one for all.
    """
    known = _KNOWN.get(dtype)
    dimensions = len(x_shape) - 2
    if known is None or not 1 <= dimensions <= 3 or 0 in x_shape or 0 in w_shape:
        return None
    # As in PyTorch, one value counts for each dimension.
    given = (stride, padding, dilation, output_padding)
    lists = [values * dimensions if len(values) == 1 else values for values in given]
    # PyTorch checks shapes later. A shape that does not fit would make a kernel read beyond the memory of its tensors.
    fits = len(w_shape) == len(x_shape) and all(len(each) == dimensions for each in lists) and groups > 0
    if not fits or x_shape[1] != (w_shape[0] if transposed else w_shape[1] * groups):
        return None
    stride, padding, dilation, output_padding = lists
    last = memory_format is not torch.contiguous_format
    channels, filters, spatial = x_shape[1], w_shape[0], x_shape[2:]
    if transposed:
        channels, filters = w_shape[1] * groups, w_shape[0]
        sizes = zip(x_shape[2:], w_shape[2:], stride, padding, dilation, output_padding, strict=True)
        spatial = tuple((n - 1) * s - 2 * p + d * (k - 1) + 1 + o for n, k, s, p, d, o in sizes)
    try:
        problem = ConvolutionProblem(
            operation=Operation.FORWARD,
            batch=x_shape[0],
            channels=channels,
            spatial=spatial,
            filters=filters,
            kernel=w_shape[2:],
            padding=padding,
            stride=stride,
            dilation=dilation,
            groups=groups,
            dtype=known,
            layout=next(each for each in Layout if each.dimensions == dimensions and each.channels_last is last),
            math=math if known is DataType.FLOAT32 else MathMode.TF32,
            deterministic=deterministic,
        )
    except InvalidProblemError:
        return None
    y_shape = (x_shape[0], filters, *problem.output)
    if transposed and y_shape != x_shape:
        return None
    out_shape = (x_shape[0], channels, *spatial) if transposed else y_shape
    return TorchConvolution(problem=problem, transposed=transposed, out_shape=out_shape, memory_format=memory_format)


_WRITTEN = {Operation.FORWARD: 2, Operation.BACKWARD_DATA: 0, Operation.BACKWARD_FILTER: 1}  # index in x, w, y


@final
class OutputForm:
    """Makes tensors for the output of a problem on the GPU of a number, or on the CPU for -1."""

    __slots__ = (
        *("_device", "_dtype", "_new_here", "_ordinal"),
        *("elements", "memory_format", "size_bytes", "sizes", "strides"),
    )

    def __init__(self, problem: ConvolutionProblem, ordinal: int) -> None:
        self._ordinal = ordinal
        self.sizes = shape = shapes_of(problem)[_WRITTEN[problem.operation]]
        self.memory_format = order = format_of(problem)
        self.strides = strides = torch.empty(shape, device="meta", memory_format=order).stride()
        self._device = torch.device("cpu") if ordinal < 0 else torch.device("cuda", ordinal)
        self._dtype = DTYPES[problem.dtype]
        self._new_here = partial(empty_of(self._device.type), shape, strides, self._dtype)
        self.elements = prod(shape)
        self.size_bytes = self.elements * problem.dtype.itemsize

    def new(self) -> torch.Tensor:
        """Return a new tensor for the output."""
        if self._ordinal < 0 or current_device() == self._ordinal:
            return self._new_here()
        return torch.empty_strided(self.sizes, self.strides, dtype=self._dtype, device=self._device)
