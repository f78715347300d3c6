"""Results: what is known of algorithms at sizes, in this process."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import final

from ucudnn.backends.base import Algorithm
from ucudnn.backends.measurement import Measurement, MeasurementStatus
from ucudnn.configuration import MicroConfiguration
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.format import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one algorithm at one size, as it is stored.

    Attributes:
        algorithm: the algorithm with its workspace.
        status: how its measurement ended.
        time_ms: median of its samples in milliseconds; 0 where it failed.
        spread_ms: median distance of the samples from the median in milliseconds.
        samples: how many there were.
        complete: whether there were as many as effort asked for: a slow algorithm gets fewer.
        reason: why it failed, else ''.
    """

    algorithm: Algorithm
    status: MeasurementStatus
    time_ms: float = 0.0
    spread_ms: float = 0.0
    samples: int = 0
    complete: bool = True
    reason: str = ""

    @classmethod
    def of(cls, algorithm: Algorithm, measurement: Measurement) -> "Result":
        """Return the result of a measurement."""
        if measurement.status is not MeasurementStatus.MEASURED:
            return cls(algorithm=algorithm, status=measurement.status, reason=measurement.reason)
        return cls(
            algorithm=algorithm,
            status=measurement.status,
            time_ms=measurement.time_ms,
            spread_ms=measurement.spread_ms,
            samples=len(measurement.samples_ms),
            complete=measurement.complete,
        )

    @classmethod
    def from_record(cls, record: Record) -> "Result":
        """Return what a profile holds of one algorithm."""
        return cls(
            algorithm=Algorithm(
                name=record.algorithm, workspace_bytes=record.workspace_bytes, api=record.api, notes=record.notes
            ),
            status=MeasurementStatus.MEASURED,
            time_ms=record.time_ms,
            spread_ms=record.spread_ms,
        )

    def record(self) -> Record:
        """Return it as a profile holds it."""
        algorithm = self.algorithm
        return Record(
            api=algorithm.api,
            algorithm=algorithm.name,
            time_ms=self.time_ms,
            spread_ms=self.spread_ms,
            workspace_bytes=algorithm.workspace_bytes,
            notes=algorithm.notes,
        )

    @property
    def measured(self) -> bool:
        """Whether there is a time."""
        return self.status is MeasurementStatus.MEASURED

    def micro(self, size: int) -> MicroConfiguration:
        """Return it as a micro-configuration."""
        return MicroConfiguration(
            size=size,
            algorithm=self.algorithm.name,
            time_ms=self.time_ms,
            workspace_bytes=self.algorithm.workspace_bytes,
        )


@final
class Results:
    """Results by problem at micro-batch size and by name of the algorithm."""

    def __init__(self) -> None:
        self._results: dict[ConvolutionProblem, dict[str, Result]] = {}

    def of(self, part: ConvolutionProblem) -> Mapping[str, Result]:
        """Return what is known of a problem, by algorithm."""
        return self._results.get(part, {})

    def put(self, part: ConvolutionProblem, result: Result) -> None:
        """Remember a result; a later one takes the place of an earlier one."""
        self._results.setdefault(part, {})[result.algorithm.name] = result

    def update(self, items: Iterable[tuple[ConvolutionProblem, Result]]) -> None:
        """Remember several results."""
        for part, result in items:
            self.put(part, result)

    def forget(self, parts: Iterable[ConvolutionProblem]) -> None:
        """Forget all results of some problems."""
        for part in parts:
            self._results.pop(part, None)

    def items(self, parts: Iterable[ConvolutionProblem]) -> Iterator[tuple[ConvolutionProblem, Result]]:
        """Return all results of some problems."""
        for part in parts:
            for result in self.of(part).values():
                yield part, result
