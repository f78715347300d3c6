"""Where a step of a program ends: after the step of an optimizer, or else where its first convolution recurs."""

from collections import Counter
from collections.abc import Callable, Hashable
from sys import maxsize
from typing import Any, final
from weakref import ref

from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

_MOST_OTHERS = 4  # steps of other optimizers, after which the first one counts no more
_MOST_CALLS = 256  # of other convolutions, after which another one is looked for that recurs
_LEAST_SILENCE = 2048  # convolutions without the step of an optimizer, after which optimizers do not count
_TIMES_A_STEP = 4  # as many calls as the longest step of optimizers had, at least


@final
class StepTracker:
    """Finds the boundaries between steps.

    As soon as an optimizer has stepped, only optimizers count. Several ones may step in a row, or one inside another,
    so a step ends where the first of them steps again. Until then, as in inference, a step begins where the first
    convolution of the step before is called again. Convolutions inside a backward pass do not count, because
    checkpoints compute the forward pass there once more.

    A program may train first and infer then. So convolutions count again after many of them without the step of an
    optimizer, until one steps. A long evaluation looks like that, so it takes twice as many each time. A first
    optimizer or convolution may never recur. Then another one takes its place, after more of the others each time.

    Attributes:
        steps: number of steps that ended.
        by_optimizer: whether optimizers count now.
        first: the call that begins steps while they do not; None if there was none.
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
        self._silence = 0  # convolutions since an optimizer stepped
        self._most_silence = _LEAST_SILENCE

    def optimizer_stepped(self, optimizer: object) -> bool:
        """Note that an optimizer has stepped outside of a backward pass, and return whether that ends a step."""
        if self.by_optimizer and _TIMES_A_STEP * self._silence > self._most_silence:
            self._most_silence = _TIMES_A_STEP * self._silence
        self._silence = 0
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

    def trust_optimizers(self) -> None:
        """Let optimizers count from now on, however long they are silent: in a program that is not tuned any more."""
        self._most_silence = maxsize

    def is_silent(self) -> bool:
        """Note a forward call, and return whether optimizers have not stepped for so long that they count no more."""
        self._silence += 1
        return self._silence > self._most_silence and self.by_optimizer

    def is_candidate(self, call: Hashable) -> bool:
        """Return whether a call may begin a step; this is asked before each call, so it is short."""
        if self.by_optimizer:
            return self.is_silent()
        if self.first is None or self.first is call:
            return True
        self._others += 1
        return self._others > self._most_calls

    def begins(self, call: Hashable, *, in_backward: bool) -> bool:
        """Return whether a forward call, or one in a backward pass, begins a new step after another one.

        The call stands for all that look the same; it is the very same object each time.
        """
        if in_backward:
            return False
        if self.by_optimizer:
            if self._silence <= self._most_silence:
                return False
            self.by_optimizer, self.first, self._others = False, call, 0
            self._most_silence *= 2
            self.steps += 1
            return True
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


def before_next_module(action: Callable[[], object]) -> RemovableHandle:
    """Call a function once, before any module of the process is called next, unless the handle is removed before."""
    waits = [True]

    def called(*_: object) -> None:
        handle.remove()
        if waits:  # or another thread was faster
            waits.clear()
            action()

    handle: RemovableHandle = register_module_forward_pre_hook(called)
    return handle
