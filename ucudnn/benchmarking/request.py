"""A request asks for the micro-batches of a problem within a limit. Beside it stands what was tried and measured."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from ucudnn.kernel import Kernel
from ucudnn.policy import MOST_SIZES, BatchSizePolicy
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.measurement import Measurement
from ucudnn.settings import Settings
from ucudnn.slabs import is_divisible, row_count, row_unit, slabs_by_problem
from ucudnn.workspace.spare import tail_bytes

MOST_ROUNDINGS = 32
"""The largest number of micro-batches and slabs of a 16-bit filter gradient that each round the output. Its error grows
with the square root of their number."""


@final
class SlabDivision(NamedTuple):
    """A micro-batch size, and the number of rows of each slab of it; the last slab may have fewer."""

    size: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked about one problem.

    Attributes:
        problem: the problem at mini-batch size.
        sizes: micro-batch sizes in ascending order.
        limit_bytes: workspace limit in bytes. What needs more is not measured.
        whole: whether the whole desirable set is wanted (WD), or only its fastest configuration (WR).
        apart: whether the set is wanted for each micro-batch size by itself, and for each kind of algorithms that a
            problem may rule out. Profiles are recorded this way.
        adaptive: whether more sizes are chosen by the measurements; they begin with `sizes`.
        least_size: the smallest size that may be chosen.
        rows: the numbers of rows that slabs of the smallest size may have, in descending order; () for no slabs.
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
    """What was tried for a request: algorithms, sizes in ascending order, and divisions whose slabs were all measured.

    The measurements are kept by problem.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    divisions: tuple[SlabDivision, ...] = ()

    def parts(self, problem: ConvolutionProblem) -> list[ConvolutionProblem]:
        """Return the problems of all micro-batches and slabs."""
        parts = [problem.part(size) for size in self.sizes]
        for size, rows in self.divisions:
            parts += [slab for slab, _ in slabs_by_problem(problem.part(size), rows)]
        return parts


def slab_rows(problem: ConvolutionProblem, policy: BatchSizePolicy) -> tuple[int, ...]:
    """Return the numbers of rows that slabs of a problem may have, in descending order; () if it has no slabs."""
    return policy.rows(row_count(problem), row_unit(problem)) if is_divisible(problem) else ()


def is_rounded(problem: ConvolutionProblem) -> bool:
    """Whether the output is a sum of micro-batches that is rounded to 16 bits after each of them."""
    return problem.is_rounded_gradient and not problem.float32_sum


def request_of(problem: ConvolutionProblem, settings: Settings, limit_bytes: int) -> Request:
    """Return the request of a problem.

    A filter gradient of 16 bits without a float32 sum is rounded after each micro-batch and slab. So there are at most
    MOST_ROUNDINGS of them.
    """
    rounds = is_rounded(problem)
    least = -(-problem.batch // MOST_ROUNDINGS) if rounds else 1
    sizes = tuple(size for size in settings.policy.sizes(problem.batch) if size >= least)
    rows: tuple[int, ...] = ()
    if settings.slabs:
        count = row_count(problem)
        most = MOST_ROUNDINGS // -(-problem.batch // sizes[0]) if rounds else count
        rows = tuple(each for each in slab_rows(problem, settings.policy) if -(-count // each) <= most)
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
    """Return the requests of a kernel: within its limit, and then within parts of the output's tail.

    The tail shrinks from micro-batch to micro-batch, and within each length of it other sizes are the fastest.
    """
    problem = kernel.problem
    within = request_of(problem, settings, max(limit_bytes, kernel.spare_bytes))
    if settings.policy is BatchSizePolicy.UNDIVIDED or problem.batch > MOST_SIZES:
        return [within]  # the best use of the tail takes time in proportion to the mini-batch
    batch, offered = problem.batch, tail_bytes(problem, fresh=kernel.fresh)
    left = [batch * 3 // 4, *(batch >> power for power in range(1, batch.bit_length()))]
    # The smallest comes first: if memory runs out, larger ones are not tried.
    limits = sorted({offered[samples] for samples in left if offered[samples] > within.limit_bytes})
    return [within, *(replace(within, limit_bytes=each, rows=()) for each in limits)]


MeasuredProblem = tuple[ConvolutionProblem, Measurement]
"""A problem at micro-batch size, and the measurement of one algorithm."""


@final
class Results:
    """Measurements by problem at micro-batch size and by the algorithm's name."""

    def __init__(self) -> None:
        self._results: dict[ConvolutionProblem, dict[str, Measurement]] = {}

    def of(self, part: ConvolutionProblem) -> Mapping[str, Measurement]:
        """Return the measurements of a problem by algorithm."""
        return self._results.get(part, {})

    def batches(self) -> list[int]:
        """Return each micro-batch size of which anything is known, of any problem, in ascending order."""
        return sorted({part.batch for part, known in self._results.items() if known})

    def parts(self) -> list[ConvolutionProblem]:
        """Return all problems with measurements."""
        return list(self._results)

    def put(self, part: ConvolutionProblem, measurement: Measurement) -> None:
        """Keep a measurement. It replaces an earlier one of the same algorithm."""
        self._results.setdefault(part, {})[measurement.algorithm.name] = measurement

    def update(self, items: Iterable[MeasuredProblem]) -> None:
        """Keep several measurements."""
        for part, measurement in items:
            self.put(part, measurement)

    def forget(self, parts: Iterable[ConvolutionProblem]) -> None:
        """Forget all measurements of some problems."""
        for part in parts:
            self._results.pop(part, None)
