"""Whether the host bounds a program: then a device that has more to do takes no longer for a step."""

import sys
from typing import final

from torch.utils.hooks import RemovableHandle

from ucudnn.torch.device.timed_device import TimedGpu
from ucudnn.torch.steps.step_comparison import BLOCK_STEPS, Turns
from ucudnn.torch.steps.step_times import StepTimes
from ucudnn.torch.steps.step_tracker import before_next_module
from ucudnn.torch.steps.trial_ledger import TrialLedger

_BLOCKS = 2  # of steps that are delayed, and as many that are not
_SHARE_OF_STEP = 0.2  # by which a step is delayed
_WHOLE = 0.7  # of the delay: if a step takes longer by less, the device has waited for the host
_STRIDE = 8  # of steps, one of which may begin, so that ranks of a program delay the same ones


@final
class HostBoundCheck:
    """Delays the device in some steps, and compares these with others.

    Where a device waits for its host anywhere in a step, a delay takes the place of a wait, and the step ends when it
    would have ended. No faster kernel makes such a step shorter, and trials would only disturb the host. Where the
    device always has work, a step takes longer by the whole delay.

    A program may wait for the device where a step ends, as to print the loss, and would wait for a delay, too. So a
    delay begins with the forward pass, when a module is called. In programs that compile modules it begins before.

    The share of the time that trials may lose covers the delays.

    Attributes:
        is_bound: whether the host bounds the program: the device waits for it in a sixteenth of a step at least.
        is_over: whether that is known, or cannot be found out.
        delays: whether the step that runs is delayed.
        turns: says in which steps others of the other kind begin.
    """

    def __init__(self, program: TimedGpu, times: StepTimes, ledger: TrialLedger) -> None:
        self.is_bound = self.is_over = self.delays = False
        self._program = program
        self._times = times
        self._ledger = ledger
        self._module: RemovableHandle | None = None
        self._has_delayed = False
        self.turns = Turns()
        self._delay_ms = self._reserved_seconds = 0.0
        self._left = _BLOCKS * BLOCK_STEPS  # steps that are to be delayed

    def begin(self) -> bool:
        """Delay the step that begins, and return whether the share of the time covers that."""
        self.is_over = not self._program.can_delay
        if self.is_over or self._times.count % _STRIDE:
            return False
        delay_ms = _SHARE_OF_STEP * self._times.typical_ms
        seconds = self._left * delay_ms / 1e3
        if not self._ledger.admit(seconds):
            return False
        self._delay_ms, self._reserved_seconds = delay_ms, seconds
        self._times.compare_anew()
        self._delay_next()
        return True

    def step_ended(self) -> None:
        """End a step that was delayed or is compared with those, and delay the next one if it is its turn."""
        if self.delays and not self._has_delayed:  # no module was called, or not where trials may run
            self.give_up()
            self.is_over = True
            return
        self.turns.step_ended()
        gain = None if self._left else self._times.gain(_BLOCKS * (BLOCK_STEPS - 1))
        self._delay_next()
        if gain is not None:
            longer_ms = (gain - 1) * self._times.typical_ms
            self.is_bound, self.is_over = longer_ms < _WHOLE * self._delay_ms, True
            self._ledger.settle(self._reserved_seconds, _BLOCKS * BLOCK_STEPS * longer_ms / 1e3)

    def give_up(self) -> None:
        """End it without an answer, because steps are others from now on; delays are charged in full."""
        if self._module is not None:
            self._module.remove()
        made = _BLOCKS * BLOCK_STEPS - self._left - (self.delays and not self._has_delayed)
        self._ledger.settle(self._reserved_seconds, made * self._delay_ms / 1e3)
        self._reserved_seconds, self.delays = 0.0, False

    def _delay_next(self) -> None:
        """Delay the step that begins, if it is its turn; the last ones only wait until all times can be read."""
        self.delays, self._has_delayed = self.turns.is_on and self._left > 0, False
        if not self.delays:
            return
        self._left -= 1
        if _has_compiled():  # a compiled module warns its user of hooks
            self._delay()
        else:
            self._module = before_next_module(self._delay)

    def _delay(self) -> None:
        self._has_delayed = self._program.delay(self._delay_ms)


def _has_compiled() -> bool:
    """Return whether PyTorch has compiled anything in this process; torch._dynamo counts that."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters.get("frames"))
