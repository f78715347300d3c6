"""Whether a step is divided: only where no plan keeps the budget otherwise, or where a divided step is faster."""

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import final

from ucudnn.errors import BudgetError
from ucudnn.memory.planner.search import PlanSearch
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.batches import check_batch, join_batches
from ucudnn.memory.step.budget import check_budget
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.torch.device.stated_budget import StatedBudget
from ucudnn.memory.torch.division.divisions import DividedStep, divisions, lowest, named_in, with_divided_need
from ucudnn.memory.torch.measuring.progress import Stages
from ucudnn.memory.torch.running.step_planning import FitOptions, StepPlanning
from ucudnn.memory.torch.subject.step_program import StepProgram, StepSubject
from ucudnn.memory.torch.tracing.traced_program import trace_program

_SLOW = 1.1  # times the time of its operations, beyond which a plan is compared with those of divisions
_FASTER = 0.95  # times its time, below which the estimate of a division must be for that


Planned = tuple[StepPlanning, MemoryPlan]
"""How a step is planned, and its plan."""


@final
@dataclass(frozen=True)
class DivisionChoice:
    """Plans a step as it is, and divided.

    Attributes:
        of: measures and plans a program.
        costs: those of the step before it is measured.
        stated: a budget, which bounds its tensors.
    """

    of: Callable[[StepProgram], Planned]
    subject: StepSubject
    program: StepProgram
    costs: Costs
    stated: StatedBudget
    options: FitOptions
    stages: Stages

    def whole(self) -> Planned:
        """Return how a step is planned as it is, and its plan.

        Raises:
            BudgetError: if there is none. It names the budget that a divided step keeps.
        """
        try:
            self._refuse()
            return self.of(self.program)
        except BudgetError as error:
            raise named_in(error, self.program, self.costs, self._divisions(0)) from None

    def divided(self) -> Planned:
        """Return how a step is planned, and its plan: of a division where there is no other, or where it is faster.

        Raises:
            BudgetError: if no division keeps the budget. It names what the closest one needs.
        """
        try:
            return self.fitting(divide=True)
        except BudgetError as error:
            whole, refused = error, list[BudgetError]()
        for each in self._below_the_floor():
            try:
                self._check(each.program, each.costs)
                return self.of(each.program)
            except BudgetError as error:
                refused.append(error)
        try:
            self._refuse()
        except BudgetError as error:
            whole = error
        raise with_divided_need(whole, refused) from None

    def fitting(self, *, divide: bool) -> Planned:
        """Return how a step is planned as it is, and its plan; that of a division where that may be, and is faster.

        Raises:
            BudgetError: if there is no plan of the step as it is.
        """
        self._check(self.program, self.costs)
        found = self.of(self.program)
        costs = found[0].costs
        if not divide or len(costs.time_ms) != len(self.program.calls):  # of compiled regions, which say nothing of it
            return found
        step_ms = simulate(found[1], costs).step_ms
        # A convolution may be slow because faster algorithms have no room for their workspaces, which parts leave. So
        # the profile of the device tells what is hoped for, and parts are measured before they count.
        hoped_ms = [*costs.time_ms]
        for index in self.program.graph.problems:
            hoped_ms[index] = min(hoped_ms[index], self.costs.time_ms[index])
        hoped = replace(costs, time_ms=tuple(hoped_ms))
        others = self._divisions(self.options.plan_seconds, hoped) if step_ms > _SLOW * sum(hoped.time_ms) else []
        if others and others[0].step_ms < _FASTER * step_ms:
            with suppress(BudgetError):
                other = self.of(others[0].program)
                found = min(found, other, key=lambda each: simulate(each[1], each[0].costs).step_ms)
        return found

    def _check(self, program: StepProgram, costs: Costs) -> None:
        with self.stated.explained():
            check_budget(program.graph, costs, self.stated.tensor_bytes)

    def _refuse(self) -> None:
        """Raise an error, with remedies, if the budget is below the floor; these know smaller mini-batches."""
        try:
            check_budget(self.program.graph, self.costs, self.stated.tensor_bytes)
        except BudgetError:
            with self.stated.explained():
                check_budget(self._at_every_batch(), self.costs, self.stated.tensor_bytes)
            raise

    def _at_every_batch(self) -> StepGraph:
        """Return a step that stands for every mini-batch, or as it is where the model computes no other ones so."""
        logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # until the error ends the fit
        graph = self.program.graph
        try:
            traced = (trace_program(self.subject, graph.name, graph.batch, factor=factor).graph for factor in (2, 3))
            second, third = traced
            return check_batch(join_batches(graph, second), third)
        except Exception:  # noqa: BLE001  # whatever the model or the loss raises
            return graph

    def _below_the_floor(self) -> Iterator[DividedStep]:
        """Yield divided steps that keep the budget by estimate, the fastest first, and then that of the lowest floor.

        What measuring takes of the budget is not known before, so only the latter may be left room enough.
        """
        found = self._divisions(self.options.plan_seconds)
        yield from found
        least = lowest(self.program, self.costs)
        if all(each.program.divided != least.program.divided for each in found):
            yield least

    def _divisions(self, seconds: float | None, costs: Costs | None = None) -> list[DividedStep]:
        self.stages.begin(f"dividing {len(self.program.graph.operations)} operations")
        assert self.stated.tensor_bytes is not None
        most = self.stated.tensor_bytes
        return divisions(self.program, costs or self.costs, most, self.options.policy, PlanSearch(seconds))
