"""Where a step of a program ends: after the step of an optimizer, or else where its first convolution recurs."""

from collections import Counter
from collections.abc import Hashable
from typing import Any, final
from weakref import ref

_MOST_OTHERS = 4  # steps of other optimizers, after which the first one counts no more
_MOST_CALLS = 256  # of other convolutions, after which another one is looked for that recurs


@final
class StepTracker:
    """Finds the boundaries between steps.

    As soon as an optimizer has stepped, only optimizers count. Several ones may step in a row, or one inside another,
    so a step ends where the first of them steps again. Until then, as in inference, a step begins where the first
    convolution of the step before is called again. Convolutions inside a backward pass do not count, because
    checkpoints compute the forward pass there once more.

    The first optimizer or convolution may be one that never recurs, such as that of another model before. Then another
    one takes its place, after more and more of the others each time.

    Attributes:
        steps: number of steps that ended.
        by_optimizer: whether an optimizer has stepped.
        first: the call that begins steps until then; None if there was none.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.by_optimizer = False
        self.first: Hashable = None
        self._optimizer: Any = None  # a weak reference to the first one
        self._others = 0  # optimizers or calls since the first one
        self._most_optimizers = _MOST_OTHERS
        self._most_calls = _MOST_CALLS
        self._seen: Counter[Hashable] = Counter()

    def optimizer_stepped(self, optimizer: object) -> bool:
        """Note that an optimizer has stepped outside of a backward pass, and return whether that ends a step."""
        if not self.by_optimizer:
            self.by_optimizer, self._others = True, 0
            self._seen.clear()
        first = None if self._optimizer is None else self._optimizer()
        if first is not optimizer:
            self._others += first is not None
            if first is not None and self._others <= self._most_optimizers:
                return False
            self._most_optimizers *= 1 if first is None else 2
            self._optimizer = ref(optimizer)
        self._others = 0
        self.steps += 1
        return True

    def is_candidate(self, call: Hashable) -> bool:
        """Return whether a call may begin a step; this is asked before each call, so it is short."""
        if self.by_optimizer:
            return False
        if self.first is None or self.first is call:
            return True
        self._others += 1
        return self._others > self._most_calls

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
            self._look_for_another(call)
            return False
        if self._others > self._most_calls:
            self._seen.clear()
        self._others = 0
        self.steps += 1
        return True

    def _look_for_another(self, call: Hashable) -> None:
        """Count calls, as many as went before; then take the one that recurs least, which a step may have once."""
        self._seen[call] += 1
        if self._others < 2 * self._most_calls:
            return
        recurring = [each for each, count in self._seen.items() if count > 1]
        if recurring:
            self.first = min(recurring, key=self._seen.__getitem__)
        self._seen.clear()
        self._most_calls *= 2
        self._others = 0
