"""StepRace: torch.compile of a whole step takes turns with the step's plan, and the faster one stays.

Each turn is a step of the training: its gradients and statistics count, whoever computes them. So nothing runs that the
loop has not asked for, and times are those of the loop's own data. The first two steps run the plan, the third and the
fourth torch.compile's code. Then they alternate. The first step of each prepares it and is not timed, and the others
are compared in pairs.
"""

from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any, final

import torch
from torch import Tensor

from ucudnn.memory.torch.compiling.inductor import backward_at_once, compiled_whole, shortened
from ucudnn.memory.torch.device.step_clock import StepClock
from ucudnn.memory.torch.subject.output_tree import OutputTree
from ucudnn.units import format_ms

_PAIRS = 5  # after so many more pairs of steps it is looked who is faster
_MOST_PAIRS = 25
_CLEAR = 0.8  # share of the pairs in which the winner is faster, unless there are no more pairs


@final
class StepRace:
    """Says by whom each step is computed: torch.compile compiles the function that computes a step at its first turn.

    Attributes:
        runs_whole: whether torch.compile computes the step that has begun.
        won: what computes all further steps if torch.compile is faster. It compiles again where the model has changed.
    """

    def __init__(self, step: Callable[..., Any], device: torch.device) -> None:
        self._compiled: Callable[..., Any] | None = compiled_whole(step)
        self._clocks = StepClock(device), StepClock(device)  # of the plan, and of torch.compile
        self._turn, self._is_over, self._has_run = 0, False, False
        self._awaits_backward = False
        self._found = ""
        self.runs_whole = False
        self.won: Callable[..., Any] | None = None

    def whole(
        self, before: Callable[[], Callable[[], None]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Begin a step; return what torch.compile's code has returned, alone in a tuple, or () where the plan runs.

        The plan also runs, from now on, where torch.compile fails in its first turn. `before` returns what puts back
        what forward writes.
        """
        self._begin()
        if self._compiled is None or not self.runs_whole:
            return ()
        if self._has_run:
            return (self.noted(self._compiled(*args, **kwargs)),)
        restore = before()
        try:
            with backward_at_once():
                outputs = self._compiled(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # whatever a compiler or its code raises
            restore()
            self._end_race(f"the plan runs, because torch.compile of the whole step failed: {shortened(error)}")
            return ()
        self._has_run = True
        return (self.noted(outputs),)

    def noted(self, outputs: Any) -> Any:
        """Return the outputs of a step, after arranging that the end of their backward is noted."""
        if not self._is_over:
            for each in OutputTree.of(outputs)[1]:
                if each.grad_fn is not None:
                    each.register_hook(self._backward_begins)
        return outputs

    def lines(self) -> Iterable[str]:
        """Yield what is known of the race, for people."""
        if self._found:
            yield self._found
        else:
            turns = f"{self._turn} steps so far, of at most {2 + 2 * _MOST_PAIRS}"
            yield f"the plan and torch.compile of the whole step take turns, and the faster one stays: {turns}"

    def _begin(self) -> None:
        if self._is_over:
            return
        pairs, behind = divmod(self._turn - 2, 2)
        if pairs > 0 and not behind and pairs % _PAIRS == 0:
            self._compare(pairs)
        if not self._is_over:
            self.runs_whole = self._turn in (2, 3) or (self._turn > 3 and bool(behind))
            self._awaits_backward = True
            self._clocks[self.runs_whole].begin()

    def _compare(self, pairs: int) -> None:
        plan_ms, whole_ms = (each.times_ms() for each in self._clocks)
        wins = sum(theirs < ours for ours, theirs in zip(plan_ms, whole_ms, strict=True))
        is_faster = 2 * wins > pairs
        most = max(wins, pairs - wins)
        if most >= _CLEAR * pairs or pairs >= _MOST_PAIRS:
            plan, whole = (format_ms(median(each)) for each in (plan_ms, whole_ms))
            winner = "torch.compile runs, and no plan bounds its memory" if is_faster else "the plan runs"
            times = f"torch.compile of the whole step {whole}, the plan {plan}"
            self._end_race(f"{times}: {winner}; it was faster in {most} of {pairs} pairs of steps", whole=is_faster)

    def _backward_begins(self, _: Tensor) -> None:
        if self._awaits_backward:
            self._awaits_backward = False
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        if not self._is_over:
            self._clocks[self.runs_whole].end()
            self._turn += 1

    def _end_race(self, found: str, *, whole: bool = False) -> None:
        self._is_over, self._found, self.runs_whole = True, found, whole
        self._compiled = self.won = self._compiled if whole else None
