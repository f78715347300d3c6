"""Requests: what is asked of benchmarks for a problem, by policy and limit."""

from ucudnn.exploration import Request
from ucudnn.kernel import Kernel
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem, DataType, Operation
from ucudnn.settings import Settings
from ucudnn.slab_search import rows_tried
from ucudnn.slabs import row_count
from ucudnn.tails import free_bytes

MOST_ROUNDINGS = 32
"""Micro-batches and slabs of a 16-bit filter gradient: its error grows with the square root of their number."""


def is_rounded(problem: ConvolutionProblem) -> bool:
    """Whether what a problem accumulates is rounded to 16 bits each time."""
    sixteen = problem.dtype in (DataType.FLOAT16, DataType.BFLOAT16)
    return sixteen and problem.operation is Operation.BACKWARD_FILTER


def request_of(problem: ConvolutionProblem, settings: Settings, limit_bytes: int, *, slabs: bool = True) -> Request:
    """Return what is wanted of a problem, with slabs or, whatever the settings, without.

    A filter gradient of 16 bits is rounded after each micro-batch and slab, for no engine of cuDNN leaves it in
    float32; so there are at most MOST_ROUNDINGS of them.
    """
    rounds = is_rounded(problem)
    least = -(-problem.batch // MOST_ROUNDINGS) if rounds else 1
    sizes = tuple(size for size in settings.policy.sizes(problem.batch) if size >= least)
    rows: tuple[int, ...] = ()
    if settings.slabs and slabs:
        count = row_count(problem)
        most = MOST_ROUNDINGS // -(-problem.batch // sizes[0]) if rounds else count
        rows = tuple(each for each in rows_tried(problem, settings.policy) if -(-count // each) <= most)
    return Request(
        problem=problem,
        sizes=sizes,
        limit_bytes=limit_bytes,
        whole=settings.total_workspace_bytes is not None,
        adaptive=settings.policy is BatchSizePolicy.ADAPTIVE,
        least_size=least,
        rows=rows,
    )


def tail_limits(kernel: Kernel, settings: Settings, limit_bytes: int) -> list[int]:
    """Return the limits at which to look for micro-batches whose workspace is the tail of the output.

    What is left behind a micro-batch shrinks as they go on; in each of these, the fastest sizes are others.
    """
    if not kernel.fresh or settings.policy is BatchSizePolicy.UNDIVIDED:
        return []
    batch = kernel.problem.batch
    left = [batch * 3 // 4, *(batch >> power for power in range(1, batch.bit_length()))]
    free = free_bytes(kernel.problem)
    # The least first: where memory is short, what needs more is not tried then.
    return sorted({free[each] for each in left if free[each] > limit_bytes})
