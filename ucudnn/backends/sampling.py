"""Takes the samples of one measurement: which calls are made, and when enough time has been spent."""

from collections.abc import Callable, Sequence
from itertools import cycle
from math import comb
from statistics import median
from typing import TypeVar

from ucudnn.profiles.measurement import Effort

SHORTEST_MS = 1e-6
"""What a sample below the resolution of the clock counts as, a nanosecond: no call takes no time."""

CONFIDENCE = 0.95
"""With which the median lies in its interval."""

NOISE = 0.3
"""Relative deviation of a single sample that is nothing unusual, on a machine that does other things too."""

_SEVERAL = 3  # samples, of which the least is so many times less noisy
_LESS_NOISY = 6


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Return the narrowest interval that holds the median with CONFIDENCE, from the order of the samples alone.

    A median lies between the k-th smallest and the k-th largest of n samples with probability
    1 - 2 * sum(C(n, i) for i < k) / 2**n (sign test); no assumption on their distribution is made.

    Returns:
        The interval, or None where there are too few samples for one: fewer than 6.
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


def settled(samples_ms: Sequence[float], effort: Effort, worth_ms: float, noise: float = NOISE) -> bool:
    """Whether these samples will do: the median is precise, or its value does not matter.

    Args:
        samples_ms: samples so far.
        effort: how many are wanted, and how precise.
        worth_ms: time from which on it does not matter how slow a call is.
        noise: relative deviation of a sample that is nothing unusual.
    """
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
    """Whether samples say, noise or not, that a time is beyond what matters."""
    count = len(samples_ms)
    if not count:
        return False
    return min(samples_ms) > worth_ms * (1 + (noise / _LESS_NOISY if count >= _SEVERAL else noise))


Place = TypeVar("Place")
"""Whatever says where a part begins."""


def sample(
    launch: Callable[[Place], None],
    places: Sequence[Place],
    effort: Effort,
    clock: Callable[[], float],
    worth_ms: float,
) -> tuple[float, ...]:
    """Call, and return the time of each call that counts, in milliseconds, in the order of the calls.

    Warm-up calls come first, then those that count; each has the next of the places, cyclically. Once the time limit
    is spent, warm-up included, no more calls are made than the one that makes a measurement.

    Args:
        launch: runs one call, at a place, to its end.
        places: where the parts of a mini-batch begin, one at least.
        effort: how many calls of each kind, and the time limit.
        clock: seconds from any point in time.
        worth_ms: time from which on it does not matter how slow a call is.
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
    while not samples_ms or not (settled(samples_ms, effort, worth_ms) or spent()):
        start = next(upcoming)
        before = clock()
        launch(start)
        samples_ms.append(max((clock() - before) * 1e3, SHORTEST_MS))
    return tuple(samples_ms)
