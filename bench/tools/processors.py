"""Which processors a process runs on, so that one that prepares does not disturb one that measures. Not a script."""

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_FEW = 8
"""Fewer processors are not parted."""


def for_preparing(cores: Collection[int], most: int | None = None) -> set[int]:
    """Return the processors for what is prepared meanwhile: the last ones; none where they are not parted.

    Args:
        cores: processors of this process.
        most: how many to take, of which at least one is left over; None for an eighth of them, if there are eight.
    """
    count = len(cores) // _FEW if most is None else min(most, len(cores) - 1)
    return set(sorted(cores)[len(cores) - count :])


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
