"""Makes the plans of a step: measures its operations, and plans the first step and all later ones within a budget."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from ucudnn.benchmarking.storage.step_files import StepFiles
from ucudnn.benchmarking.storage.store import OFF
from ucudnn.errors import BudgetError
from ucudnn.memory.allocator.compaction import Compaction
from ucudnn.memory.allocator.headroom import AllocatorRoom
from ucudnn.memory.planner.least import frugal_plan
from ucudnn.memory.planner.planner import returns_ms
from ucudnn.memory.planner.search import PLAN_SECONDS, PlanSearch
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.catalog import MemoryPolicy
from ucudnn.memory.reports.comparison import Progress
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.torch.compiling.compiled_regions import with_scratch
from ucudnn.memory.torch.compiling.fused_program import RegionKinds
from ucudnn.memory.torch.compiling.step_race import StepRace
from ucudnn.memory.torch.convolutions.convolution_choices import ConvolutionChoices
from ucudnn.memory.torch.device.allocator import expand_segments
from ucudnn.memory.torch.device.allocator_meter import AllocatorMeter
from ucudnn.memory.torch.device.host_block import host_headroom
from ucudnn.memory.torch.device.stated_budget import StatedBudget
from ucudnn.memory.torch.device.tensor_block import allocator_room, taken_block
from ucudnn.memory.torch.measuring.operation_costs import measure_operations, step_costs
from ucudnn.memory.torch.measuring.progress import Stages
from ucudnn.memory.torch.running.first_step import FirstStep, GrowthGuard, outside_meter
from ucudnn.memory.torch.running.fitted_step import FittedStep
from ucudnn.memory.torch.running.kept_step import KeptPlans, kept_costs
from ucudnn.memory.torch.running.planned_run import PlannedRun
from ucudnn.memory.torch.sharding.agreement import Agreement
from ucudnn.memory.torch.subject.step_program import StepProgram, StepSubject
from ucudnn.memory.torch.subject.update_parts import given_optimizer
from ucudnn.settings import Settings

_Refit = Callable[..., FittedStep]


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """How a step is fitted: as the arguments of `fit` say, with sizes in bytes.

    Attributes:
        measured: whether each operation runs by itself before the plan is made, which gives its time, and on a GPU its
            scratch. Otherwise times are those of a device profile, and operations have no scratch.
        other_bytes: tensors on the device that are none of the step's.
        races: whether torch.compile of the whole step takes turns with the plan, and stays where it is faster.
        regions: what is compiled already, if steps are.
        ranks: decides together with other ranks.
    """

    budget: int | None = None
    policy: str | MemoryPolicy = "auto"
    measured: bool
    convolutions: str | Mapping[str, Any] | None = None
    debug: bool = False
    host_bytes: int | None = None
    other_bytes: int = 0
    progress: Progress | None = None
    plan_seconds: float | None = PLAN_SECONDS
    divide: bool = False
    compile: bool = False
    races: bool = False
    regions: RegionKinds = field(default_factory=RegionKinds)
    ranks: Agreement = field(default_factory=Agreement)


@dataclass(frozen=True, kw_only=True)
class StepPlanning:
    """How plans of a step are made.

    Attributes:
        room: what PyTorch's allocator may take; None where nothing bounds it.
        choices: what runs convolutions by the plan's configurations; None where PyTorch's own kernels run.
        kept: makes plans, unless earlier processes did.
    """

    program: StepProgram
    costs: Costs
    stated: StatedBudget
    options: FitOptions
    room: AllocatorRoom | None
    choices: ConvolutionChoices | None
    kept: KeptPlans

    @classmethod
    def measured(
        cls, subject: StepSubject, program: StepProgram, stated: StatedBudget, options: FitOptions, stages: Stages
    ) -> Self:
        """Return how plans are made, when what they are made of has been measured."""
        device, costs = program.device, with_scratch(program, step_costs(program.graph, program.device))
        settings = Settings.load()
        files = StepFiles(OFF if settings.remeasure else settings.database)
        fixed = "" if stated.budget is None else expand_segments(device)
        within = stated.with_libraries(device)
        if options.measured:
            measure = partial(measure_operations, program, costs, tensor_bytes=within.tensor_bytes, stages=stages)
            costs = options.ranks.all(lambda: kept_costs(files, program, lambda known: measure(known=known)))
        asked = options.convolutions
        choices = None if asked is None else ConvolutionChoices(program, asked)
        if choices is not None:
            costs = choices.measured(costs, within.tensor_bytes, stages)
        costs, within = options.ranks.costs(program.graph, costs), within.with_loaded_kernels(device, since=stated)
        stated = options.ranks.stated(replace(within, fixed_segments=fixed))
        stated_so = options.budget, options.host_bytes, options.plan_seconds
        kept = KeptPlans(files, program, costs, options.policy, stated_so)
        room = allocator_room(program, stated, [*map(given_optimizer, subject.optimizers)], kept.least)
        return cls(program=program, costs=costs, stated=stated, options=options, room=room, choices=choices, kept=kept)

    def fitted(self, plan: MemoryPlan, subject: StepSubject, refit: _Refit, meter: AllocatorMeter | None) -> FittedStep:
        """Return the fitted step of a plan; `refit` as in `FittedStep`, and the meter measures the first step."""
        step = FittedStep(subject, self._run(plan), self.costs, refit, self._told(plan))
        if self.options.races and subject.parallel is None and self.options.ranks.alone:  # ranks would choose apart
            step.race = StepRace(partial(_called, subject.without_sample()), self.program.device)
        layout = None if self.room is None else self.room.compaction(plan, self.costs)
        first = None if meter is None else self._frugal_step(step, meter, layout)
        updating = [*map(given_optimizer, subject.optimizers)]
        block = taken_block(self.program.device, layout, self.stated, updating)
        lies = None if self.room is None else partial(self.room.compaction, costs=self.costs)
        step.begin_with(first, self._guard(first), self._told, block, lies)
        return step

    def plan(self, less: int = 0) -> MemoryPlan:
        """Return the plan for the budget, or for some bytes less."""
        budget = None if self.stated.tensor_bytes is None else self.stated.tensor_bytes - less
        room = None if self.room is None else replace(self.room, tensor_bytes=self.room.tensor_bytes - less)
        host = host_headroom(self.stated.host_bytes)
        stages = Stages(self.options.progress)
        stages.begin(f"planning {len(self.program.graph.operations)} operations")
        search = partial(PlanSearch, self.options.plan_seconds, stages.reached)
        make = partial(self.kept.plan, (budget, room, host), search, less)
        plan = self.options.ranks.plan(make, self.program.graph)
        if self.kept.is_earlier(plan):
            stages.begin("plan of an earlier process")
        return plan

    def _told(self, plan: MemoryPlan) -> StatedBudget:
        stated = replace(self.stated, earlier_plan=self.kept.is_earlier(plan))
        if self.room is None:
            return stated
        taken = self.room.taken_bytes(plan, self.costs) + self.stated.library_bytes
        layout = self.room.compaction(plan, self.costs)
        if layout is not None:
            moved, moved_ms = layout.moved_bytes, self.room.moves_ms(layout)
            return replace(stated, allocator_bytes=taken, moved_bytes=moved, moved_ms=moved_ms)
        found = self.room.returns(plan, self.costs)
        given = (found.returned_bytes, returns_ms(found)) if found.fits else (0, 0.0)
        return replace(stated, allocator_bytes=taken, returned_bytes=given[0], returned_ms=given[1])

    def _guard(self, first: FirstStep | None) -> GrowthGuard | None:
        """Return what looks at the bytes beside PyTorch's allocator; None where no budget counts them."""
        measure = outside_meter(self.program.device)
        if self.stated.tensor_bytes is None or measure is None or not self.options.ranks.alone:
            return None
        counted = self.stated.outside_bytes + self.stated.reserve_bytes
        return GrowthGuard(measure, counted, partial(self._within_growth, first))

    def _within_growth(self, first: FirstStep | None, grown: int, run: PlannedRun) -> PlannedRun | None:
        """Return the code that runs when kernels have grown beyond their reserve; None where no plan takes less."""
        less = grown + (0 if first is None else first.excess_bytes)
        if less <= self._spare(run.plan):
            return run
        try:
            return self._run(self.plan(less))
        except BudgetError:
            plan = frugal_plan(self.program.graph, self.costs, self.options.policy, run.plan, self.room)
            return None if plan is None or less > self._spare(plan) else self._run(plan)

    def _frugal_step(self, step: FittedStep, meter: AllocatorMeter, layout: Compaction | None) -> FirstStep | None:
        """Return a first step that runs the plan that takes least; None where there is no more frugal one.

        Where the step's plan runs in a block, the first step does, too, and moves what the block's layout says.
        """
        if layout is None or self.room is None:
            frugal = frugal_plan(self.program.graph, self.costs, self.options.policy, step.plan, self.room)
        else:
            least = self.room.first_of(step.plan, self.costs)
            frugal = least and replace(least, budget=step.plan.budget, moves=layout.first_moves)
        if frugal is None or self.stated.tensor_bytes is None:
            return None
        return FirstStep(
            self._run(frugal), self.costs, self._spare(step.plan), meter, partial(self._faster_for_less, frugal)
        )

    def _faster_for_less(self, frugal: MemoryPlan, less: int) -> PlannedRun | None:
        """Return the code of the plan for some bytes less; None where that is not faster than the frugal one."""
        try:
            found = self._run(self.plan(less))
        except BudgetError:
            return None
        return found if found.simulation.step_ms < simulate(frugal, self.costs).step_ms else None

    def _spare(self, plan: MemoryPlan) -> int:
        """Return the bytes by which a plan stays below the budget; fewer than none where it exceeds it."""
        assert self.stated.tensor_bytes is not None
        spare = self.stated.tensor_bytes - simulate(plan, self.costs).peak_bytes
        if self.room is None:
            return spare
        return min(spare, self.room.tensor_bytes - self.room.taken_bytes(plan, self.costs))

    def _run(self, plan: MemoryPlan) -> PlannedRun:
        program = self.program if self.choices is None else self.choices.applied(plan.configurations)
        return PlannedRun(program, plan, self.costs, debug=self.options.debug, host_bytes=self.stated.host_bytes)


def _called(subject: StepSubject, *args: Any, **kwargs: Any) -> Any:
    return subject.called(subject.model, args, kwargs)
