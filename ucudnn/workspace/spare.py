"""Tails and heads: what of a tensor holds nothing that is wanted serves as workspace.

Micro-batches write their samples one after another; until its turn comes, the memory of later samples of the output,
its tail, holds nothing that anybody wants, where the caller says so. The earlier a micro-batch, the more there is. And
both gradients read that of the output sample by sample; where nobody wants it afterwards, what was read, its head, is
free. The later a micro-batch, the more there is.
"""

from enum import IntEnum
from functools import lru_cache

from ucudnn.backends.base import SLACK_BYTES
from ucudnn.configuration import Configuration
from ucudnn.problem import ConvolutionProblem, Operation


class Place(IntEnum):
    """Where the workspace of a part lies: in memory of its own, the output's tail, or the head of its gradient."""

    OWN = 0
    TAIL = 1
    HEAD = 2


@lru_cache(maxsize=1 << 14)  # calls ask
def tail_step(problem: ConvolutionProblem) -> int:
    """Return the bytes of one sample of what is written; 0 of a filter gradient, and where it cannot be lent."""
    written = problem.operation is not Operation.BACKWARD_FILTER
    return _sample_bytes(problem, in_y=problem.operation is Operation.FORWARD) if written else 0


@lru_cache(maxsize=1 << 14)
def head_step(problem: ConvolutionProblem) -> int:
    """Return the bytes of one sample of the output's gradient; 0 where there is none, or it cannot be lent."""
    return _sample_bytes(problem, in_y=True) if problem.operation is not Operation.FORWARD else 0


def _sample_bytes(problem: ConvolutionProblem, *, in_y: bool) -> int:
    """Return the bytes of one sample of x or y; 0 where it cannot be lent.

    Samples with gaps between them are not the caller's alone, and parts of a lent configuration begin anywhere, so that
    each sample must be as aligned as the first.
    """
    gaps, stride, sample = (
        (problem.y_channel_stride, problem.y_batch_stride, problem.y_sample)
        if in_y
        else (problem.x_channel_stride, problem.x_batch_stride, problem.x_sample)
    )
    dense = not gaps and stride == sample
    return problem.steps[in_y] if dense and problem.begins_anywhere else 0


def free_bytes(problem: ConvolutionProblem) -> list[int]:
    """Return how much of a tail can be lent, by the number of its samples."""
    return _by_samples(problem, tail_step(problem))


def read_bytes(problem: ConvolutionProblem) -> list[int]:
    """Return how much of a head can be lent, by the number of its samples."""
    return _by_samples(problem, head_step(problem))


def lent_bytes(problem: ConvolutionProblem, *, fresh: bool, spent: bool) -> tuple[list[int], list[int]]:
    """Return how much is lent of a tail and of a head, by the number of their samples: nothing of what is wanted.

    Args:
        problem: the problem at mini-batch size.
        fresh: whether the output holds nothing that is wanted, so that its tail is lent.
        spent: whether its gradient is wanted by nobody afterwards, so that its head is lent.
    """
    nothing = [0] * (problem.batch + 1)
    return free_bytes(problem) if fresh else nothing, read_bytes(problem) if spent else nothing


def _by_samples(problem: ConvolutionProblem, step: int) -> list[int]:
    return [max(0, samples * step - SLACK_BYTES) for samples in range(problem.batch + 1)]


def places(
    problem: ConvolutionProblem, configuration: Configuration, *, fresh: bool = True, spent: bool = False
) -> list[Place]:
    """Return for each part, in order, where its workspace lies; slabs have their own.

    Args:
        problem: the problem at mini-batch size.
        configuration: what computes it.
        fresh: as in `lent_bytes`.
        spent: likewise.
    """
    free, read = lent_bytes(problem, fresh=fresh, spent=spent)
    found, done = [], 0
    for part in configuration.parts:
        left, need = problem.batch - done - part.size, part.workspace_bytes
        place = Place.OWN
        if need and not part.slabs:
            place = Place.TAIL if need <= free[left] else Place.HEAD if need <= read[done] else Place.OWN
        found.append(place)
        done += part.size
    return found


def own_bytes(
    problem: ConvolutionProblem, configuration: Configuration, *, fresh: bool = True, spent: bool = False
) -> int:
    """Return the workspace that parts need which find it in no tensor, as `places` says."""
    both = zip(configuration.parts, places(problem, configuration, fresh=fresh, spent=spent), strict=True)
    return max((part.workspace_bytes for part, place in both if place is Place.OWN), default=0)
