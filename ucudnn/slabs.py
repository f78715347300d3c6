"""Slabs: ranges of rows that divide a convolution where its mini-batch is too small to.

Rows are what the first spatial dimension counts, outermost in memory: depth in 3-D, height in 2-D. A slab computes a
range of them: of y in Forward and BackwardFilter, of x in BackwardData. It reads what its rows meet, their halo
included, by strides and offsets into the whole tensors; padding is left at their ends only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, prod

from ucudnn.problem import ConvolutionProblem, Operation

Rows = tuple[int, int]
"""The first row of x, and the first of y, that a slab reads or writes."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Slab:
    """A range of rows: of x in BackwardData, of y otherwise.

    Attributes:
        first: the first row.
        rows: how many there are.
    """

    first: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A slab as a problem of its own.

    Attributes:
        problem: what it computes; slabs from within the volume have the same.
        first_rows: where it begins in the whole; None where it is the whole.
    """

    problem: ConvolutionProblem
    first_rows: Rows | None


def row_count(problem: ConvolutionProblem) -> int:
    """Return how many rows slabs of a problem divide."""
    return (problem.spatial if problem.operation is Operation.BACKWARD_DATA else problem.output)[0]


def row_unit(problem: ConvolutionProblem) -> int:
    """Return of which number slabs have multiples of rows, so that those within the volume are the same problem."""
    return problem.stride[0] if problem.operation is Operation.BACKWARD_DATA else 1


def is_divisible(problem: ConvolutionProblem) -> bool:
    """Whether a problem can be divided into slabs: there are rows to divide, each of which meets rows of the volume."""
    reach = (problem.kernel[0] - 1) * problem.dilation[0]
    return row_count(problem) > row_unit(problem) and max(problem.paddings[0]) <= reach


def slabs_of(problem: ConvolutionProblem, rows: int) -> tuple[Slab, ...]:
    """Return slabs of so many rows, and one of what is left, that make up a problem."""
    count = row_count(problem)
    return tuple(Slab(first=first, rows=min(rows, count - first)) for first in range(0, count, rows))


@lru_cache(maxsize=1 << 12)
def kinds_of(problem: ConvolutionProblem, rows: int) -> tuple[tuple[ConvolutionProblem, tuple[Slab, ...]], ...]:
    """Return the slabs of so many rows by the problem that they are: those within the volume first, then the ends."""
    found: dict[tuple[int, int, int], list[Slab]] = {}
    for slab in slabs_of(problem, rows):
        found.setdefault(_sizes(problem, slab)[0], []).append(slab)
    ends = {0, row_count(problem)}

    def is_end(slabs: Sequence[Slab]) -> bool:
        return any(slab.first in ends or slab.first + slab.rows in ends for slab in slabs)

    kinds = sorted(found.items(), key=lambda kind: (is_end(kind[1]) and len(kind[1]) == 1, -len(kind[1])))
    return tuple((_piece(problem, *sizes), tuple(slabs)) for sizes, slabs in kinds)


def piece_of(problem: ConvolutionProblem, slab: Slab) -> Piece:
    """Return a slab of a problem as a problem of its own.

    Its tensors lie in those of the whole: channels first, there are gaps between its channels.
    """
    sizes, first_rows = _sizes(problem, slab)
    return Piece(problem=_piece(problem, *sizes), first_rows=first_rows)


def _sizes(problem: ConvolutionProblem, slab: Slab) -> tuple[tuple[int, int, int], Rows]:
    """Return the rows of x of a slab, and the padding before and after them; and where it begins."""
    backward = problem.operation is Operation.BACKWARD_DATA
    pad, stride = problem.padding[0], problem.stride[0]
    reach = (problem.kernel[0] - 1) * problem.dilation[0]
    rows = _backward_rows if backward else _forward_rows
    x, y = rows(slab, pad, stride, reach, problem.spatial[0], problem.output[0] if backward else 0)
    # Row o of y meets rows o * stride - pad to o * stride - pad + reach of x.
    before = x.start - (y.start * stride - pad)
    after = max(0, (y.stop - 1) * stride - pad + reach + 1 - x.stop)
    return (len(x), before, after), (x.start, y.start)


@lru_cache(maxsize=1 << 14)
def _piece(problem: ConvolutionProblem, rows: int, before: int, after: int) -> ConvolutionProblem:
    first = not problem.layout.channels_last
    return replace(
        problem,
        spatial=(rows, *problem.spatial[1:]),
        padding=(before, *problem.padding[1:]),
        post_padding=(after, *(each for _, each in problem.paddings[1:])),
        x_channel_stride=(problem.x_channel_stride or prod(problem.spatial)) if first else 0,
        y_channel_stride=(problem.y_channel_stride or prod(problem.output)) if first else 0,
        alignment=gcd(problem.alignment, *row_bytes(problem)),
    )


def pieces_of(problem: ConvolutionProblem, size: int, slabs: Sequence[Slab]) -> list[Piece]:
    """Return what is measured of a micro-batch: all of it, or slabs of it that are one problem."""
    part = problem.part(size)
    return [piece_of(part, slab) for slab in slabs] or [Piece(problem=part, first_rows=None)]


def row_bytes(problem: ConvolutionProblem) -> tuple[int, int]:
    """Return the bytes from one row to the next, of x and of y."""
    last = problem.layout.channels_last
    x = prod(problem.spatial[1:]) * (problem.channels if last else 1)
    y = prod(problem.output[1:]) * (problem.filters if last else 1)
    return x * problem.dtype.itemsize, y * problem.dtype.itemsize


def _forward_rows(slab: Slab, pad: int, stride: int, reach: int, count: int, _: int) -> tuple[range, range]:
    """Return the rows of x that rows of y meet, and these."""
    stop = slab.first + slab.rows
    first, last = slab.first * stride - pad, (stop - 1) * stride - pad + reach
    return range(max(0, first), min(count, last + 1)), range(slab.first, stop)


def _backward_rows(slab: Slab, pad: int, stride: int, reach: int, _: int, count: int) -> tuple[range, range]:
    """Return rows of x, and the rows of y that meet them.

    Where a stride leaves rows of x out, that may be none of them; then there is one that meets rows before them, which
    are padding here.
    """
    stop = slab.first + slab.rows
    first = min(-(-(slab.first + pad - reach) // stride), (slab.first + pad) // stride, count - 1)
    last = min((stop - 1 + pad) // stride, count - 1)
    return range(slab.first, stop), range(max(0, first), last + 1)
