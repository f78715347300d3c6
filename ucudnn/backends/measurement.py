"""Measurements: how much time goes into one, and what comes of it."""

from dataclasses import dataclass
from enum import Enum
from statistics import median

_TELLING = 6  # samples: the least and the greatest of them hold the median between them with 97 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much time goes into one measurement.

    Attributes:
        warmup: calls before the first that counts.
        repeats: samples, unless the time limit comes first. From 6 on, the fewest of which a precision can be told,
            there may be three times as many, until the median is precise.
        precision: how near the 95 % confidence interval of the median must come to it on either side, relatively.
        time_limit_ms: once this much time is spent, what has been sampled must do (one sample at least).
    """

    warmup: int = 1
    repeats: int = 6
    precision: float = 0.02
    time_limit_ms: float = 50.0

    @property
    def most_repeats(self) -> int:
        """Samples at the most."""
        return self.repeats * 3 if self.repeats >= _TELLING else self.repeats


class MeasurementStatus(Enum):
    """How a measurement ended.

    FAILED algorithms do not compute the problem. HINDERED says nothing of the algorithm: memory ran out, or the
    library failed inside, which may be otherwise later.
    """

    MEASURED = "measured"
    FAILED = "failed"
    HINDERED = "hindered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What came of measuring one algorithm at one size.

    Attributes:
        status: MEASURED, or how it failed.
        samples_ms: time of each repeat in milliseconds; empty where it failed.
        complete: whether as many samples were taken as effort asks for, not fewer because it is too slow to matter.
        reason: why it failed, else ''.
    """

    status: MeasurementStatus
    samples_ms: tuple[float, ...] = ()
    complete: bool = True
    reason: str = ""

    @property
    def time_ms(self) -> float:
        """The median of the samples in milliseconds; statistics.StatisticsError where there is none."""
        return median(self.samples_ms)

    @property
    def spread_ms(self) -> float:
        """The median distance of the samples from their median in milliseconds: half of them are within it."""
        center = self.time_ms
        return median(abs(sample - center) for sample in self.samples_ms)
