"""Tails: what of an output is not written yet serves as workspace for what is computed before it.

Micro-batches write their samples one after another; until its turn comes, the memory of later samples holds nothing
that anybody wants, where the caller says so. The earlier a micro-batch, the more there is.
"""

from functools import lru_cache

from ucudnn.backends.base import SLACK_BYTES
from ucudnn.configuration import Configuration
from ucudnn.problem import ConvolutionProblem, Operation


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


def places(problem: ConvolutionProblem, configuration: Configuration, *, fresh: bool = True) -> list[bool]:
    """Return for each part, in order, whether its workspace is the output's tail; slabs have their own.

    Args:
        problem: the problem at mini-batch size.
        configuration: what computes it.
        fresh: whether the output holds nothing that is wanted; otherwise all parts have their own.
    """
    if not fresh:
        return [False] * len(configuration.parts)
    found, left, free = [], problem.batch, free_bytes(problem)
    for part in configuration.parts:
        left -= part.size
        found.append(not part.slabs and 0 < part.workspace_bytes <= free[left])
    return found


def own_bytes(problem: ConvolutionProblem, configuration: Configuration, *, fresh: bool = True) -> int:
    """Return the workspace that parts need which do not find it in the output's tail, as `places` says."""
    both = zip(configuration.parts, places(problem, configuration, fresh=fresh), strict=True)
    return max((part.workspace_bytes for part, lent in both if not lent), default=0)
