"""How long whole steps take: marks at their ends are read later, so that nothing waits for the device."""

from collections import deque
from collections.abc import Callable, Sequence
from math import hypot, sqrt
from statistics import median
from typing import Any, NamedTuple, final

from ucudnn.torch.device.timed_device import TimedGpu
from ucudnn.torch.steps.phase import TuningPhase
from ucudnn.torch.steps.trial_ledger import TrialLedger

_MOST_TYPICAL = 30  # the latest steps without trials
_UNSTEADY_STEPS = 2  # the first ones, which are not typical
_MOST_TIMES = 3.0  # what trials may take longer than they were expected to
_RUNS = 2  # of a candidate at most, beside a kernel
_RESTED_STEPS = 3  # after a trial or work of threads, until a step is one of the program's own again
_GROUP = 5  # steps between trials that are charged together
_LEAST_PAUSE_SECONDS = 1.0
_STANDARD_ERRORS = 2.5  # by which a gain may be wrong: in one of a hundred cases it is wrong by more
_FROM_MEDIAN = 0.6745  # of a normal distribution, the median distance in standard deviations
_OF_MEDIAN = 1.253  # the standard error of a median, in those of a mean
_COMPARED = TuningPhase.HOST_CHECK, TuningPhase.COMPARING  # in which steps of two kinds take turns


@final
class _OpenStep(NamedTuple):
    """A step whose time is not read yet: the marks at its ends, what it did, and what may have delayed it."""

    begin: Any
    end: Any
    phase: TuningPhase
    differs: bool
    counts: bool
    reserved_seconds: float
    worked_seconds: float
    busy: bool
    behind_seconds: float  # what the trials of the step before were expected to take
    rests: bool  # whether nothing was tried or built in this step and those before


@final
class StepTimes:
    """Reads the times of steps, charges trials with what a step took longer, and compares steps with other kernels.

    A program may evaluate or save between two steps. So a step that took much longer than its trials explain is charged
    with what they may have taken, and the rest is a pause of the program. A trial explains at most three times its
    estimate, and twice the time that was measured of its candidate.

    Where the host is nearly as slow as the device, what trials and threads cost it makes steps between trials longer,
    too. So these are charged with what they take longer than steps in which all rests.

    Args:
        program: the device.
        ledger: bounds the time that is lost.
        worked: returns the seconds that the host has worked for trials so far.
    """

    def __init__(self, program: TimedGpu, ledger: TrialLedger, worked: Callable[[], float] = lambda: 0.0) -> None:
        self.count = 0
        self.paused_seconds = 0.0
        self._worked = worked
        self._worked_seconds = 0.0  # until the latest step ended
        self._program = program
        self._ledger = ledger
        self._open: deque[_OpenStep | None] = deque()  # None where other steps begin
        self._typical_ms: deque[float] = deque(maxlen=_MOST_TYPICAL)
        self._compared_ms: dict[bool, list[float]] = {True: [], False: []}
        self._mark: Any = None
        self._reserved_seconds = 0.0
        self._behind_seconds = 0.0
        self._ran_seconds = 0.0  # of candidates beside PyTorch's kernels, in steps whose time is not read yet
        self._stirred_at = 0  # the latest step in which something was tried or built
        # What steps behind trials, and others between trials, took longer; they are not charged with it yet.
        self._between_seconds: dict[bool, list[float]] = {True: [], False: []}

    @property
    def typical_count(self) -> int:
        """Number of times of PyTorch's own steps that are known, of the latest ones."""
        return len(self._typical_ms)

    @property
    def typical_ms(self) -> float:
        """Median time of the latest steps of PyTorch's own; 0 if none is known."""
        return median(self._typical_ms) if self._typical_ms else 0.0

    def reserve(self, seconds: float) -> bool:
        """Reserve a loss for the step that begins, and return whether the share of the time covers it."""
        admitted = self._ledger.admit(seconds)
        self._reserved_seconds += seconds if admitted else 0.0
        return admitted

    def ended(self, phase: TuningPhase, *, differs: bool, first: bool, busy: bool) -> None:
        """Note the end of a step of a phase.

        Args:
            phase: what it did.
            differs: whether adopted kernels ran, or the device was delayed.
            first: whether it was one of the first ones of a block that is compared.
            busy: whether threads built meanwhile.
        """
        self.count += 1
        mark = self._program.mark()
        before, self._worked_seconds = self._worked_seconds, self._worked()
        if self._mark is not None:
            worked, reserved = self._worked_seconds - before, self._reserved_seconds
            counts = not first if phase in _COMPARED else self.count > _UNSTEADY_STEPS
            # A trial delays the host, and so the launches of the step behind it.
            if busy or reserved > 0 or self._behind_seconds > 0:
                self._stirred_at = self.count
            rests = phase is not TuningPhase.TRYING or self.count - self._stirred_at >= _RESTED_STEPS
            delays = worked, busy, self._behind_seconds, rests
            self._open.append(_OpenStep(self._mark, mark, phase, differs, counts, reserved, *delays))
            self._reserved_seconds, self._behind_seconds = 0.0, reserved * (phase is TuningPhase.TRYING)
        self._mark = mark

    def ran(self, time_ms: float) -> None:
        """Note how long a candidate took beside PyTorch's kernel, in a step that has not been read yet."""
        self._ran_seconds += time_ms / 1e3

    def is_in_step(self) -> bool:
        """Return whether the device has begun the step that the host issues.

        Else the host may be so far ahead that it waits for a place in the device's queue.
        """
        return self._mark is not None and self._program.has_reached(self._mark)

    def interrupted(self) -> None:
        """Note that the step that runs is not followed to its end, so that its time is nobody's."""
        self._mark = None

    def begin_anew(self) -> None:
        """Note that steps are others from now on, as where a program goes over from training to inference.

        Once the times of earlier ones are read, no typical time is known. A trial is charged with its estimate then.
        """
        self.compare_anew()
        self._open.append(None)

    def read(self) -> None:
        """Read the times of steps whose end the device has reached."""
        while self._open:
            step = self._open[0]
            if step is None:
                self._open.popleft()
                self._typical_ms.clear()
                for group in self._between_seconds.values():
                    group.clear()
                continue
            time_ms = self._program.elapsed_ms(step.begin, step.end)
            if time_ms is None:
                return
            self._open.popleft()
            self._note(step, time_ms)

    def compare_anew(self) -> None:
        """Forget the steps that were compared, because something else is compared from now on."""
        self._compared_ms = {True: [], False: []}
        self._open = deque(each for each in self._open if each is None or each.phase not in _COMPARED)

    def gain(self, least: int) -> float | None:
        """Return the time of a step that differs over that of another one; None before there are enough of both."""
        others, own = self._compared_ms[True], self._compared_ms[False]
        if min(len(others), len(own)) < least:
            return None
        own_ms = median(own)
        return median(others) / own_ms if own_ms else 1.0  # a step may queue nothing

    def doubt(self) -> float:
        """Return by how much the gain may be wrong, from how far the times of steps are apart; 0 if they are alike."""
        return _STANDARD_ERRORS * hypot(*map(_relative_error, self._compared_ms.values()))

    def _note(self, step: _OpenStep, time_ms: float) -> None:
        known = bool(self._typical_ms)
        lost_seconds = (time_ms - self.typical_ms) / 1e3 if known else step.reserved_seconds
        explained_seconds = _MOST_TIMES * step.reserved_seconds + step.worked_seconds
        if step.reserved_seconds:
            explained_seconds += _RUNS * self._ran_seconds
            self._ran_seconds = 0.0
        pause_seconds = lost_seconds - explained_seconds - max(_LEAST_PAUSE_SECONDS, self.typical_ms / 1e3)
        if pause_seconds > 0 and known:
            self.paused_seconds += pause_seconds
            lost_seconds -= pause_seconds
        if step.phase in _COMPARED:
            if step.counts:
                self._compared_ms[step.differs].append(time_ms)
        elif step.phase is TuningPhase.WARMING:
            if step.counts:
                self._typical_ms.append(time_ms)
        elif step.reserved_seconds or step.phase is TuningPhase.WATCHING:
            self._ledger.settle(step.reserved_seconds, lost_seconds)
        elif step.busy and known:
            self._ledger.disturbed(lost_seconds)
        elif not step.rests and known:
            self._charge_between(step, lost_seconds)
        else:  # the program's own pace may change, for which trials are not to blame
            self._typical_ms.append(time_ms)

    def _charge_between(self, step: _OpenStep, lost_seconds: float) -> None:
        """Charge a step between trials, and at once if there were trials in the step before it.

        What those do not explain is charged where more such steps take it, too: the program may also evaluate in one.
        """
        if step.behind_seconds:
            explained_seconds = min(lost_seconds, _MOST_TIMES * step.behind_seconds)
            self._ledger.disturbed(explained_seconds)
            lost_seconds -= explained_seconds
        group = self._between_seconds[step.behind_seconds > 0]
        group.append(lost_seconds)
        if len(group) == _GROUP:
            self._ledger.disturbed(_GROUP * median(group))
            group.clear()


def _relative_error(times_ms: Sequence[float]) -> float:
    """Return the standard error of a median relative to it, from the median distance from it.

    A few slow steps do not move that: a program may wait for the device in each fifth step, as to print a loss.
    """
    middle = median(times_ms)
    distance = median(abs(each - middle) for each in times_ms)
    return distance / _FROM_MEDIAN * _OF_MEDIAN / sqrt(len(times_ms)) / middle if middle else 0.0
