"""Times and distances that the device has not measured yet: they are read at the end of a later step."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, final

from ucudnn.torch.device.timed_device import TimedGpu
from ucudnn.torch.trials.call_site import CallSite
from ucudnn.torch.trials.candidate import Candidate
from ucudnn.torch.trials.tolerance import tolerance


@final
class Reading(NamedTuple):
    """A time that is read later.

    Attributes:
        site: where it was taken.
        candidate: whose time it is; None for PyTorch's own kernel.
        begin: the mark before.
        end: the mark after.
        distance: returns how far the output is from PyTorch's; None for a run in place.
    """

    site: CallSite
    candidate: Candidate | None
    begin: Any
    end: Any
    distance: Callable[[], float] | None = None


@final
class Readings:
    """Tells kernels what was measured of them, in the order of the marks.

    Args:
        program: the device.
        ran: called with the time of a candidate beside PyTorch's kernel, in milliseconds.
    """

    def __init__(self, program: TimedGpu, ran: Callable[[float], None]) -> None:
        self._program = program
        self._ran = ran
        self._awaited: deque[tuple[Reading, Any]] = deque()  # with marks after the comparisons of outputs

    def __len__(self) -> int:
        return len(self._awaited)

    def add(self, reading: Reading) -> None:
        """Await what the marks around a kernel say, and how far its output is from PyTorch's."""
        reading.site.pending += 1
        known = reading.end if reading.distance is None else self._program.mark()
        self._awaited.append((reading, known))

    def read(self) -> None:
        """Read what the device has reached."""
        while self._awaited:
            (site, candidate, begin, end, distance), known = self._awaited[0]
            time_ms = self._program.elapsed_ms(begin, end)
            if time_ms is None or (known is not end and self._program.elapsed_ms(begin, known) is None):
                return
            self._awaited.popleft()
            site.pending -= 1
            if distance is None or candidate is None:
                site.sampled(candidate, time_ms)
            else:
                site.checked(candidate, time_ms, distance(), tolerance(site.problem))
                self._ran(time_ms)

    def forget(self) -> None:
        """Await nothing any more."""
        self._awaited.clear()
