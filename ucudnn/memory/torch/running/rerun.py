"""What a forward changes, so that it can run once more, under another plan.

Backward tells which outputs of a step get gradients, and an operator how its result lies. Where that is otherwise than
in the trace, the step is planned anew. What forward has written and the random numbers that it has drawn are put back
before the forward of that plan runs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Generator, Tensor

from ucudnn.memory.step.graph import Phase
from ucudnn.memory.torch.running.planned_run import PlannedRun
from ucudnn.memory.torch.subject.left_as_found import Snapshot
from ucudnn.memory.torch.subject.traced_values import generator_id
from ucudnn.memory.torch.tracing.assemble import writes


@final
class BeforeForward:
    """Modes of this thread, random number generators and the tensors that forward writes, as they are now."""

    def __init__(self, run: PlannedRun, inputs: Sequence[Tensor], modes: Snapshot) -> None:
        program = run.program
        calls = [each for each in program.every_call() if each.phase is Phase.FORWARD]
        written = {each.storage for call in calls for each in writes(call)}
        given = (*zip(run.persistent, (each for _, each in program.persistent), strict=True),)
        given += (*zip(inputs, program.inputs, strict=True),)
        # The copies lie in the host's memory, because no plan counts them.
        self._tensors = [(each, each.detach().to("cpu", copy=True)) for each, made in given if made.storage in written]
        drawn = any(call.draws for call in calls)
        own = (each for call in calls for each in call.kwargs.values() if isinstance(each, Generator))
        general = torch.default_generator, *torch.cuda.default_generators
        self._generators = {generator_id(each): each for each in (*general, *own)} if drawn else {}
        self._states = self._drawn()
        self._modes = modes

    def restore(self) -> None:
        """Put everything back; autograd does not see that tensors are written."""
        self._modes.restore_modes()
        self._draw(self._states)
        with torch.no_grad(), self._unseen():
            for tensor, before in self._tensors:
                tensor.copy_(before)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put everything back for a block, and modes and generators forth again behind it."""
        now, states = Snapshot(), self._drawn()
        try:
            self.restore()
            with self._unseen():
                yield
        finally:
            now.restore_modes()
            self._draw(states)

    def _drawn(self) -> list[Tensor]:
        return [each.get_state() for each in self._generators.values()]

    def _draw(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators.values(), states, strict=True):
            generator.set_state(state)

    def _unseen(self) -> "torch.autograd.grad_mode._unsafe_preserve_version_counter":
        return torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(each for each, _ in self._tensors))
