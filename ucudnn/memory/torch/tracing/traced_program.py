"""The program of a step: one trace of it, or two where it changes what is no tensor."""

import gc
from functools import partial

from ucudnn.errors import StepGraphError
from ucudnn.memory.torch.subject.left_as_found import Snapshot, left_as_found
from ucudnn.memory.torch.subject.step_program import StepProgram, StepSubject
from ucudnn.memory.torch.tracing.step_trace import BEFORE, StepTracing
from ucudnn.memory.torch.tracing.trace_checks import start_autograd


def trace_program(subject: StepSubject, name: str, batch: int, *, factor: int = 1) -> StepProgram:
    """Return the program of a training step, at a mini-batch that is larger than the subject's by a factor.

    The model runs once on fake tensors, its hooks and side effects in Python included.

    Raises:
        InvalidValueError: if no output can be differentiated.
        StepGraphError: if the step depends on values of tensors, or has tensors that a program cannot hold.
    """
    start_autograd()
    program = left_as_found(partial(_traced, subject, name, batch, factor), *subject.touched())
    gc.collect()  # circles of references in PyTorch's fakes would hold the sample
    return program


def _traced(subject: StepSubject, name: str, batch: int, factor: int, snapshot: Snapshot) -> StepProgram:
    """Return the program of a step, when what it changes beside tensors has been found to be made once."""

    def again() -> None:
        snapshot.restore_modes()
        snapshot.restore_tensors()

    def traced(*, settled: bool = False, seeks: bool = False) -> tuple[StepProgram, str | None]:
        tracing = StepTracing(subject, batch, factor, snapshot, settled=settled, seeks=seeks)
        try:
            return tracing.program(name, batch * factor), tracing.moved
        except StepGraphError:
            if not seeks and tracing.effects.unplaced:
                (again if settled else snapshot.restore)()
                traced(settled=settled, seeks=True)
            raise

    program, moved = traced()
    if moved is not None:  # what is made once, such as a table, stays in the next step, and a counter does not
        again()
        second, _ = traced(settled=True)
        if [each.computed for each in second.calls] != [each.computed for each in program.calls]:
            raise StepGraphError(f"forward changes {moved}, and computes otherwise then: {BEFORE}")
    snapshot.restore_modes()
    return program
