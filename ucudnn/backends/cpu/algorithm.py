"""The interface of the CPU backend's algorithms: each is planned for one problem, and computes on views of tensors."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import pairwise
from math import prod
from typing import NamedTuple, final

import numpy as np

from ucudnn.backends.cpu.geometry import Array
from ucudnn.problem import ConvolutionProblem


class CpuAlgorithm(ABC):
    """One algorithm planned for one problem. A call changes none of its state, so several threads may use it.

    Attributes:
        workspace_bytes: bytes of workspace that `compute` needs; it uses no other memory.
    """

    workspace_bytes: int

    @abstractmethod
    def compute(self, x: Array, w: Array, y: Array, *, alpha: float, beta: float, workspace: Array) -> None:
        """Compute the micro-batch: out = alpha * conv + beta * out, where the operation says which tensor `out` is.

        Args:
            x: (groups, channels / groups, batch, *spatial), a view of memory in any order.
            w: (groups, filters / groups, channels / groups, *kernel), likewise.
            y: (groups, filters / groups, batch, *output), likewise.
            alpha: factor of the convolution.
            beta: factor of the values that the output holds; at 0 the output is not read.
            workspace: at least `workspace_bytes` bytes with arbitrary contents, as uint8.
        """


@final
class Planner(NamedTuple):
    """What makes an algorithm ready for problems of type float32 or float64."""

    plan: Callable[[ConvolutionProblem], CpuAlgorithm]
    applies: Callable[[ConvolutionProblem], bool] = bool  # of any problem


def is_plain(problem: ConvolutionProblem) -> bool:
    """Return whether stride and dilation are 1."""
    return set(problem.stride) == set(problem.dilation) == {1}


@final
class ViewShapes:
    """The shapes on which an algorithm plans a problem.

    Attributes:
        dtype: type of the tensors, float32 or float64; problems of 16 bits are computed on copies in float32.
        complex: the complex type of the same precision.
        x: shape of the view of x: (groups, channels / groups, batch, *spatial).
        w: shape of the view of w: (groups, filters / groups, channels / groups, *kernel).
        y: shape of the view of y: (groups, filters / groups, batch, *output).
        positions: elements of one channel of y in the whole micro-batch.
        depth: number of products that add up to one element of y.
    """

    def __init__(self, problem: ConvolutionProblem) -> None:
        groups = problem.groups
        self.dtype = np.dtype(problem.dtype.value)
        self.complex = np.result_type(self.dtype, np.complex64)
        self.x = (groups, problem.channels // groups, problem.batch, *problem.spatial)
        self.w = (groups, problem.filters // groups, problem.channels // groups, *problem.kernel)
        self.y = (groups, problem.filters // groups, problem.batch, *problem.output)
        self.positions = problem.batch * prod(problem.output)
        self.depth = prod(self.w[2:])


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
    """Yield indices of all parts that NumPy changes in place: the whole output, or one sample after another.

    NumPy copies the whole output of an operation in place if it cannot rule out at once that the output overlaps
    itself. It cannot where the distance between samples is no multiple of the other strides.
    """
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
