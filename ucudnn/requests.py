"""Requests: what is asked of benchmarks for a problem, by policy and limit."""

from dataclasses import replace

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


def request_of(problem: ConvolutionProblem, settings: Settings, limit_bytes: int) -> Request:
    """Return what is wanted of a problem.

    A filter gradient of 16 bits is rounded after each micro-batch and slab, for no engine of cuDNN leaves it in
    float32; so there are at most MOST_ROUNDINGS of them.
    """
    rounds = is_rounded(problem)
    least = -(-problem.batch // MOST_ROUNDINGS) if rounds else 1
    sizes = tuple(size for size in settings.policy.sizes(problem.batch) if size >= least)
    rows: tuple[int, ...] = ()
    if settings.slabs:
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


def requests_of(kernel: Kernel, settings: Settings, limit_bytes: int) -> list[Request]:
    """Return what is wanted of a kernel: within its limit, and then within parts of its output's tail, if it is fresh.

    What is left behind a micro-batch shrinks as they go on; within each of these, the fastest sizes are others.
    """
    problem = kernel.problem
    within = request_of(problem, settings, max(limit_bytes, kernel.spare_bytes))
    if not kernel.fresh or settings.policy is BatchSizePolicy.UNDIVIDED:
        return [within]
    batch, free = problem.batch, free_bytes(problem)
    left = [batch * 3 // 4, *(batch >> power for power in range(1, batch.bit_length()))]
    # The least first: where memory is short, what needs more is not tried then.
    limits = sorted({free[each] for each in left if free[each] > within.limit_bytes})
    return [within, *(replace(within, limit_bytes=each, rows=()) for each in limits)]
