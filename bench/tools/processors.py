"""Which processors a process runs on, so that one that prepares does not disturb one that measures. Not a script."""

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

_FEW = 8
"""Fewer processors are not parted."""


def siblings_of(core: int) -> set[int]:
    """Return the processors that share a core with one, as Linux numbers them; that one alone if it is not known."""
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text(encoding="utf-8")
    except OSError:
        return {core}
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return {each for first, *last in ends for each in range(first, (last or [first])[0] + 1)}


def for_preparing(
    cores: Collection[int], most: int | None = None, siblings: Callable[[int], set[int]] = siblings_of
) -> set[int]:
    """Return the processors for what is prepared meanwhile: the last ones; none where they are not parted.

    Processors that share a core stay together, so there may be more of them than are asked for.

    Args:
        cores: processors of this process.
        most: how many to take, if some are left over; None for an eighth of them, if there are eight.
        siblings: returns the processors that share a core with one.
    """
    count = len(cores) // _FEW if most is None else most
    found: set[int] = set()
    for core in sorted(cores, reverse=True):
        if len(found) < count:
            found |= siblings(core) & set(cores)
    return found if len(found) < len(cores) else set()


def shares(cores: Collection[int], count: int, siblings: Callable[[int], set[int]] = siblings_of) -> list[set[int]]:
    """Divide processors among processes that measure at the same time, the first ones for the first process.

    Processors that share a core stay together. There may be fewer processors than processes: then all share all.

    Args:
        cores: processors.
        count: processes.
        siblings: returns the processors that share a core with one.
    """
    physical = sorted({tuple(sorted(siblings(core) & set(cores))) for core in cores})
    if len(physical) < count:
        return [set(cores)] * count
    bounds = [number * len(physical) // count for number in range(count + 1)]
    return [{core for each in physical[a:b] for core in each} for a, b in pairwise(bounds)]


def move(process: int, cores: Collection[int]) -> None:
    """Let all threads of a process run on some processors; those that they start later do so, too."""
    moved: set[str] = set()
    while left := _threads(process) - moved:
        for each in left:
            with suppress(OSError):  # it has ended meanwhile
                os.sched_setaffinity(int(each), cores)
        moved |= left


def _threads(process: int) -> set[str]:
    with suppress(OSError):
        return {each.name for each in Path(f"/proc/{process}/task").iterdir()}
    return set()
