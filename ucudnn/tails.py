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
    """Return the bytes of one sample of what is written; 0 where it cannot be lent.

    A filter gradient has no samples. Samples with gaps between them are not the caller's alone, and parts of a lent
    configuration begin anywhere, so that each sample must be as aligned as the first.
    """
    if problem.operation is Operation.BACKWARD_FILTER:
        return 0
    forward = problem.operation is Operation.FORWARD
    gaps = problem.y_channel_stride if forward else problem.x_channel_stride
    stride, sample = (
        (problem.y_batch_stride, problem.y_sample) if forward else (problem.x_batch_stride, problem.x_sample)
    )
    dense = not gaps and stride == sample
    return problem.steps[forward] if dense and problem.begins_anywhere else 0


def free_bytes(problem: ConvolutionProblem) -> list[int]:
    """Return how much of a tail can be lent, by the number of its samples."""
    step = tail_step(problem)
    return [max(0, left * step - SLACK_BYTES) for left in range(problem.batch + 1)]


@lru_cache(maxsize=1 << 14)
def head_step(problem: ConvolutionProblem) -> int:
    """Return the bytes of one sample of the output's gradient; 0 where there is none, or it cannot be lent."""
    dense = not problem.y_channel_stride and problem.y_batch_stride == problem.y_sample
    gradient = problem.operation is not Operation.FORWARD
    return problem.steps[1] if gradient and dense and problem.begins_anywhere else 0


def read_bytes(problem: ConvolutionProblem) -> list[int]:
    """Return how much of a head can be lent, by the number of its samples."""
    step = head_step(problem)
    return [max(0, done * step - SLACK_BYTES) for done in range(problem.batch + 1)]


def places(
    problem: ConvolutionProblem, configuration: Configuration, *, fresh: bool = True, spent: bool = False
) -> list[Place]:
    """Return for each part, in order, where its workspace lies; slabs have their own.

    Args:
        problem: the problem at mini-batch size.
        configuration: what computes it.
        fresh: whether the output holds nothing that is wanted, so that its tail is lent.
        spent: whether its gradient is wanted by nobody afterwards, so that its head is lent.
    """
    if not (fresh or spent):
        return [Place.OWN] * len(configuration.parts)
    found, done = [], 0
    nothing = [0] * (problem.batch + 1)
    free, read = free_bytes(problem) if fresh else nothing, read_bytes(problem) if spent else nothing
    for part in configuration.parts:
        left = problem.batch - done - part.size
        place = Place.OWN
        if part.workspace_bytes and not part.slabs:
            fits = {Place.TAIL: free[left], Place.HEAD: read[done]}
            place = next((each for each, size in fits.items() if part.workspace_bytes <= size), place)
        found.append(place)
        done += part.size
    return found


def own_bytes(
    problem: ConvolutionProblem, configuration: Configuration, *, fresh: bool = True, spent: bool = False
) -> int:
    """Return the workspace that parts need which find it in no tensor, as `places` says."""
    both = zip(configuration.parts, places(problem, configuration, fresh=fresh, spent=spent), strict=True)
    return max((part.workspace_bytes for part, place in both if place is Place.OWN), default=0)
