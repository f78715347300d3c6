"""Divisions of a step, the most promising first: segments chosen for several floors, each with a quick plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from ucudnn.errors import BudgetError
from ucudnn.memory.planner.condensed import planned
from ucudnn.memory.planner.search import PlanSearch
from ucudnn.memory.policies.catalog import AUTO, MemoryPolicy, find_policy
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.budget import with_need
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.torch.division.divided_program import divided
from ucudnn.memory.torch.division.segment_choice import EstimatedSegment, SegmentChoice
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.units import bytes_up

_SHARES = (1.0, 0.85, 0.7, 0.55, 0.4, 0.25)
"""Shares of a budget below which the floor is brought: a plan has more freedom the farther it is from the floor."""
_SLOWER = 1.05  # times the best division's time, beyond which more parts only take longer


@final
@dataclass(frozen=True, kw_only=True)
class DividedStep:
    """A step whose segments are computed part by part.

    Attributes:
        program: the step.
        costs: its costs, estimated from those of the step as it is.
        step_ms: time of a step by a quick plan within the budget; 0 without one.
        peak_bytes: its peak; 0 without one.
    """

    program: StepProgram
    costs: Costs
    step_ms: float = 0.0
    peak_bytes: int = 0

    @property
    def floor_bytes(self) -> int:
        """The floor of the divided step."""
        return measure_liveness(self.program.graph, self.costs).floor_bytes


def divisions(
    program: StepProgram, costs: Costs, budget: int, policy: str | MemoryPolicy, search: PlanSearch
) -> list[DividedStep]:
    """Return divisions of a step with which a policy keeps a budget in bytes, by their estimated time.

    The policy 'auto' stands for 'joint'. When the time of the search is over, the first division ends it.
    """
    planner = find_policy("joint" if policy == AUTO else policy) if isinstance(policy, str) else policy
    found, seen = list[DividedStep](), set[tuple[object, ...]]()
    choices = (SegmentChoice(program, costs, slabs=slabs) for slabs in _ways(program))
    for choice, share in ((choice, share) for choice in choices if not found for share in _SHARES):
        chosen = choice.within(int(share * budget))
        key = tuple(each.order.segment for each in chosen)
        if not chosen or key in seen:
            continue
        seen.add(key)
        step = _divided(choice, chosen, program, costs)
        try:
            done = simulate(planned(planner, step.program.graph, step.costs, budget), step.costs)
        except BudgetError:
            continue
        found.append(replace(step, step_ms=done.step_ms, peak_bytes=done.peak_bytes))
        if search.over or done.step_ms > _SLOWER * min(each.step_ms for each in found):
            break
    return sorted(found, key=lambda each: each.step_ms)


def lowest(program: StepProgram, costs: Costs) -> DividedStep:
    """Return the division of a step that lowers its floor most: of no segments where none does."""
    choices = [SegmentChoice(program, costs, slabs=slabs) for slabs in _ways(program)]
    return min((_divided(each, each.within(0), program, costs) for each in choices), key=lambda each: each.floor_bytes)


def _ways(program: StepProgram) -> tuple[bool, ...]:
    """Return whether segments are divided into slabs, in the order of trial: where parts do not suffice, as of one."""
    return (False, True) if program.graph.batch > 1 else (True,)


def _divided(
    choice: SegmentChoice, chosen: Sequence[EstimatedSegment], program: StepProgram, costs: Costs
) -> DividedStep:
    whole = divided(choice.axes, [each.order for each in chosen])
    named = replace(whole.program, divided=tuple(map(choice.told, chosen)))
    return DividedStep(program=named, costs=whole.costs(program.graph, costs))


def named_in(error: BudgetError, program: StepProgram, costs: Costs, found: Sequence[DividedStep]) -> BudgetError:
    """Return what refuses a budget, with what divisions reach: the budget at some time, or else a lower floor."""
    if found:
        slower = found[0].step_ms / (sum(costs.time_ms) or 1.0)
        reached = f"keeps this budget at about {slower:.2f} times the step's time without one"
    else:
        floor = lowest(program, costs).floor_bytes
        if floor >= measure_liveness(program.graph, costs).floor_bytes:
            return error
        reached = f"lowers the floor to {bytes_up(floor)}"
    return with_need(error, f"; or give fit divide=True, which {reached}", error.required_bytes)


def with_divided_need(error: BudgetError, refused: Sequence[BudgetError]) -> BudgetError:
    """Return what refuses a budget, with the least that divisions need that were refused, too."""
    nearest = min(refused, key=lambda each: each.required_bytes, default=error)
    if nearest.required_bytes >= error.required_bytes:
        return error
    needed = bytes_up(nearest.required_bytes)
    cause = f", because of {nearest.kernel}" if nearest.kernel else ""
    return with_need(error, f"; divided, {needed} are needed{cause}", nearest.required_bytes)
