"""Where a step of a program ends: after the step of an optimizer, or else where its first convolution recurs."""

from collections.abc import Hashable
from typing import final


@final
class StepTracker:
    """Finds the boundaries between steps.

    As soon as an optimizer has stepped, only optimizers count. Until then, as in inference, a step begins where the
    first convolution of the step before is called again. Convolutions inside a backward pass do not count, because
    checkpoints compute the forward pass there once more.

    Attributes:
        steps: number of steps that ended.
        by_optimizer: whether an optimizer has stepped.
        first: the call that begins steps until then; None if there was none.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.by_optimizer = False
        self.first: Hashable = None

    def optimizer_stepped(self) -> None:
        """Note that an optimizer has stepped, which ends a step."""
        self.by_optimizer = True
        self.steps += 1

    def is_candidate(self, call: Hashable) -> bool:
        """Return whether a call may begin a step; this is asked before each call, so it is short."""
        return not self.by_optimizer and (self.first is None or self.first is call)

    def begins(self, call: Hashable, *, in_backward: bool) -> bool:
        """Return whether a forward call begins a new step after another one.

        Args:
            call: stands for all calls that look the same; the very same object each time.
            in_backward: whether a backward pass runs now.
        """
        if self.by_optimizer or in_backward:
            return False
        if self.first is None:
            self.first = call
            return False
        if self.first is not call:
            return False
        self.steps += 1
        return True
