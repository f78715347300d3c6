"""Slabs: ranges of rows that divide a convolution if its mini-batch is too small to be divided.

A row is one index of the first spatial dimension, which is the outermost one in memory: depth in 3-D, height in 2-D. A
slab computes a range of rows, of y in Forward and BackwardFilter and of x in BackwardData. It reads the rows that these
depend on, its halo included, by strides and offsets into the whole tensors. Padding remains only at the ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, prod

from ucudnn.problem import ConvolutionProblem, Operation

Rows = tuple[int, int]
"""The first row of x and the first row of y that a slab reads or writes."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Slab:
    """A range of rows, of x in BackwardData and of y otherwise."""

    first: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A slab, or a whole micro-batch, as a problem of its own."""

    problem: ConvolutionProblem
    first_rows: Rows | None  # None for the whole micro-batch


def row_count(problem: ConvolutionProblem) -> int:
    """Return the number of rows that the slabs of a problem divide."""
    return (problem.spatial if problem.operation is Operation.BACKWARD_DATA else problem.output)[0]


def row_unit(problem: ConvolutionProblem) -> int:
    """Return the number of which a slab's rows are a multiple, so that slabs within the volume are the same problem."""
    return problem.stride[0] if problem.operation is Operation.BACKWARD_DATA else 1


def is_divisible(problem: ConvolutionProblem) -> bool:
    """Whether a problem can be divided into slabs: it has several rows, and each depends on rows of the volume."""
    reach = (problem.kernel[0] - 1) * problem.dilation[0]
    return row_count(problem) > row_unit(problem) and max(problem.paddings[0]) <= reach


def slabs_of(problem: ConvolutionProblem, rows: int) -> tuple[Slab, ...]:
    """Return slabs of so many rows, and one with the remaining rows, that make up a problem."""
    count = row_count(problem)
    return tuple(Slab(first=first, rows=min(rows, count - first)) for first in range(0, count, rows))


@lru_cache(maxsize=1 << 12)
def slabs_by_problem(problem: ConvolutionProblem, rows: int) -> tuple[tuple[ConvolutionProblem, tuple[Slab, ...]], ...]:
    """Return the slabs of so many rows, grouped by the problem that they are.

    The slabs within the volume come first, and then those at its ends.
    """
    found: dict[tuple[int, int, int], list[Slab]] = {}
    for slab in slabs_of(problem, rows):
        found.setdefault(_sizes(problem, slab)[0], []).append(slab)
    ends = {0, row_count(problem)}

    def is_end(slabs: Sequence[Slab]) -> bool:
        return any(slab.first in ends or slab.first + slab.rows in ends for slab in slabs)

    groups = sorted(found.items(), key=lambda group: (is_end(group[1]) and len(group[1]) == 1, -len(group[1])))
    return tuple((_piece(problem, *sizes), tuple(slabs)) for sizes, slabs in groups)


def piece_of(problem: ConvolutionProblem, slab: Slab) -> Piece:
    """Return a slab of a problem as a problem of its own.

    Its tensors are parts of the whole tensors. With channels first, there are gaps between its channels.
    """
    sizes, first_rows = _sizes(problem, slab)
    return Piece(problem=_piece(problem, *sizes), first_rows=first_rows)


def _sizes(problem: ConvolutionProblem, slab: Slab) -> tuple[tuple[int, int, int], Rows]:
    """Return a slab's rows of x with the padding before and after them, and where the slab begins."""
    pad, stride, stop = problem.padding[0], problem.stride[0], slab.first + slab.rows
    reach = (problem.kernel[0] - 1) * problem.dilation[0]
    # Row o of y depends on rows o * stride - pad to o * stride - pad + reach of x.
    if problem.operation is Operation.BACKWARD_DATA:
        # If a stride skips the slab's rows of x, no row of y depends on them. Then one is taken that depends on rows
        # before the slab, which are padding here.
        most = problem.output[0] - 1
        first = min(-(-(slab.first + pad - reach) // stride), (slab.first + pad) // stride, most)
        x, y = range(slab.first, stop), range(max(0, first), min((stop - 1 + pad) // stride, most) + 1)
    else:
        first, last = slab.first * stride - pad, (stop - 1) * stride - pad + reach
        x, y = range(max(0, first), min(problem.spatial[0], last + 1)), range(slab.first, stop)
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
    """Return what is measured of a micro-batch: slabs of it that are the same problem, or () for all of it."""
    part = problem.part(size)
    return [piece_of(part, slab) for slab in slabs] or [Piece(problem=part, first_rows=None)]


def row_bytes(problem: ConvolutionProblem) -> tuple[int, int]:
    """Return the bytes from one row to the next in x and in y."""
    last = problem.layout.channels_last
    x = prod(problem.spatial[1:]) * (problem.channels if last else 1)
    y = prod(problem.output[1:]) * (problem.filters if last else 1)
    return x * problem.dtype.itemsize, y * problem.dtype.itemsize
