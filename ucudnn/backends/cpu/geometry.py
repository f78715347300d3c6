"""Which elements of x, w and y meet: the valid ranges of filter taps, and the views that all algorithms use."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from ucudnn.problem import ConvolutionProblem

Array: TypeAlias = npt.NDArray[Any]
"""A NumPy array of any type."""

Box: TypeAlias = tuple[slice, ...]
"""One slice for each dimension."""


@final
@dataclass(frozen=True, slots=True)
class Tap:
    """One element of the kernel, and the positions at which it lies inside the tensor, not in the padding.

    Attributes:
        index: position in the kernel.
        outputs: the spatial positions of y that this tap contributes to.
        inputs: the spatial position of x that it reads for each of these outputs.
        empty: whether there is no such position.
        complete: whether the tap contributes to all positions of y.
    """

    index: tuple[int, ...]
    outputs: Box
    inputs: Box
    empty: bool
    complete: bool


def span(size: int, offset: int, stride: int, count: int) -> tuple[slice, slice]:
    """Return the outputs o in [0, count) with 0 <= o * stride + offset < size, and the inputs o * stride + offset."""
    first = max(0, -(offset // stride))
    last = min(count, (size - 1 - offset) // stride + 1)
    if last <= first:
        return slice(0, 0), slice(0, 0)
    return slice(first, last), slice(first * stride + offset, (last - 1) * stride + offset + 1, stride)


def taps(problem: ConvolutionProblem) -> tuple[Tap, ...]:
    """Return every tap of the kernel, in row-major order; output o meets input o * stride + tap * dilation - pad."""
    sizes = problem.kernel, problem.spatial, problem.output, problem.padding, problem.stride, problem.dilation
    return _taps(tuple(zip(*sizes, strict=True)))


@lru_cache(maxsize=256)  # a layer is prepared at many micro-batch sizes, and its taps are the same at all of them
def _taps(sides: tuple[tuple[int, ...], ...]) -> tuple[Tap, ...]:
    found = []
    for index in product(*(range(taps) for taps, *_ in sides)):
        spans = [
            span(size, tap * dilation - pad, stride, count)
            for tap, (_, size, count, pad, stride, dilation) in zip(index, sides, strict=True)
        ]
        outputs, inputs = zip(*spans, strict=True)
        counts = [each.stop - each.start for each in outputs]
        complete = counts == [count for _, _, count, *_ in sides]
        found.append(Tap(index, outputs, inputs, empty=0 in counts, complete=complete))
    return tuple(found)


def tensor_view(problem: ConvolutionProblem, tensor: Array, start: int) -> Array:
    """View samples [start, start + batch) of x or y as (groups, channels / groups, batch, *spatial).

    This never copies, whatever the layout and the batch stride, because it permutes axes and splits one.
    """
    samples = tensor[start : start + problem.batch]
    if problem.layout.channels_last:
        samples = samples.transpose(0, -1, *range(1, samples.ndim - 1))
    batch, channels, *spatial = samples.shape
    split = samples.reshape(batch, problem.groups, channels // problem.groups, *spatial)
    return split.transpose(1, 2, 0, *range(3, split.ndim))


def filter_view(problem: ConvolutionProblem, filters: Array) -> Array:
    """View w as (groups, filters / groups, channels / groups, *kernel); never copies."""
    if problem.layout.channels_last:
        filters = filters.transpose(0, -1, *range(1, filters.ndim - 1))
    return filters.reshape(problem.groups, problem.filters // problem.groups, *filters.shape[1:])


def taps_first(array: Array, axis: int, dimensions: int) -> Array:
    """View an array with its kernel dimensions first, so that Tap.index indexes it."""
    kernel = range(axis, axis + dimensions)
    return array.transpose(*kernel, *(other for other in range(array.ndim) if other not in kernel))


def blocks(sizes: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Divide a box into boxes of at most `limit` elements and of almost equal size; outer dimensions are cut first.

    Args:
        sizes: sizes of the box, none of them 0.
        limit: the largest number of elements of one block, 1 or more.
    """
    counts: list[int] = []
    for size in reversed(sizes):
        counts.insert(0, -(-size // min(limit, size)))
        limit = max(1, limit // -(-size // counts[0]))
    for index in np.ndindex(*counts):  # itertools.product would hold all slices of a dimension in memory at once
        parts = zip(index, sizes, counts, strict=True)
        yield tuple(slice(size * at // count, size * (at + 1) // count) for at, size, count in parts)
