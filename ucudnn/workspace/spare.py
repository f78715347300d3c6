"""The tail of an output as workspace: memory of samples that later micro-batches will write.

Micro-batches write their samples one after another. Until a later micro-batch runs, the memory of its samples holds
nothing that anybody wants, if the caller says that the output is fresh. An earlier micro-batch has a longer tail.
"""

from functools import lru_cache

from ucudnn.backends.base import SLACK_BYTES
from ucudnn.configuration import Configuration
from ucudnn.problem import ConvolutionProblem, Operation


@lru_cache(maxsize=1 << 14)  # each call of a handle asks
def tail_step(problem: ConvolutionProblem) -> int:
    """Return the bytes of one sample of the output, or 0 if the output has no tail that can be workspace.

    A filter gradient has no samples. Samples with gaps between them do not own the gaps. A configuration that uses the
    tail may begin its parts at any sample, so each sample must be as aligned as the first.
    """
    if problem.operation is Operation.BACKWARD_FILTER:
        return 0
    in_y = problem.operation is Operation.FORWARD
    gaps, stride, sample = (
        (problem.y_channel_stride, problem.y_batch_stride, problem.y_sample)
        if in_y
        else (problem.x_channel_stride, problem.x_batch_stride, problem.x_sample)
    )
    dense = not gaps and stride == sample
    return problem.steps[in_y] if dense and problem.begins_anywhere else 0


def tail_bytes(problem: ConvolutionProblem, *, fresh: bool = True) -> list[int]:
    """Return how many bytes of workspace a tail of 0, 1, ... samples of a mini-batch offers.

    An output that is not `fresh` holds what is wanted, so its tail offers nothing.
    """
    step = tail_step(problem) if fresh else 0
    return [_offered(step, samples) for samples in range(problem.batch + 1)]


def _offered(step: int, samples: int) -> int:
    return max(0, samples * step - SLACK_BYTES)


def parts_in_tail(problem: ConvolutionProblem, configuration: Configuration, *, fresh: bool = True) -> list[bool]:
    """Return for each part, in order, whether its workspace lies in the tail behind it; slabs never use the tail."""
    step = tail_step(problem) if fresh else 0
    found, left = [], problem.batch
    for part in configuration.parts:
        left -= part.size
        found.append(0 < part.workspace_bytes <= _offered(step, left) and not part.slabs)
    return found


def own_bytes(problem: ConvolutionProblem, configuration: Configuration, *, fresh: bool = True) -> int:
    """Return the workspace in bytes that must be allocated: the most that a part outside the tail needs."""
    both = zip(configuration.parts, parts_in_tail(problem, configuration, fresh=fresh), strict=True)
    return max((part.workspace_bytes for part, in_tail in both if not in_tail), default=0) + configuration.sum_bytes
