"""Requests: what is asked of benchmarks for a problem, by policy and limit, and what was tried for it."""

from dataclasses import dataclass, replace

from ucudnn.benchmarking.slab_explorer import Division, rows_tried
from ucudnn.kernel import Kernel
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.settings import Settings
from ucudnn.slabs import kinds_of, row_count
from ucudnn.workspace.spare import tail_bytes

MOST_ROUNDINGS = 32
"""Micro-batches and slabs of a 16-bit filter gradient: its error grows with the square root of their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is wanted of one problem.

    Attributes:
        problem: the problem at mini-batch size.
        sizes: micro-batch sizes, ascending.
        limit_bytes: workspace in bytes beyond which nothing is measured.
        whole: whether the whole desirable set is wanted (WD), or its fastest configuration (WR).
        apart: whether, moreover, each size is wanted as if it were the mini-batch, and for problems that rule out
            kinds of algorithms as well (profiles).
        adaptive: whether more sizes are chosen by what is measured; `sizes` are then what it begins with.
        least_size: the smallest size that may be chosen.
        rows: how many rows slabs of the smallest size may have, descending; () for no slabs.
    """

    problem: ConvolutionProblem
    sizes: tuple[int, ...]
    limit_bytes: int
    whole: bool = True
    apart: bool = False
    adaptive: bool = False
    least_size: int = 1
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """What was tried for a request; what was measured of it is in the results.

    Attributes:
        names: algorithms.
        sizes: micro-batch sizes, ascending.
        divisions: micro-batch sizes that were divided into slabs, with the rows of these.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    divisions: tuple[Division, ...] = ()

    def parts(self, problem: ConvolutionProblem) -> list[ConvolutionProblem]:
        """Return the problems of all micro-batches and slabs."""
        parts = [problem.part(size) for size in self.sizes]
        for size, rows in self.divisions:
            parts += [kind for kind, _ in kinds_of(problem.part(size), rows)]
        return parts


def is_rounded(problem: ConvolutionProblem) -> bool:
    """Whether what a problem accumulates is rounded to 16 bits each time."""
    return problem.dtype.has_16_bits and problem.operation is Operation.BACKWARD_FILTER


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
    """Return what is wanted of a kernel: within its limit, and then within parts of the output's tail.

    The tail shrinks from micro-batch to micro-batch, and within each length of it other sizes are the fastest.
    """
    problem = kernel.problem
    within = request_of(problem, settings, max(limit_bytes, kernel.spare_bytes))
    if settings.policy is BatchSizePolicy.UNDIVIDED:
        return [within]
    batch, offered = problem.batch, tail_bytes(problem, fresh=kernel.fresh)
    left = [batch * 3 // 4, *(batch >> power for power in range(1, batch.bit_length()))]
    # The least first: where memory is short, what needs more is not tried then.
    limits = sorted({offered[samples] for samples in left if offered[samples] > within.limit_bytes})
    return [within, *(replace(within, limit_bytes=each, rows=()) for each in limits)]
