"""Takes the samples of one measurement: which calls are made, and when enough time has been spent."""

from collections.abc import Callable, Sequence
from itertools import cycle

from ucudnn.backends.base import Effort

SHORTEST_MS = 1e-6
"""What a sample below the resolution of the clock counts as, a nanosecond: no call takes no time."""


def sample(
    launch: Callable[[int], None], starts: Sequence[int], effort: Effort, clock: Callable[[], float]
) -> tuple[float, ...]:
    """Call, and return the time of each call that counts, in milliseconds, in the order of the calls.

    Warm-up calls come first, then those that count; each has the next of the starts, cyclically. Once the time limit
    is spent, warm-up included, no more calls are made than the one that makes a measurement.

    Args:
        launch: runs one call, from a first sample on, to its end.
        starts: first samples of the micro-batches of a mini-batch, one at least.
        effort: how many calls of each kind, and the time limit.
        clock: seconds from any point in time.
    """
    begin = clock()
    upcoming = cycle(starts)

    def spent() -> bool:
        return (clock() - begin) * 1e3 >= effort.time_limit_ms

    for _ in range(effort.warmup):
        launch(next(upcoming))
        if spent():
            break
    samples_ms: list[float] = []
    while not samples_ms or (len(samples_ms) < effort.repeats and not spent()):
        start = next(upcoming)
        before = clock()
        launch(start)
        samples_ms.append(max((clock() - before) * 1e3, SHORTEST_MS))
    return tuple(samples_ms)
