"""Benchmark: micro-configurations with their times and workspaces, measured once in a process."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from ucudnn.backends.base import Algorithm, Backend, Bench, Effort, Measurement, MeasurementStatus
from ucudnn.configuration import MicroConfiguration
from ucudnn.problem import ConvolutionProblem
from ucudnn.solvers.desirable import desirable_set

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the benchmarks of one problem are.

    Attributes:
        problem: the problem at mini-batch size.
        done: micro-configurations that are known.
        total: micro-configurations that are wanted.
    """

    problem: ConvolutionProblem
    done: int
    total: int


ProgressListener = Callable[[Progress], None]
"""Is told of every micro-configuration that was measured."""


class Benchmark:
    """Measures the micro-configurations of problems on a backend and remembers them.

    The key of a measurement is the whole problem at micro-batch size and the algorithm, so layers of the same
    shape, and mini-batches that share micro-batch sizes, are measured once.

    Args:
        backend: what is measured.
        effort: how much time goes into one measurement.
        listener: is told of progress.
    """

    def __init__(
        self, backend: Backend, *, effort: Effort | None = None, listener: ProgressListener | None = None
    ) -> None:
        self._backend = backend
        self._effort = effort or Effort()
        self._listener = listener
        self._measured: dict[tuple[ConvolutionProblem, str], Measurement] = {}
        self.seconds = 0.0
        """Wall-clock seconds that measuring took so far."""

    def micro_configurations(
        self, problem: ConvolutionProblem, sizes: Sequence[int], limit_bytes: int
    ) -> list[MicroConfiguration]:
        """Return what can compute micro-batches of these sizes within a workspace limit.

        Algorithms that fail are logged and left out; so are those beyond the limit, unmeasured.

        Args:
            problem: the problem at mini-batch size.
            sizes: micro-batch sizes.
            limit_bytes: workspace in bytes beyond which nothing is measured.

        Raises:
            UnsupportedProblemError: if the backend cannot compute the problem at all.
            NotRecordedError: if a profile is replayed that lacks the problem.
        """
        wanted = [offer for offer in self._offers(problem, sizes) if offer[1].workspace_bytes <= limit_bytes]
        missing = [pair for pair in wanted if self._key(problem, *pair) not in self._measured]
        if missing:
            start = perf_counter()
            with self._backend.bench(problem) as bench:
                for index, (size, algorithm) in enumerate(missing):
                    self._tell(problem, len(wanted) - len(missing) + index, len(wanted))
                    self._measured[self._key(problem, size, algorithm)] = self._measure(bench, problem, size, algorithm)
            self.seconds += perf_counter() - start
        self._tell(problem, len(wanted), len(wanted))
        results = ((size, algorithm, self._measured[self._key(problem, size, algorithm)]) for size, algorithm in wanted)
        return [
            MicroConfiguration(
                size=size,
                algorithm=algorithm.name,
                time_ms=measurement.time_ms,
                workspace_bytes=algorithm.workspace_bytes,
            )
            for size, algorithm, measurement in results
            if measurement.status is MeasurementStatus.MEASURED
        ]

    def least_workspace(self, problem: ConvolutionProblem, sizes: Sequence[int]) -> int | None:
        """Return the workspace below which the problem cannot be computed, or None if it cannot be at all."""
        offers = (
            MicroConfiguration(
                size=size, algorithm=algorithm.name, time_ms=1.0, workspace_bytes=algorithm.workspace_bytes
            )
            for size, algorithm in self._offers(problem, sizes)
        )
        smallest = desirable_set(offers, problem.batch)
        return smallest[0].workspace_bytes if smallest else None

    def discard(self, problem: ConvolutionProblem, sizes: Sequence[int], algorithm: str, reason: str) -> None:
        """Count an algorithm that was measured as failed, for it failed when it was to run.

        Args:
            problem: the problem at mini-batch size.
            sizes: micro-batch sizes at which it shall not be chosen any more.
            algorithm: its name.
            reason: why it failed.
        """
        failed = Measurement(status=MeasurementStatus.FAILED, reason=reason)
        self._measured.update({(problem.part(size), algorithm): failed for size in sizes})

    def _measure(self, bench: Bench, problem: ConvolutionProblem, size: int, algorithm: Algorithm) -> Measurement:
        measurement = bench.measure(size, algorithm, self._effort)
        if measurement.status is MeasurementStatus.FAILED:
            _LOG.info("%s at micro-batch %d of %s failed: %s", algorithm.name, size, problem, measurement.reason)
        return measurement

    def _offers(self, problem: ConvolutionProblem, sizes: Sequence[int]) -> list[tuple[int, Algorithm]]:
        return [(size, algorithm) for size in sizes for algorithm in self._backend.algorithms(problem.part(size))]

    def _tell(self, problem: ConvolutionProblem, done: int, total: int) -> None:
        if self._listener is not None:
            self._listener(Progress(problem=problem, done=done, total=total))

    @staticmethod
    def _key(problem: ConvolutionProblem, size: int, algorithm: Algorithm) -> tuple[ConvolutionProblem, str]:
        return problem.part(size), algorithm.name
