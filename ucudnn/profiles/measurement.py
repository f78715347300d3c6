"""Algorithms, and what a benchmark of one of them found: its time and its workspace for one problem.

A backend returns a `Measurement`, the database and the profiles keep it, and it becomes a micro-configuration.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

from ucudnn.configuration import MicroConfiguration

_FEWEST_FOR_AN_INTERVAL = 6  # the least and the greatest of so many samples hold the median between them with 97 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much time goes into one measurement.

    Attributes:
        warmup: calls before the first one that counts; the CPU backend makes none.
        repeats: how many samples are taken, unless the time limit comes first. From 6 samples on, the precision can be
            estimated. Then up to three times as many are taken, until the median is precise.
        precision: the largest relative distance between the median and the ends of its 95 % confidence interval.
        time_limit_ms: no sample is begun after so many milliseconds, except for the first.
    """

    warmup: int = 1
    repeats: int = 6
    precision: float = 0.02
    time_limit_ms: float = 50.0

    @property
    def most_repeats(self) -> int:
        """The largest number of samples."""
        return self.repeats * 3 if self.repeats >= _FEWEST_FOR_AN_INTERVAL else self.repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way in which a backend can compute a problem.

    Attributes:
        name: the same in every run, and unique within the backend.
        workspace_bytes: the workspace that a call needs, in bytes. Backends that compute return multiples of their
            alignment, so that segments of one buffer can follow each other without gaps.
        api: what offers the algorithm: 'graph' or 'legacy' for cuDNN's two APIs, otherwise the name of the backend.
        notes: cuDNN's notes on its numerical behavior, such as 'TENSOR_CORE' and 'NONDETERMINISTIC'.
        compiles: whether each process has to compile it before its first call.
    """

    name: str
    workspace_bytes: int
    api: str
    notes: tuple[str, ...] = ()
    compiles: bool = False


class MeasurementStatus(Enum):
    """How a measurement ended.

    MEASURED: there is a time. FAILED: the algorithm cannot compute the problem. HINDERED: nothing is known about the
    algorithm, because memory ran out or the library failed internally. A later attempt may succeed.
    """

    MEASURED = "measured"
    FAILED = "failed"
    HINDERED = "hindered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The benchmark of one algorithm on one problem.

    Attributes:
        algorithm: the algorithm with its workspace.
        status: how the measurement ended.
        time_ms: median of the samples in milliseconds; 0 unless the status is MEASURED.
        spread_ms: median distance between the samples and their median, in milliseconds.
        samples: number of samples; 0 if it is not known.
        complete: whether there are as many samples as the effort asks for. An algorithm that is too slow to matter gets
            fewer.
        reason: why the measurement failed, otherwise ''.
    """

    algorithm: Algorithm
    status: MeasurementStatus = MeasurementStatus.MEASURED
    time_ms: float = 0.0
    spread_ms: float = 0.0
    samples: int = 0
    complete: bool = True
    reason: str = ""

    @classmethod
    def of(cls, algorithm: Algorithm, samples_ms: Sequence[float], *, complete: bool = True) -> "Measurement":
        """Return the measurement that at least one sample makes, given in milliseconds."""
        center = median(samples_ms)
        return cls(
            algorithm=algorithm,
            time_ms=center,
            spread_ms=median(abs(sample - center) for sample in samples_ms),
            samples=len(samples_ms),
            complete=complete,
        )

    @classmethod
    def failed(
        cls, algorithm: Algorithm, reason: str, status: MeasurementStatus = MeasurementStatus.FAILED
    ) -> "Measurement":
        """Return a measurement without a time."""
        return cls(algorithm=algorithm, status=status, reason=reason)

    @property
    def measured(self) -> bool:
        """Whether there is a time."""
        return self.status is MeasurementStatus.MEASURED

    def micro(self, size: int) -> MicroConfiguration:
        """Return the micro-configuration of a micro-batch size.

        Raises:
            MeasurementError: if there is no time, or the size is below 1.
        """
        return MicroConfiguration(
            size=size,
            algorithm=self.algorithm.name,
            time_ms=self.time_ms,
            workspace_bytes=self.algorithm.workspace_bytes,
        )
