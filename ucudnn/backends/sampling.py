"""The samples of one measurement: which calls are timed, and how many are enough."""

from collections.abc import Callable, Sequence
from itertools import cycle
from math import comb
from statistics import median
from typing import TypeVar

from ucudnn.profiles.measurement import Effort

SHORTEST_MS = 1e-6
"""A nanosecond. Samples below the resolution of the clock count as this, because every call takes some time."""

CONFIDENCE = 0.95
"""The probability with which the median lies in its interval."""

NOISE = 0.3
"""The relative deviation of a single sample that is usual on a machine that does other things too."""

_SEVERAL = 3  # the least of so many samples ...
_LESS_NOISY = 6  # ... has so many times less noise than a single one


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Return the narrowest interval between two samples that holds the median with probability CONFIDENCE.

    The median lies between the k-th smallest and the k-th largest of n samples with probability
    1 - 2 * sum(C(n, i) for i < k) / 2**n, whatever the distribution of the samples is (sign test).

    Returns:
        The interval, or None for fewer than 6 samples.
    """
    count = len(samples)
    outside, below = 0.0, -1
    for index in range(count // 2):
        outside += 2 * comb(count, index) / 2.0**count
        if outside > 1 - CONFIDENCE:
            break
        below = index
    if below < 0:
        return None
    ordered = sorted(samples)
    return ordered[below], ordered[-1 - below]


def converged(samples_ms: Sequence[float], effort: Effort, worth_ms: float, noise: float = NOISE) -> bool:
    """Whether there are enough samples, because their median is precise, or so slow that it does not matter."""
    count = len(samples_ms)
    if worthless(samples_ms, worth_ms, noise):
        return True
    if count < effort.repeats:
        return False
    if count >= effort.most_repeats:
        return True
    interval = median_interval(samples_ms)
    center = median(samples_ms)
    return interval is not None and max(center - interval[0], interval[1] - center) <= effort.precision * center


def worthless(samples_ms: Sequence[float], worth_ms: float, noise: float = NOISE) -> bool:
    """Whether samples are so slow that, even with their noise, the time does not matter."""
    count = len(samples_ms)
    if not count:
        return False
    return min(samples_ms) > worth_ms * (1 + (noise / _LESS_NOISY if count >= _SEVERAL else noise))


_Place = TypeVar("_Place")  # says where a part begins


def sample(
    launch: Callable[[_Place], None],
    places: Sequence[_Place],
    effort: Effort,
    clock: Callable[[], float],
    worth_ms: float,
) -> tuple[float, ...]:
    """Make calls, and return the time of each call that counts, in milliseconds and in order.

    Warm-up calls come first. Each call takes the next place; after the last place comes the first one again. When the
    time limit is over, warm-up included, the calls end after the first one that counts.
    The clock returns seconds. From `worth_ms` on it does not matter how slow a call is.
    """
    begin = clock()
    upcoming = cycle(places)

    def spent() -> bool:
        return (clock() - begin) * 1e3 >= effort.time_limit_ms

    for _ in range(effort.warmup):
        launch(next(upcoming))
        if spent():
            break
    samples_ms: list[float] = []
    while not samples_ms or not (converged(samples_ms, effort, worth_ms) or spent()):
        start = next(upcoming)
        before = clock()
        launch(start)
        samples_ms.append(max((clock() - before) * 1e3, SHORTEST_MS))
    return tuple(samples_ms)
