"""Times and distances that the device has not measured yet: they are read at the end of a later step."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, final

from ucudnn.problem import ConvolutionProblem, DataType, MathMode
from ucudnn.torch.device.timed_device import TimedGpu
from ucudnn.torch.trials.call_site import CallSite
from ucudnn.torch.trials.candidate_list import Candidate

TOLERANCES = {
    DataType.FLOAT16: 1e-2,
    DataType.BFLOAT16: 3e-2,
    DataType.FLOAT32: 1e-2,
    DataType.FLOAT64: 1e-9,
}
"""The largest relative L2 distance between two algorithms on a program's own data, which may cancel in sums."""

FMA_TOLERANCE = 1e-3
"""The same for float32 without TF32."""


@final
class Reading(NamedTuple):
    """A time at a call site between two marks, which is read later.

    Attributes:
        candidate: whose time it is; None for PyTorch's own kernel.
        distance: returns how far the output is from PyTorch's; None for a run in place.
    """

    site: CallSite
    candidate: Candidate | None
    begin: Any
    end: Any
    distance: Callable[[], float] | None = None


@final
class Readings:
    """Tells kernels what was measured of them, in the order of the marks."""

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


def tolerance(problem: ConvolutionProblem) -> float:
    """Return the largest relative distance between the outputs of two algorithms that compute a problem."""
    fma = problem.dtype is DataType.FLOAT32 and problem.math is MathMode.FMA
    return FMA_TOLERANCE if fma else TOLERANCES[problem.dtype]
