"""Recovery: other ways to compute a kernel after one of its algorithms failed.

An algorithm may fail when it is prepared or launched although it was measured before. With an alpha and a beta with
which it was measured, it is discarded for good. With others it may be of use to other calls, so it is excluded only for
calls with the same alpha and beta.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import final

from ucudnn.backends.base import Scaling
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.configuration import Configuration
from ucudnn.errors import BackendError, CudnnError, StepError, UnsupportedProblemError
from ucudnn.kernel import Kernel
from ucudnn.planning.decision import Decision
from ucudnn.planning.float32_sums import summed
from ucudnn.planning.replanning import decide_again, decide_rest, decide_slabs
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.settings import Settings
from ucudnn.units import format_ms

MOST_FAILURES = 8
"""Failures of one call after which it is given up, because so many are not the fault of algorithms."""

_NOT_SUPPORTED = range(3000, 4000)
"""Values of cudnnStatus_t that say what cuDNN does not support: CUDNN_STATUS_NOT_SUPPORTED and its kinds."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """What happened to the configuration of a kernel after it was decided.

    Attributes:
        before: the configuration that could not be used; `after` is used instead.
        calls: which calls it concerns; '' for all of them.
        timed: whether the times of both were measured.
    """

    before: Configuration
    after: Configuration
    reason: str
    calls: str = ""
    timed: bool = True

    def __str__(self) -> str:
        """Return which configuration was replaced, by which, why, and how many milliseconds that costs."""
        cost = self.after.time_ms - self.before.time_ms
        compared = f", predicted to be {format_ms(abs(cost))} {'slower' if cost >= 0 else 'faster'},"
        concerned = f" in calls with {self.calls}" if self.calls else ""
        compared = compared if self.timed else ""
        return f"{self.before} was replaced by {self.after}{concerned}{compared} because {self.reason}"


def is_measured(problem: ConvolutionProblem, scaling: Scaling) -> bool:
    """Return whether algorithms for a problem are measured with an alpha and a beta."""
    alpha, beta = scaling
    return alpha == 1 and (beta == 0 or (beta == 1 and problem.operation is Operation.BACKWARD_FILTER))


def is_lasting(error: StepError) -> bool:
    """Return whether an algorithm fails whenever it is called like this, because it does not compute the problem."""
    cause = error.__cause__
    if isinstance(cause, CudnnError):
        return cause.status in _NOT_SUPPORTED
    return isinstance(cause, UnsupportedProblemError)


def given_up(subject: object) -> BackendError:
    """Return the error of a kernel or problem for which MOST_FAILURES configurations failed."""
    return BackendError(f"{subject}: {MOST_FAILURES} configurations failed one after another")


@final
class Recovery:
    """Decides again after failures."""

    def __init__(self, benchmark: Benchmark, settings: Settings) -> None:
        self._benchmark = benchmark
        self._settings = settings

    def discard(self, problem: ConvolutionProblem, algorithm: str) -> None:
        """Never choose an algorithm for a problem again, at any size, because one that fails at one is not trusted."""
        self._benchmark.discard(problem, algorithm)
        if problem.is_rounded_gradient:  # it may have written a float32 sum
            self._benchmark.discard(summed(problem), algorithm)

    def decide(self, kernel: Kernel, limit_bytes: int) -> Decision | None:
        """Return another decision for a kernel without discarded algorithms, or None if none is left."""
        return decide_again(kernel, self._benchmark, self._settings, limit_bytes)

    def rest(
        self, problem: ConvolutionProblem, start: int, limit_bytes: int, failed: Collection[str]
    ) -> Configuration | None:
        """Return a configuration for the samples from `start` on, or None if no algorithm is left."""
        return decide_rest(problem, start, self._benchmark, self._settings, limit_bytes, failed)

    def missing(
        self, problem: ConvolutionProblem, error: StepError, limit_bytes: int, failed: Collection[str]
    ) -> list[tuple[int, Configuration]] | None:
        """Return what a failed plan left, each part with its first sample; None if no algorithm is left for it."""
        found = []
        start = error.start
        if error.left:
            slabs = [each.slab for each in error.left]
            found.append((start, decide_slabs(problem, error.size, slabs, self._benchmark, limit_bytes, failed)))
            start += error.size
        if start < problem.batch:
            found.append((start, self.rest(problem, start, limit_bytes, failed)))
        chosen = [(first, each) for first, each in found if each is not None]
        return chosen if len(chosen) == len(found) else None
