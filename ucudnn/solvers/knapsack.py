"""A workspace division as arrays: a multiple-choice knapsack in which a choice can be made several times.

All numbers are whole: bytes, and ticks of time. Their sums are exact whatever the order, so a search needs no
tolerance. A tick is a picosecond, as in the desirable sets, or more where all times together last many minutes.

Importing this module loads NumPy, which `import ucudnn` must not. So `ucudnn.solvers.division` imports it, and the
modules that are built on it, only when it divides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

Front = tuple[tuple[int, ...], tuple[float, ...]]
"""The points that a kernel can take: their workspaces in bytes, which rise, and their times in milliseconds, which
fall."""

Counts = Sequence[Mapping[int, int]]
"""For each choice how many of its kernels take each point, by the point's index; points of no kernel are left out."""

_TICKS_PER_MS = 10**9
_MOST_TICKS = 2**50  # of all times together, so that a float holds each sum of them to a fraction of a tick


@dataclass(frozen=True, slots=True, kw_only=True)
class Knapsack:
    """A division: each kernel of each choice takes one point, all bytes fit, and the sum of ticks is least.

    The points of all choices stand one after another in each array.

    Attributes:
        sizes: for each point its bytes beyond those of its choice's first point.
        ticks: for each point its time in ticks.
        starts: for each choice the index of its first point, and at the end the number of points.
        choice_of: for each point its choice.
        counts: for each choice how many interchangeable kernels make it.
        room_bytes: bytes that are left where every kernel takes its first point.
        ms_per_tick: milliseconds of a tick.
    """

    sizes: Integers
    ticks: Integers
    starts: Integers
    choice_of: Integers
    counts: Integers
    room_bytes: int
    ms_per_tick: float

    def totals(self, counts: Counts) -> tuple[int, int, int]:
        """Return ticks, bytes beyond those of the first points, and earliness of a division (`Change.rank`)."""
        taken = [
            (self.ticks.item(start + index) * kernels, self.sizes.item(start + index) * kernels, choice)
            for choice, (start, row) in enumerate(zip(self.starts.tolist(), counts, strict=False))
            for index, kernels in row.items()
        ]
        return sum(t for t, _, _ in taken), sum(size for _, size, _ in taken), -sum(size * c for _, size, c in taken)


def knapsack_of(fronts: Sequence[Front], counts: Sequence[int], total_bytes: int) -> Knapsack:
    """Return a division as arrays.

    Args:
        fronts: for each choice its points; there is at least one choice.
        counts: how many interchangeable kernels make each choice.
        total_bytes: the workspace to divide; enough for every choice's first point.
    """
    lengths = [len(sizes) for sizes, _ in fronts]
    starts = np.fromiter(accumulate(lengths, initial=0), np.int64, len(lengths) + 1)
    choice_of = np.repeat(np.arange(len(fronts)), lengths)
    sizes = np.fromiter(chain.from_iterable(sizes for sizes, _ in fronts), np.int64, starts[-1])
    times = np.fromiter(chain.from_iterable(times for _, times in fronts), np.float64, starts[-1])
    sizes -= sizes[starts[:-1]][choice_of]
    room = total_bytes - sum(front_sizes[0] * count for (front_sizes, _), count in zip(fronts, counts, strict=True))
    # Workspaces are aligned, so a rest of the room below that alignment is of no use.
    room -= room % (int(np.gcd.reduce(sizes)) or 1)
    longest_ms = sum(front_times[0] * count for (_, front_times), count in zip(fronts, counts, strict=True))
    ticks_per_ms = min(_TICKS_PER_MS, _MOST_TICKS / (longest_ms or 1))
    return Knapsack(
        sizes=sizes,
        ticks=np.rint(times * ticks_per_ms).astype(np.int64),
        starts=starts,
        choice_of=choice_of,
        counts=np.array(counts, dtype=np.int64),
        room_bytes=room,
        ms_per_tick=1 / ticks_per_ms,
    )
