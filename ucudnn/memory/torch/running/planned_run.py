"""PlannedRun: the code of a plan with what it runs on; and what lets a forward run once more, under another plan."""

import traceback
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from ucudnn.errors import FittedStepError
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.pools.host_slots import plan_host_slots
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import Phase
from ucudnn.memory.torch.codegen.generator import GeneratedCode, generate
from ucudnn.memory.torch.device.step_clock import StepClock
from ucudnn.memory.torch.running.transfers import Transfers
from ucudnn.memory.torch.subject.left_as_found import Snapshot
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.memory.torch.subject.traced_values import generator_id
from ucudnn.memory.torch.tracing.assemble import writes


@final
class PlannedRun:
    """The code of a plan with what it runs on.

    One call at a time may run a plan that copies, because it has one place on the host for each activation.

    Attributes:
        after_backward: is called when backward has ended; None calls nothing.
        guarded: persistent tensors, inputs and outputs that must not change before they are read: first those that
            backward reads, then for each further part of it those that it reads.

    Raises:
        BackendError: if CUDA cannot pin the host's memory.
        BudgetError: if what the plan offloads does not fit into the host's memory.
        MemoryPlanError: if the plan mixes the parts of the step between which the caller stands.
    """

    def __init__(
        self,
        program: StepProgram,
        plan: MemoryPlan,
        costs: Costs,
        *,
        debug: bool = False,
        host_bytes: int | None = None,
    ) -> None:
        self.program, self.plan, self.simulation = program, plan, simulate(plan, costs)
        self.transfers = Transfers(plan_host_slots(plan), program.device, host_bytes=host_bytes)
        self.persistent = tuple(tensor for tensor, _ in program.persistent)
        self.forwards = 0  # how often forward has begun
        self.clock = StepClock(program.device)
        self.after_backward: Callable[[], None] | None = None
        self._debug = debug
        self.copying = self.simulation.offloaded_bytes > 0
        self._turn: dict[str, object] = {}  # holds the call that runs; no lock, because nobody waits, nor should a fork
        self._checked = True  # until a step has ended, what operators return is compared with the trace
        self.code = self._generated()
        everything = frozenset[int]().union(*self.code.reads)
        self.guarded = tuple(_guarded(program, read) for read in (everything, *self.code.reads[1:]))

    @property
    def may_run_again(self) -> bool:
        """Whether a step may find out that another plan is right: in the first step, or by its outputs."""
        program = self.program
        return self._checked or len(program.differentiable) > 1 or any(is_branch for *_, is_branch in program.supposed)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], list[Any], int]:
        """Return the outputs, what backward needs, and the number of this forward; no other call may run meanwhile."""
        return self._alone(self._forward, inputs)  # type: ignore[no-any-return]

    def _forward(self, inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], list[Any], int]:
        self.forwards += 1
        number = self.forwards
        self.clock.begin()
        outputs, state = self._settled(self.code.forward, self.transfers, self.persistent, inputs)
        return outputs, state, number

    def backward(
        self, number: int, state: list[Any], grad_outputs: Sequence[Tensor], persistent: tuple[Tensor, ...]
    ) -> Callable[[], tuple[Tensor | None, ...]]:
        """Return what runs the next part of backward and returns its gradients; the first empties what forward left.

        `persistent` are the tensors of that forward, because others may have replaced them since then.

        Raises:
            FittedStepError: here and later, if another forward has overwritten what this one left on the host, or
                another call runs the plan, and the plan copies.
        """
        self._check_number(number, state)
        code = self.code
        run: Callable[[], Any] = partial(code.backward, self.transfers, persistent, state, grad_outputs)
        if len(code.parts) > 1:
            run = partial(_resumed, run())
        ahead = len(code.parts)

        def part() -> tuple[Tensor | None, ...]:
            nonlocal ahead
            self._check_number(number, state)
            ahead -= 1
            gradients: tuple[Tensor | None, ...] = self._alone(self._settled, run)
            if not ahead:
                self._end()
            return gradients

        return part

    def _check_number(self, number: int, state: list[Any]) -> None:
        if self.copying and number != self.forwards:
            state.clear()
            raise FittedStepError(
                "another forward of the fitted step ran before this backward, and its plan keeps activations of one"
                " forward on the host: call backward after each forward"
            )

    def _end(self) -> None:
        self.clock.end()
        if self.after_backward is not None:
            self.after_backward()
        if self._checked:
            self._checked = False
            self.code = self._generated()

    def _alone(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function while no other call runs, if the plan copies.

        Ctrl-C can come only where a function is called or returns, so none comes while the turn is given back.
        """
        if not self.copying:
            return function(*args)
        turn, own = self._turn, object()
        try:
            if turn.setdefault("taken", own) is not own:
                raise FittedStepError(
                    "the fitted step is called while another call of it runs, in another thread or as in a signal"
                    " handler, and its plan keeps activations of one call on the host: call it after the other, or fit"
                    " another step"
                )
            return function(*args)
        finally:
            if "taken" in turn and turn["taken"] is own:
                del turn["taken"]

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Let the code mark each operation for PyTorch's profiler while this is entered (`code_support.MARK`)."""
        before = self.code
        self.code = generate(self.program, self.plan, self.simulation.delayed, debug=self._debug, marked=True)
        try:
            yield
        finally:
            self.code = before

    def _generated(self) -> GeneratedCode:
        return generate(self.program, self.plan, self.simulation.delayed, checked=self._checked, debug=self._debug)

    def _settled(self, function: Any, *args: Any) -> Any:
        """Call code below autograd; if it fails, wait for its copies, because their memory may be used again."""
        try:
            # Gradients are computed by the code. Grad mode stays on, because operators choose kernels by it.
            with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
                return function(*args)
        except BaseException as error:
            self.transfers.abandon()
            lines = self.code.text.splitlines()  # no file has them
            for frame, number in traceback.walk_tb(error.__traceback__):
                if frame.f_code.co_filename == self.code.filename:
                    error.add_note(f"in the code of the plan: {lines[number - 1].strip()}")
            raise


def _resumed(code: Generator[Any, None, Any]) -> Any:
    try:
        return next(code)
    except StopIteration as ended:
        return ended.value


def _guarded(program: StepProgram, read: Set[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    groups = ([tensor for _, tensor in program.persistent], program.inputs, program.outputs)
    persistent, inputs, outputs = (
        tuple(index for index, tensor in enumerate(tensors) if tensor.storage in read) for tensors in groups
    )
    return persistent, inputs, outputs


@final
class BeforeForward:
    """Modes of this thread, random number generators and the tensors that forward writes, as they are now.

    So it can run once more. Backward tells which outputs of a step get gradients, and an operator how its result lies.
    Where that is otherwise than in the trace, the step is planned anew, and the forward of that plan runs.
    """

    def __init__(self, run: PlannedRun, inputs: Sequence[Tensor], modes: Snapshot) -> None:
        program = run.program
        calls = [each for each in program.every_call() if each.phase is Phase.FORWARD]
        written = {each.storage for call in calls for each in writes(call)}
        given = (*zip(run.persistent, (each for _, each in program.persistent), strict=True),)
        given += (*zip(inputs, program.inputs, strict=True),)
        # The copies lie in the host's memory, because no plan counts them.
        self._tensors = [(each, each.detach().to("cpu", copy=True)) for each, made in given if made.storage in written]
        drawn = any(call.draws for call in calls)
        own = (each for call in calls for each in call.kwargs.values() if isinstance(each, torch.Generator))
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
