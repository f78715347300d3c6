"""Policy 'joint': one plan in which activations are kept, made again, or moved to the host.

Recomputation takes little time as long as it saves enough, and then no more: it has a least peak, which for a U-Net is
half of the step's own. Copies keep any budget down to the floor, and then wait for the link: what an H200 computes
in the time of a byte over its link is some 2,400 operations. So what is cheap to make again is dropped, by the search
of 'checkpoint-selective', and what still does not fit leaves by the walk of 'spill', beside what runs again.

Which of the two takes the next activation is what the step says: some selections are planned and simulated whole, from
none that is dropped to those of the least peak. Where recomputation alone does not keep the budget, activations then
change sides one at a time, the largest first, for as long as the step gets faster. Beaumont et al., "Efficient
Combination of Rematerialization and Offloading for Training DNNs", 2021, and Patil et al., "POET", 2022, combine both
by dynamic and integer programs; here each candidate is a plan that is simulated with its copies, stalls and contention.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ucudnn.errors import BudgetError
from ucudnn.memory.plans.actions import Action
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.plans.unfolded import UnfoldedStep
from ucudnn.memory.policies.selective import ActivationSelection, search_of
from ucudnn.memory.policies.swaps.spill import SpillPolicy
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.budget import check_budget
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.liveness import measure_liveness

_NAME = "joint"
_SHARES = (0.0, 1 / 12, 1 / 6, 1 / 3, 1 / 2, 1.0)
"""Peaks of the selections that are looked at first: shares of the way from the least one to that of the step."""
_MOST_PLANNED = 16  # selections in which one activation changes sides
_FASTER = 0.9995  # of the time of a step: less is no difference


class JointPolicy:
    """Recomputation and copies in one plan, in the program's order."""

    def plan(self, graph: StepGraph, costs: Costs, budget: int | None) -> MemoryPlan:
        """Return the plan of a step; without a budget, for the least one.

        Raises:
            BudgetError: if the budget is below the floor.
        """
        check_budget(graph, costs, budget)
        cap = measure_liveness(graph, costs).floor_bytes if budget is None else budget
        found = _JointSearch(graph, costs, cap).fastest()
        return MemoryPlan(policy=_NAME, graph=graph, actions=found.actions, budget=budget)


class _JointPlan(NamedTuple):
    """A plan of the step.

    Attributes:
        step_ms: how long the step takes by the simulator.
        dropped: the activations that are made again.
        brief: those among them that stay only where they are read.
        actions: what is issued, in order.
    """

    step_ms: float
    dropped: frozenset[int]
    brief: frozenset[int]
    actions: tuple[Action, ...]


class _JointSearch:
    """Looks for the activations that are made again, beside which the others move or stay."""

    def __init__(self, graph: StepGraph, costs: Costs, cap: int) -> None:
        self._graph, self._costs, self._cap = graph, costs, cap
        self._selecting = search_of(graph, costs)
        self._activations = self._selecting.activations

    def fastest(self) -> _JointPlan:
        """Return the fastest plan that was looked at."""
        selections = [*self._selecting.selections(self._cap)]
        least = min(each.peak_bytes for each in selections)
        spread = [*self._spread(selections, max(least, self._cap))]
        if least > self._cap:
            return self._climbed(self._fastest_of(self._selecting.thinned(*each) for each in spread))
        chosen = self._fastest_of(each for each, _ in spread)  # copies save little here, so little is looked at
        found = next(each for each in spread if each[0].remakes.dropped == chosen.dropped)
        worth = [spread[0], *([] if found is spread[0] else [found])]
        return self._fastest_of((self._selecting.thinned(*each) for each in worth), chosen)

    def _fastest_of(self, selections: Iterable[ActivationSelection], best: _JointPlan | None = None) -> _JointPlan:
        """Return the fastest plan beside selections, or another one. The empty selection always has a plan."""
        found = [each for each in map(self._planned, selections) if each is not None]
        return min([*([] if best is None else [best]), *found], key=lambda each: each.step_ms)

    def _spread(
        self, selections: Sequence[ActivationSelection], least: int
    ) -> Iterator[tuple[ActivationSelection, int]]:
        """Yield selections of different peaks, each with the peak that it is to keep."""
        most = max(least, selections[0].peak_bytes)
        for peak in (least + int((most - least) * share) for share in (_SHARES if most > least else [1.0])):
            yield next(each for each in selections if each.peak_bytes <= peak), peak

    def _climbed(self, best: _JointPlan) -> _JointPlan:
        """Return a plan in which activations have changed sides for as long as that makes the step faster."""
        planned = 0
        for storage in sorted(self._activations.spans, key=lambda each: (-self._activations.sizes[each], each)):
            for dropped, brief in self._changes(storage, best):
                if planned == _MOST_PLANNED:
                    return best
                planned += 1
                selection = self._selecting.selection(dropped, brief)
                found = None if selection is None else self._planned(selection)
                if found is not None and found.step_ms < _FASTER * best.step_ms:
                    best = found
                    break
        return best

    def _changes(self, storage: int, best: _JointPlan) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
        """Yield the dropped activations, and the brief ones among them, once an activation has changed sides."""
        yield best.dropped ^ {storage}, best.brief - {storage}
        if storage in best.dropped:
            yield best.dropped, best.brief ^ {storage}

    def _planned(self, selection: ActivationSelection) -> _JointPlan | None:
        """Return the plan beside what a selection makes again; None if that does not fit into the budget."""
        step = UnfoldedStep(self._graph, self._costs, self._activations.actions(selection.remakes))
        try:
            plan = SpillPolicy().plan(step.graph, step.costs, self._cap)
        except BudgetError:  # what runs again needs more beside it than any operation of the step
            return None
        step_ms = simulate(plan, step.costs).step_ms
        return _JointPlan(step_ms, selection.remakes.dropped, selection.brief, step.folded(plan.actions))
