"""Exact scaling, out = alpha * result + beta * out, without temporaries. At beta = 0 `out` is not read.

NumPy copies the whole output of an operation in place if it cannot rule out at once that the output overlaps itself.
It cannot where the distance between samples is no multiple of the other strides. Such outputs are changed sample by
sample.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from ucudnn.backends.cpu.geometry import Array

_SMALL_BYTES = 32 * 1024  # of an output that NumPy may copy: less than the tile memory of a thread


def prescale(out: Array, beta: float) -> None:
    """Write out = beta * out; at beta = 0 write zeros, even over NaN."""
    if beta == 0:
        out.fill(0)
    elif beta != 1:
        for part in _parts(out):
            np.multiply(out[part], beta, out=out[part])


def accumulate(out: Array, term: Array) -> None:
    """Write out = out + term."""
    for part in _parts(out):
        np.add(out[part], term[part], out=out[part])


def finish(out: Array, result: Array, alpha: float, beta: float) -> None:
    """Write out = alpha * result + beta * out. The result, which shares no memory with `out`, is overwritten."""
    if beta == 0:
        np.multiply(result, alpha, out=out)
        return
    if alpha != 1:
        np.multiply(result, alpha, out=result)
    prescale(out, beta)
    accumulate(out, result)


def _parts(out: Array) -> Iterator[tuple[slice | int, ...]]:
    """Yield indices of all parts that NumPy changes in place: the whole output, or one sample after another."""
    if out.nbytes <= _SMALL_BYTES:
        yield ()
        return
    strides = sorted(abs(stride) for stride, size in zip(out.strides, out.shape, strict=True) if size > 1)
    if all(larger % smaller == 0 for smaller, larger in pairwise(strides)):
        yield ()
        return
    axis = max((axis for axis, size in enumerate(out.shape) if size > 1), key=lambda axis: abs(out.strides[axis]))
    for index in range(out.shape[axis]):
        yield (*(slice(None),) * axis, index)
