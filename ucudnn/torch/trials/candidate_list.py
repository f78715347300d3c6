"""Candidates: what may replace PyTorch's own kernel within the headroom, in the order of the backend's heuristics."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice, zip_longest
from math import inf
from typing import NamedTuple, final

from ucudnn.backends.base import ComputeBackend
from ucudnn.backends.cudnn.algorithms.legacy_call import ADDED
from ucudnn.backends.cudnn.algorithms.operation_graph import without_knobs
from ucudnn.backends.cudnn.algorithms.summed import ROUNDED
from ucudnn.benchmarking.request import request_of
from ucudnn.benchmarking.unmeasured.untimed_division import direct_ms, divided_by, equal_parts, uses_tensor_cores
from ucudnn.configuration import Configuration
from ucudnn.planning.float32_sums import summed
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.profiles.measurement import Algorithm
from ucudnn.settings import Settings
from ucudnn.torch.calls.candidate_kernel import TunedKernel

WRONG, SLOW, NO_MEMORY, FAILED = "wrong result", "slow", "no free memory for a check", "failed"
SLOW_PLAN = "its plan takes too long to build"
"""Why a candidate is given up."""

_MOST_FAILURES = 8  # steps in which a candidate fails: memory may be short for a while, or a tensor not aligned


class CandidateState(Enum):
    """How far a candidate is: not run yet, its output checked, or given up."""

    NEW = "new"
    CHECKED = "checked"
    REJECTED = "rejected"


@final
@dataclass(slots=True, eq=False)
class Candidate:
    """A configuration that may replace PyTorch's own kernel.

    Attributes:
        configuration: the configuration.
        workspace_bytes: its workspace.
        state: how far it is.
        reason: why it was given up; '' if it was not.
        rough_ms: its time beside PyTorch's own kernel, where its output was checked.
        samples_ms: its times in place of PyTorch's own kernel.
        host_ms: the least milliseconds that the host took to issue it.
        misses: number of calls at which no memory was free to check it.
        in_turn: whether it is checked in the memory of PyTorch's output, before that is computed.
        failures: number of steps in which it failed.
        was_slow: whether its first run was slow, which may have loaded its code.
    """

    configuration: Configuration
    workspace_bytes: int
    state: CandidateState = CandidateState.NEW
    reason: str = ""
    rough_ms: float = inf
    samples_ms: list[float] = field(default_factory=list)
    host_ms: float = inf
    misses: int = 0
    in_turn: bool = False
    failures: int = 0
    was_slow: bool = False

    @property
    def is_undivided(self) -> bool:
        """Whether it computes the whole mini-batch at once."""
        return len(self.configuration.parts) == 1

    @property
    def kind(self) -> tuple[int, str]:
        """Its number of parts and its engine: heuristics name many knobs of an engine in a row."""
        return len(self.configuration.parts), without_knobs(self.configuration.parts[0].algorithm)

    def failed(self) -> None:
        """Note that it failed in a step; it is given up if it fails again and again."""
        self.failures += 1
        if self.failures >= _MOST_FAILURES:
            self.reject(FAILED)

    def reject(self, reason: str) -> None:
        """Give it up."""
        self.state, self.reason = CandidateState.REJECTED, reason


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Trial:
    """What a site does in one step.

    Attributes:
        candidate: what is tried; None times PyTorch's own kernel.
        in_place: whether the candidate replaces PyTorch's own kernel; otherwise it runs beside it and is checked.
        estimate_ms: the time that the trial is expected to lose.
        kernel: the candidate's.
        started: whether the candidate has run beside PyTorch's own kernel in this step, or has failed.
    """

    candidate: Candidate | None
    in_place: bool
    estimate_ms: float
    kernel: TunedKernel | None = None
    started: bool = False

    @property
    def is_over(self) -> bool:
        """Whether other calls of this step do nothing: beside PyTorch's own kernel, once in a step is enough."""
        return self.started or (self.candidate is not None and bool(self.candidate.reason))


MOST_DIVIDED = 2
"""Algorithms that are offered in micro-batches, because they need more workspace for the whole."""

_MOST_LISTED = 32  # algorithms that are looked at, those that cuDNN's heuristics find in a millisecond
_MOST_WHOLE = 4
_MOST_FUSED = 4  # on an H200, the fastest one is among the first four in 17 of 20 cases
_FEW_SAMPLES = 8  # of which a filter gradient is also computed one by one: on an H100, that took a fifth of the time
_MOST_SLOWER = 1.5  # than one with tensor cores: on a recorded H200, nothing is lost within 8 MiB, 64 MiB or 1 GiB
_DIVISIONS = Settings(policy=BatchSizePolicy.POWER_OF_TWO)


def candidates_within(
    backend: ComputeBackend,
    problem: ConvolutionProblem,
    headroom_bytes: int,
    most_divided: int = MOST_DIVIDED,
    times: int = 1,
    now_ms: float = 0.0,
) -> Iterator[tuple[Algorithm, Configuration]]:
    """Yield configurations that fit into some bytes of workspace, each with an algorithm of it.

    They come in the order of the backend's heuristics.

    There are `times` as many as usual. All algorithms are looked at only where the first ones give no configuration, or
    fewer undivided ones than is usual for a kernel that is to have more. Such a kernel also has algorithms that
    heuristics offer for a micro-batch, and not for the whole, and equal micro-batches beside those of several sizes.

    Algorithms that need more workspace for the whole mini-batch compute micro-batches, or slabs of them. Where there is
    a bias, algorithms that add it take turns with those that do not, because heuristics do not compare them. Algorithms
    without tensor cores are left out where they are assumed to be much slower than one with, and slower than the kernel
    that takes `now_ms`: a single trial of one may take longer than a step. Where it must be slower, so is engine 0.

    Raises:
        UnsupportedProblemError: if the backend cannot compute the problem at all.
    """
    asked = _Asked(backend, problem, headroom_bytes)
    most = times * (_MOST_WHOLE + _MOST_FUSED if problem.biased else _MOST_WHOLE), times * most_divided
    found = list(asked.fitting(backend.leading(problem, _MOST_LISTED), *most))
    if not found or (times > 1 and sum(len(each.parts) == 1 for _, each in found) < _MOST_WHOLE):
        found = list(asked.fitting(backend.algorithms(problem), *most))
    if times > 1:
        found = [*_and_in_equal_parts(problem, found), *asked.offered_in_parts(found, most[1] // 2)]
    least_ms = min((each.time_ms for algorithm, each in found if uses_tensor_cores(algorithm)), default=inf)
    for algorithm, configuration in found:
        if 0 < now_ms < direct_ms(problem, algorithm):
            continue
        if uses_tensor_cores(algorithm) or configuration.time_ms <= max(_MOST_SLOWER * least_ms, now_ms):
            yield algorithm, configuration


@final
class _Asked(NamedTuple):
    """A problem, and the bytes into which the workspace of its candidates must fit."""

    backend: ComputeBackend
    problem: ConvolutionProblem
    headroom_bytes: int

    def fitting(
        self, algorithms: Sequence[Algorithm], most_whole: int, most_divided: int
    ) -> Iterator[tuple[Algorithm, Configuration]]:
        """Yield some algorithms with their configurations, at most so many undivided and divided ones."""
        whole = divided = 0
        for each in _in_turn(algorithms):
            if each.workspace_bytes <= self.headroom_bytes:
                if whole < most_whole:
                    whole += 1
                    yield each, equal_parts(self.problem, self.problem.batch, each)
                    single = self.single_samples(each.name) if whole == 1 else None
                    if single is not None:
                        yield each, single
            elif divided < most_divided:
                found = self.divided(each.name)
                if found is not None:
                    divided += 1
                    yield each, found

    def offered_in_parts(
        self, found: Sequence[tuple[Algorithm, Configuration]], most: int
    ) -> Iterator[tuple[Algorithm, Configuration]]:
        """Yield equal micro-batches by algorithms that heuristics offer for one of them, and not for the whole.

        Their size is the most frequent one of the divided configurations that were found.
        """
        problem = self.problem
        if problem.biased or problem.is_rounded_gradient:  # all modes would be asked, or each part would round
            return
        firsts = [each.parts[0] for _, each in found if len(each.parts) > 1]
        sizes, names = [each.size for each in firsts], {each.algorithm for each in firsts}
        size = max(sizes, key=sizes.count, default=0)
        if not size or problem.batch % size:
            return
        offered = self.backend.leading(problem.part(size), _MOST_LISTED)
        fitting = (each for each in offered if each.name not in names and each.workspace_bytes <= self.headroom_bytes)
        for each in islice(fitting, most):
            yield each, equal_parts(problem, size, each)

    def single_samples(self, name: str) -> Configuration | None:
        """Return a filter gradient sample by sample where there are few, as in mini-batches of volumes; else None.

        An engine may take far less time so, because it divides long sums by the size of its mini-batch.
        """
        problem = self.problem
        if problem.operation is not Operation.BACKWARD_FILTER or not 1 < problem.batch <= _FEW_SAMPLES:
            return None
        if problem.is_rounded_gradient:  # each part would round
            return None
        found = self.backend.algorithm(problem.part(1), name)
        return None if found is None or found.workspace_bytes > self.headroom_bytes else equal_parts(problem, 1, found)

    def divided(self, name: str) -> Configuration | None:
        """Return a division that fits, or None; of a filter gradient of 16 bits, one that rounds once if any does."""
        backend, problem, limit_bytes = self
        total = backend.float32_sum(problem) if problem.is_rounded_gradient else None
        if total is not None and total.size_bytes <= limit_bytes:
            request = request_of(summed(problem), _DIVISIONS, limit_bytes - total.size_bytes)
            # Of cuDNN's ways to add to a float32 sum, the one comes first that needs no other list of engines.
            found = divided_by(backend, request, name + ROUNDED) or divided_by(backend, request, name)
            if found is not None:
                return replace(found, float32_sum=total)
        return divided_by(backend, request_of(problem, _DIVISIONS, limit_bytes), name)


def _and_in_equal_parts(
    problem: ConvolutionProblem, found: Sequence[tuple[Algorithm, Configuration]]
) -> Iterator[tuple[Algorithm, Configuration]]:
    """Yield algorithms with their configurations, and behind one in micro-batches of several sizes that in the last.

    The first micro-batches of a division are larger, because the output of later ones is their workspace. An engine may
    compute one size far slower than another.
    """
    for algorithm, each in found:
        yield algorithm, each
        last = each.parts[-1]
        differ = any(part.size != last.size for part in each.parts)
        if differ and each.float32_sum is None and not last.slabs and not problem.batch % last.size:
            yield algorithm, Configuration(parts=(last,) * (problem.batch // last.size))


def _in_turn(algorithms: Sequence[Algorithm]) -> Iterator[Algorithm]:
    """Yield algorithms; those after which a kernel adds a bias take turns with a few that add it themselves."""
    others = [each for each in algorithms if each.name.endswith(ADDED)]
    if not others:
        yield from algorithms
        return
    fused = [each for each in algorithms if not each.name.endswith(ADDED)][:_MOST_FUSED]
    for pair in zip_longest(others, fused):
        yield from (each for each in pair if each is not None)
