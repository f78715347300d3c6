"""FittedStep: a model whose forward and backward follow a plan, for a training loop that stays as it is."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from ucudnn.errors import FittedStepError, InvalidValueError, LayoutError
from ucudnn.memory.allocator.compaction import Compaction
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.result import Simulation
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.torch.compiling.step_race import StepRace
from ucudnn.memory.torch.device.stated_budget import StatedBudget
from ucudnn.memory.torch.device.tensor_block import TakenBlock
from ucudnn.memory.torch.running.first_step import FirstStep, GrowthGuard
from ucudnn.memory.torch.running.planned_run import BeforeForward, PlannedRun
from ucudnn.memory.torch.running.step_nodes import PlanInTheModelsPlace, Used, replayed
from ucudnn.memory.torch.running.step_report import step_report
from ucudnn.memory.torch.running.transfers import Transfers
from ucudnn.memory.torch.subject.argument_form import ArgumentForm
from ucudnn.memory.torch.subject.left_as_found import Snapshot
from ucudnn.memory.torch.subject.model_checks import INSTEAD_OF_REPLICAS
from ucudnn.memory.torch.subject.model_state import ModelState
from ucudnn.memory.torch.subject.step_program import StepProgram, StepSubject
from ucudnn.memory.torch.subject.update_parts import update_in_parts
from ucudnn.memory.torch.tracing.real_geometry import note_layout

_MOST_OTHERS = 4  # plans of smaller arguments; each has a block of host memory and takes time to make
_KEPT = (
    "gradients of an earlier step are there while this one runs, which its plan does not count, so the step may take"
    " more than its budget: call zero_grad() before the step, or fit(..., keep_gradients=True)"
)


@final
class FittedStep(nn.Module):
    """A model, or a model and its loss, whose training follows a plan.

    In training mode with gradients a call runs the plan's forward, and `backward` of what it returns runs the plan's
    backward, once. In evaluation mode and without gradients the model runs as it is; without the target a call returns
    its output rather than the loss. Smaller arguments than the sample's get a plan of their own at their first step, by
    `refit`, which plans other outputs that get gradients, too.

    Attributes:
        model: the model, as it was given; its parameters and buffers are those that are trained.
        costs: what the plan was made with.
        race: lets torch.compile of the whole step take turns with the plan; None where only the plan runs.
        accepts_loss_kwargs: False: the Trainer of transformers adds no `num_items_in_batch`, which no plan knows.
    """

    accepts_loss_kwargs = False

    def __init__(
        self,
        subject: StepSubject,
        run: PlannedRun,
        costs: Costs,
        refit: "Callable[..., FittedStep] | None" = None,
        stated: StatedBudget | None = None,
    ) -> None:
        super().__init__()
        self.stated = stated or StatedBudget(budget=run.plan.budget)
        self.model: nn.Module = subject.model if subject.parallel is None else subject.parallel
        self.costs = costs
        self.race: StepRace | None = None
        self._subject, self._run = subject.without_sample(), run
        self._arguments = ArgumentForm(subject)
        self._state = ModelState(subject.model, run.persistent, run.program.attributes, run.program.values)
        self._refit = refit
        self._first: FirstStep | None = None
        self._guard: GrowthGuard | None = None
        self._told: Callable[[MemoryPlan], StatedBudget] | None = None
        self._layout: Callable[[MemoryPlan], Compaction | None] | None = None
        self._block: TakenBlock | None = None
        self._noted: list[Any] = []
        self._modes: Snapshot | None = None  # of the first forward; `CallModes` looks whether others run under them
        self._others: list[FittedStep] = []
        self._used = subject.used
        self._ends = [update_in_parts(each) for each in subject.optimizers] if subject.in_pieces else []
        self._replaced: list[FittedStep] = []
        first = next((index for is_parameter, index in run.program.sources if is_parameter), None)
        self._first_trained = first if run.plan.budget is not None and not subject.gradients_kept else None

    @property
    def plan(self) -> MemoryPlan:
        """The plan."""
        return self._run.plan

    @property
    def program(self) -> StepProgram:
        """The operators of the step."""
        return self._run.program

    @property
    def simulation(self) -> Simulation:
        """What the plan takes by its costs."""
        return self._run.simulation

    @property
    def transfers(self) -> Transfers:
        """The plan's copies."""
        return self._run.transfers

    @property
    def has_block(self) -> bool:
        """Whether PyTorch's allocator took a block for the step's tensors before the first step."""
        return self._block is not None and self._block.taken

    @property
    def held_bytes(self) -> int:
        """Bytes of the tensors that keep the block as it was planned, beside what the plan counts."""
        return 0 if self._block is None else self._block.held_bytes

    @property
    def code(self) -> str:
        """The generated code, for people."""
        return self._run.code.text

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns, or the loss of it and the last arguments if a loss was given.

        Raises:
            BudgetError: if smaller arguments than the sample's have no plan within the budget.
            InvalidValueError: if the arguments differ from the sample in number, type or device, or are larger, or the
                model differs in its parameters, buffers or modes, or a mode of PyTorch's does (`CallModes`).
        """
        model = self.model
        if not model.training or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            if self._arguments.lack_targets(args):
                return model(*args, **kwargs)
            return self._subject.called(model, args, kwargs)
        self._run.program.modes.check()
        parallel, own = self._subject.parallel, self._subject.model
        if parallel is None:
            return self._planned(*args, **kwargs)
        try:
            parallel.module = PlanInTheModelsPlace(own, self._planned)  # it averages gradients of what it has called
            return parallel(*args, **kwargs)
        finally:
            parallel._modules["module"] = own  # calls no function, so that Ctrl-C cannot come between

    def _planned(self, *args: Any, **kwargs: Any) -> Any:
        leaves = self._arguments.match(args, kwargs)
        if leaves is None:
            args, kwargs = self._arguments.arranged(args, kwargs)  # type: ignore[assignment]
            leaves = self._arguments.match(args, kwargs)
        if leaves is None:
            return self.other(args, kwargs)._planned(*args, **kwargs)
        race, self._modes = self.race, self._modes or Snapshot()
        if race is not None and race.won is not None:  # guards of its own look at the model
            return race.won(*args, **kwargs)
        run = self._current()
        run.persistent = self._state.tensors()
        if self._first_trained is not None and run.persistent[self._first_trained].grad is not None:
            self._first_trained = None
            warnings.warn(_KEPT, stacklevel=2)
        inputs = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        if race is None:
            return self._replayed(run, inputs, args, kwargs)
        modes = self._modes
        whole = race.whole(lambda: BeforeForward(run, inputs, modes).restore, args, kwargs)
        return whole[0] if whole else race.noted(self._replayed(run, inputs, args, kwargs))

    def _replayed(
        self, run: PlannedRun, inputs: tuple[Tensor, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the plan's forward, and return the outputs; where the plan is not right, another one is made."""
        sources = [(run.persistent if is_persistent else inputs)[each] for is_persistent, each in run.program.sources]
        before = None
        if self._refit is not None and run.may_run_again:
            before = BeforeForward(run, inputs, self._modes or Snapshot())
        again = None if before is None else partial(self._run_again, before, args, kwargs, inputs)
        try:
            outputs = replayed(run, inputs, sources, self._parts(sources), again)
        except LayoutError as error:
            if before is None:
                raise
            before.restore()
            self._replan(args, kwargs, self._used, error)
            return self._planned(*args, **kwargs)
        if wanted := run.program.found_otherwise(outputs):
            if before is None:
                raise FittedStepError(f"{wanted[-1][1]} goes another way than in the sample: fit the step again")
            del outputs
            before.restore()
            self._replan(args, kwargs, self._used, None, wanted)
            return self._planned(*args, **kwargs)
        return run.program.result.build(outputs)

    def _run_again(
        self,
        before: BeforeForward,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        inputs: tuple[Tensor, ...],
        used: Used,
        error: LayoutError | None,
    ) -> tuple[PlannedRun, list[Any], int]:
        with before.restored():
            self._replan(args, kwargs, used, error)
            run = self._current()
            run.persistent = self._state.tensors()
            _, state, number = run.forward(inputs)
        return run, state, number

    def _replan(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        used: Used | None,
        error: LayoutError | None,
        supposed: tuple[Any, ...] = (),
    ) -> None:
        """Change to the plan of other outputs with gradients, of what an operator has returned, or of another branch.

        Raises:
            LayoutError: if a plan for that has been made, and has not helped.
        """
        program = self._run.program
        if error is not None:
            noted = error.place, error.found
            call = next(each for each in program.every_call() if each.index == error.place[0])
            if noted in self._noted:
                raise error
            self._noted.append(noted)
            note_layout(call.func, call.args, call.kwargs, error.place[1], error.found)
        supposed = supposed or program.supposed
        for other in () if error is not None else self._replaced:
            if other._used == used and other._run.program.supposed[: len(supposed)] == supposed:
                self._replaced.remove(other)
                break
        else:
            other = self.fitted_again(args, kwargs, used)
            if other._run.program.supposed[: len(supposed)] != supposed:
                raise FittedStepError(f"{supposed[-1][1]} goes another way in each forward: leave it to the loop")
        for name in ("costs", "stated", "_run", "_state", "_first", "_guard", "_told", "_layout", "_used", "_ends"):
            mine, others = getattr(self, name), getattr(other, name)
            setattr(self, name, others)
            setattr(other, name, mine)
        if error is None:
            self._replaced.append(other)
        else:
            other.close()

    def _parts(self, sources: Sequence[Tensor]) -> tuple[tuple[int, ...], ...] | None:
        """Return the sources whose gradients each part of backward hands over, in order; None for all in any order.

        Before DistributedDataParallel has made its buckets anew, there is one part in the plain loop's order, because
        it notes the order, and has one bucket until then. Where hooks may take memory that no plan counts, all come at
        the end, because there is most room then.
        """
        parallel, run = self._subject.parallel, self._run
        if parallel is None:
            return None
        final = parallel.find_unused_parameters and not parallel.static_graph
        if not (final or getattr(parallel, "_has_rebuilt_buckets", True)):
            return (run.program.order,)
        hooked = any(each._backward_hooks or each._post_accumulate_grad_hooks for each in sources)
        at_the_end = hooked or parallel._comm_hooks or not parallel.require_backward_grad_sync
        return None if at_the_end or len(run.code.parts) == 1 else run.code.parts

    def begin_with(
        self,
        first: FirstStep | None,
        guard: GrowthGuard | None,
        told: Callable[[MemoryPlan], StatedBudget],
        block: TakenBlock | None = None,
        layout: Callable[[MemoryPlan], Compaction | None] | None = None,
    ) -> None:
        """Let the first step run another plan, which decides whether this step's own plan comes after it.

        `told` returns the stated budget with what is known of a plan, and `layout` where tensors of a plan lie in a
        block of its own. Without a block the allocator grows as it needs.
        """
        self._first, self._guard, self._told, self._block, self._layout = first, guard, told, block, layout

    def _current(self) -> PlannedRun:
        first = self._first
        if first is not None:
            if not first.ended:
                return first.begin()
            self._change(first.follow(self._run), first.run)
            self._first = None
        if self._guard is not None:
            self._change(self._guard.follow(self._run))
        return self._run

    def _change(self, run: PlannedRun, first: PlannedRun | None = None) -> None:
        before = self._run
        if run is before:
            return
        stated = self.stated if self._told is None else self._told(run.plan)
        if self._block is not None and self._block.taken:
            taken = max(self.stated.allocator_bytes or 0, stated.allocator_bytes or 0)
            stated = replace(stated, allocator_bytes=taken)
            layout = None if run is first or self._layout is None else self._layout(run.plan)
            if layout is not None:
                self._block.change(layout)
        self._run, self.stated = run, stated
        before.transfers.close()

    def step_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "FittedStep | None":
        """Return the step that runs with arguments: this one or one of others; None where it is not planned yet."""
        forms = (args, kwargs), self._arguments.arranged(args, kwargs)
        steps = ((step, form) for form in forms for step in (self, *self._others))
        return next((step for step, form in steps if step._arguments.match(*form) is not None), None)

    def other(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "FittedStep":
        """Return the step of smaller arguments, or of others that need other gradients; it is planned where need be."""
        if (step := self.step_of(args, kwargs)) is not None:
            return step
        args, kwargs = self._arguments.arranged(args, kwargs)
        self._arguments.check_smaller(args, kwargs)
        if self._refit is None:
            raise InvalidValueError(self._arguments.difference(args, kwargs))
        if len(self._others) == _MOST_OTHERS:
            raise InvalidValueError(
                f"the step has plans for {_MOST_OTHERS} other sizes of arguments already:"
                f" {self._arguments.difference(args, kwargs)}, or pad them to the same size"
            )
        other = self.fitted_again(args, kwargs)
        self._others.append(other)
        return other

    def fitted_again(self, *given: Any, refit: "Callable[..., FittedStep] | None" = None) -> "FittedStep":
        """Return another step, which runs in this one's block, whose pages go back while it is measured."""
        refit = refit or self._refit
        assert refit is not None
        try:
            if self._block is not None:
                self._block.release()
            other = refit(*given)
            if self._block is not None and other._block is not None:
                other._block.close()
                other._block = None
        finally:
            if self._block is not None:
                self._block.take_again()
        return other

    def report(self) -> str:
        """Return what the plan does and what that takes, predicted and measured so far, for people.

        The measured peak is what PyTorch's allocator had at most in this process. It is not known on a CPU.
        """
        others = [(other.plan, other.simulation) for other in self._others]
        beside = self._subject.beside
        raced = () if self.race is None else self.race.lines()
        return step_report(self._run, self.costs, self.stated, beside, others, raced, in_parts=bool(self._ends))

    def marked(self) -> AbstractContextManager[None]:
        """Let the code mark each operation for PyTorch's profiler while this is entered (`code_support.MARK`)."""
        return self._run.marked()

    def close(self) -> None:
        """Give the host's memory back; the step cannot run its plan after that."""
        self._run.transfers.close()
        if self._block is not None:
            self._block.close()
        if self._first is not None:
            self._first.run.transfers.close()
        for other in (*self._others, *self._replaced):
            other.close()
        while self._ends:
            self._ends.pop()()

    def __deepcopy__(self, memo: Any) -> Any:
        raise InvalidValueError(
            "a fitted step cannot be copied, because its plan has memory of its own: copy its model, and fit the copy"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidValueError(
            "a fitted step cannot be copied or saved, because its code holds this process's memory: save"
            " step.model.state_dict(), load it into a new model, and fit that"
        )

    def _replicate_for_data_parallel(self) -> Any:
        raise InvalidValueError(
            f"DataParallel copies the fitted step, and its plan is for one GPU: {INSTEAD_OF_REPLICAS}"
        )
