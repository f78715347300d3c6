"""The problem that three arrays pose, by their shapes, types and strides."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack, final

from ucudnn.bounded import BoundedDict
from ucudnn.errors import InvalidProblemError
from ucudnn.problem import ConvolutionProblem, DataType, Layout, MathMode, Operation
from ucudnn.settings import parse_choice


class ArrayLike(Protocol):
    """The attributes of an array of NumPy or CuPy that a problem needs."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes, outermost first."""

    @property
    def strides(self) -> tuple[int, ...]:
        """The bytes from one element to the next, for each dimension."""

    @property
    def dtype(self) -> Any:
        """The type of the elements; its text is its name."""


@final
class BiasedFilters(NamedTuple):
    """What stands in the place of w where a problem adds a bias.

    Attributes:
        w: filters.
        bias: one element for each filter, dense and of the type of w.
    """

    w: Any
    bias: Any


class Parameters(TypedDict, total=False):
    """The keyword arguments of a convolution; see `problem_of`."""

    padding: int | Sequence[int]
    stride: int | Sequence[int]
    dilation: int | Sequence[int]
    groups: int
    layout: str | Layout | None
    math: str | MathMode
    deterministic: bool


_DEFAULTS: Parameters = {
    "padding": 0,
    "stride": 1,
    "dilation": 1,
    "groups": 1,
    "layout": None,
    "math": MathMode.TF32,
    "deterministic": False,
}


def problem_of(
    operation: Operation, x: ArrayLike, w: ArrayLike, y: ArrayLike, **parameters: Unpack[Parameters]
) -> ConvolutionProblem:
    """Return the problem that three arrays and their parameters pose.

    Args:
        operation: says which of the arrays is written.
        x: input or its gradient, shape (N, C, spatial...) or (N, spatial..., C).
        w: filters or their gradient, shape (K, C / groups, kernel...) or (K, kernel..., C / groups).
        y: output or its gradient, shape (N, K, output...) or (N, output..., K).
        **parameters: `padding`, zeros on either side, one number or one for each spatial dimension; `stride`, the
            distance between applications of the filter, and `dilation`, the distance between taps of the filter,
            likewise; `groups`, the number of channel groups; `layout`, 'NCHW', 'NHWC' or their forms in 1-D and 3-D,
            with channels first by default; `math`, 'tf32' (default) or 'fma'; `deterministic`, whether results must
            repeat to the bit.

    Raises:
        InvalidProblemError: if the arrays do not fit together; the message names the shapes.
        SettingsError: if layout or math is not known.
        TypeError: if there is another parameter.
    """
    given: Parameters = {**_DEFAULTS, **parameters}
    unknown = given.keys() - _DEFAULTS.keys()
    if unknown:
        raise TypeError(f"unexpected keyword arguments {sorted(unknown)}: there are {', '.join(_DEFAULTS)}")
    groups, layout = given["groups"], given["layout"]
    _check_arrays(x=x, w=w, y=y)
    dimensions = len(x.shape) - 2
    order = Layout.channels_first(dimensions) if layout is None else parse_choice(Layout, layout, "layout")
    if len(w.shape) != len(x.shape) or len(y.shape) != len(x.shape) or order.dimensions != dimensions:
        raise InvalidProblemError(f"x {x.shape}, w {w.shape} and y {y.shape} do not all have layout {order.value}")
    batch, channels, spatial = _split(x.shape, order)
    filters, filter_channels, kernel = _split(w.shape, order)
    if not hasattr(groups, "__index__") or groups < 1 or filter_channels * groups != channels:
        raise InvalidProblemError(
            f"w {w.shape} has {filter_channels} channels, but x {x.shape} has {channels} in {groups} groups"
        )
    problem = ConvolutionProblem(
        operation=operation,
        batch=batch,
        channels=channels,
        spatial=spatial,
        filters=filters,
        kernel=kernel,
        padding=_each(given["padding"], dimensions),
        stride=_each(given["stride"], dimensions),
        dilation=_each(given["dilation"], dimensions),
        groups=groups,
        dtype=_data_type(x, w, y),
        layout=order,
        math=parse_choice(MathMode, given["math"], "math"),
        deterministic=given["deterministic"],
    )
    if problem.y_shape != tuple(y.shape):
        raise InvalidProblemError(
            f"y has shape {tuple(y.shape)}, but x {x.shape} and w {w.shape} make {problem.y_shape}"
        )
    _batch_stride("w", w)
    return replace(problem, x_batch_stride=_batch_stride("x", x), y_batch_stride=_batch_stride("y", y))


def with_bias(problem: ConvolutionProblem, bias: ArrayLike) -> ConvolutionProblem:
    """Return a problem of Forward that adds a bias, too.

    Raises:
        InvalidProblemError: if the bias is not dense, or has another type or shape.
    """
    _check_arrays(bias=bias)
    shape, dtype = tuple(bias.shape), str(bias.dtype)
    if shape != (problem.filters,) or dtype != problem.dtype.value or bias.strides != (problem.dtype.itemsize,):
        raise InvalidProblemError(
            f"the bias has shape {shape}, type {dtype} and strides {bias.strides}: give {problem.filters} adjacent"
            f" numbers of {problem.dtype.value}, one for each filter"
        )
    return _biased(problem)


@lru_cache(maxsize=1 << 12)
def _biased(problem: ConvolutionProblem) -> ConvolutionProblem:
    return replace(problem, biased=True)


def _check_arrays(**arrays: object) -> None:
    for name, array in arrays.items():
        if not all(hasattr(array, needed) for needed in ("shape", "strides", "dtype")):
            kind = type(array).__name__
            raise InvalidProblemError(f"{name} is a {kind}: give an array with shape, strides and dtype")


def _split(shape: tuple[int, ...], layout: Layout) -> tuple[int, int, tuple[int, ...]]:
    outer, *rest = shape
    return (outer, rest[-1], tuple(rest[:-1])) if layout.channels_last else (outer, rest[0], tuple(rest[1:]))


def _each(value: int | Sequence[int], dimensions: int) -> tuple[int, ...]:
    """Return one value for each spatial dimension. `ConvolutionProblem` refuses what is no whole number."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,) * dimensions


def _data_type(x: ArrayLike, w: ArrayLike, y: ArrayLike) -> DataType:
    names = [str(array.dtype) for array in (x, w, y)]
    if len(set(names)) > 1:
        raise InvalidProblemError(f"x, w and y have different types: {', '.join(names)}")
    known = {dtype.value: dtype for dtype in DataType}
    if names[0] not in known:
        raise InvalidProblemError(f"type {names[0]} is not supported: use one of {', '.join(known)}")
    return known[names[0]]


def _batch_stride(name: str, array: ArrayLike) -> int:
    """Return how many elements lie between the starts of two samples; a sample itself must be dense."""
    itemsize = array.dtype.itemsize
    dense = [prod(array.shape[axis + 1 :]) * itemsize for axis in range(len(array.shape))]
    inner = zip(array.shape[1:], array.strides[1:], dense[1:], strict=True)
    if any(size > 1 and stride != expected for size, stride, expected in inner):
        raise InvalidProblemError(
            f"{name} with strides {array.strides} is not dense within a sample: copy it, or name its layout"
        )
    stride = array.strides[0] if array.shape[0] > 1 else dense[0]
    if stride % itemsize or stride < dense[0] or (name == "w" and stride != dense[0]):
        raise InvalidProblemError(f"{name} has a stride of {stride} bytes between samples of {dense[0]} bytes")
    return int(stride // itemsize)


def _types(value: object) -> object:
    """Return what tells values apart that compare equal, such as 0, 0.0 and False, of which only 0 is a padding."""
    return (*map(type, value),) if isinstance(value, (tuple, frozenset)) else type(value)


@final
class ProblemCache:
    """Remembers the problems that arrays posed, so that the next call with such arrays costs one look-up."""

    _MOST = 4096

    def __init__(self) -> None:
        self._problems: BoundedDict[tuple[object, ...], ConvolutionProblem] = BoundedDict(self._MOST)

    def problem_of(
        self, operation: Operation, x: ArrayLike, w: ArrayLike, y: ArrayLike, **parameters: Unpack[Parameters]
    ) -> ConvolutionProblem:
        """Return the problem that three arrays and their parameters pose; see the function `problem_of`.

        Raises:
            InvalidProblemError: if the arrays do not fit together.
            SettingsError: if layout or math is not known.
        """
        try:
            key = (
                operation,
                x.shape,
                w.shape,
                y.shape,
                x.strides,
                w.strides,
                y.strides,
                x.dtype,
                w.dtype,
                y.dtype,
                *parameters.items(),
                *map(_types, parameters.values()),
            )
            known = self._problems.get(key)
        except (AttributeError, TypeError):  # no array, or a list among the parameters, which has no hash
            return problem_of(operation, x, w, y, **parameters)
        if known is None:
            known = self._problems[key] = problem_of(operation, x, w, y, **parameters)
        return known
