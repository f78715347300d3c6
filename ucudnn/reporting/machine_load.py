"""How much of a machine's processors other programs use while something runs, which explains times that are off."""

import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import NamedTuple, final

_BUSY = (0, 1, 2, 5, 6, 7)  # columns of /proc/stat: user, nice, system, interrupts, soft interrupts, stolen


class CpuSeconds(NamedTuple):
    """Seconds since some time in the past.

    Attributes:
        all: of all processors that ran any program.
        own: of processors that ran this process.
        wall: on the clock.
    """

    all: float
    own: float
    wall: float


def read_cpu_seconds() -> CpuSeconds | None:
    """Return the seconds that Linux has counted, or None where there is no such count."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
        ticks = sum(int(fields[column]) for column in _BUSY)
        return CpuSeconds(ticks / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4]), monotonic())
    except (OSError, ValueError, IndexError, AttributeError):  # other systems have neither the file nor sysconf
        return None


@final
class MachineLoad:
    """Counts from its creation on; `read` returns the seconds so far."""

    def __init__(self, read: Callable[[], CpuSeconds | None] = read_cpu_seconds) -> None:
        self._read = read
        self._begin = read()

    def others(self) -> float | None:
        """Return how many processors other programs used on average since the creation; None if that is not known."""
        now = self._read()
        if self._begin is None or now is None or now.wall <= self._begin.wall:
            return None
        used = (now.all - self._begin.all) - (now.own - self._begin.own)
        return max(0.0, used / (now.wall - self._begin.wall))
