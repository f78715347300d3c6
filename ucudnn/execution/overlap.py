"""Overlap: refuses an output that shares memory with an input.

A kernel may write its output before it has read its input, and micro-batches always do so for the samples that come
later. Whether the numbers come out wrong would depend on the algorithm and on the limit.
"""

from functools import lru_cache
from math import prod

from ucudnn.errors import InvalidProblemError
from ucudnn.problem import ConvolutionProblem, Operation

_NAMES = ("x", "w", "y")
_WRITTEN = {Operation.FORWARD: 2, Operation.BACKWARD_DATA: 0, Operation.BACKWARD_FILTER: 1}
_MOST_WORK = 100_000  # solutions that NumPy tries; beyond that, bytes count as shared

_Extent = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides in bytes of a tensor, its dense runs of bytes as the last dimension."""


def refuse_overlap(problem: ConvolutionProblem, x: int, w: int, y: int, bias: int | None = None) -> None:
    """Raise an error if the output of a problem shares a byte with one of its inputs, which lie at these addresses.

    Tensors that interleave without sharing a byte, such as two ranges of channels of one array, are accepted.

    Raises:
        InvalidProblemError: if they overlap; the message names both tensors.
    """
    addresses = (x, w, y)
    written, lengths = _lengths(problem)
    begin = addresses[written]
    end = begin + lengths[written]
    for index, address in enumerate(addresses):
        if index != written and address < end and begin < address + lengths[index]:
            _compare(problem, addresses, written, index)
    if bias is not None and bias < end and begin < bias + problem.filters * problem.dtype.itemsize:
        raise InvalidProblemError("y, which Forward writes, lies over the bias: give y memory of its own")


def _compare(problem: ConvolutionProblem, addresses: tuple[int, int, int], written: int, read: int) -> None:
    """Raise an error if two tensors whose ranges of addresses meet have a byte in common."""
    import numpy as np

    def at(index: int) -> np.ndarray:
        # NumPy solves which elements meet. It reads no byte, so addresses of a GPU serve as well.
        shape, strides = _extent(problem, _NAMES[index])
        base = min(addresses[written], addresses[read])  # small numbers, so that no address is too large
        interface = {"data": (addresses[index] - base + 1, False), "shape": shape, "strides": strides}
        return np.asarray(type("Bytes", (), {"__array_interface__": {**interface, "typestr": "|u1", "version": 3}})())

    try:
        shared = np.shares_memory(at(written), at(read), max_work=_MOST_WORK)  # type: ignore[arg-type]  # numpy states two of its values only
    except np.exceptions.TooHardError:
        shared = True
    if shared:
        raise InvalidProblemError(
            f"{_NAMES[written]}, which {problem.operation.value} writes, shares memory with {_NAMES[read]}, which it"
            f" reads: give {_NAMES[written]} memory of its own"
        )


@lru_cache(maxsize=1 << 12)
def _lengths(problem: ConvolutionProblem) -> tuple[int, tuple[int, int, int]]:
    """Return which tensor is written, and how many bytes x, w and y span."""
    return _WRITTEN[problem.operation], (problem.x_bytes, problem.w_bytes, problem.y_bytes)


def _extent(problem: ConvolutionProblem, name: str) -> _Extent:
    each = problem.dtype.itemsize
    if name == "w":
        return (problem.w_bytes,), (1,)
    channels, sizes = (problem.channels, problem.spatial) if name == "x" else (problem.filters, problem.output)
    batch_stride, channel_stride = (
        (problem.x_batch_stride, problem.x_channel_stride)
        if name == "x"
        else (problem.y_batch_stride, problem.y_channel_stride)
    )
    plane = prod(sizes) * each
    if channel_stride:
        return (problem.batch, channels, plane), (batch_stride * each, channel_stride * each, 1)
    return (problem.batch, channels * plane), (batch_stride * each, 1)
