"""Policy 'joint': one plan in which activations are kept, recomputed, or moved to the host.

Recomputation takes little time as long as it saves enough, and then no more: it has a least peak, which for a U-Net is
half of the step's own. Copies keep any budget down to the floor, and then wait for the link: what an H200 computes
in the time of a byte over its link is some 2,400 operations. So what is cheap to recompute is dropped, by the search
of 'checkpoint-selective', and what still does not fit leaves by the walk of 'spill', beside what runs again.

Which of the two takes the next activation is what the step says: some selections are planned and simulated whole, from
none that is dropped to those of the least peak. Then copies that hide beside compute take over what is dearest to make
again, more and more of it for as long as the step gets faster. Where recomputation alone does not keep the budget,
activations change sides one at a time, the largest first. Beaumont et al., "Efficient Combination of
Rematerialization and Offloading for Training DNNs", 2021, and Patil et al., "POET", 2022, combine both by dynamic and
integer programs; here each candidate is a plan that is simulated with its copies, stalls and contention.

Backward runs in another order where fewer bytes are needed at a time then. Convolutions with a choice take the fastest
configuration that fits, or else the least workspace, and in the end faster ones wherever the plan leaves room.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import inf
from typing import Any, NamedTuple

from ucudnn.bounded import BoundedDict
from ucudnn.configuration import Configuration
from ucudnn.errors import BudgetError
from ucudnn.memory.plans.actions import COMPUTES, Action, run
from ucudnn.memory.plans.exact_array import exact_array
from ucudnn.memory.plans.lower_order import lower_order, needed_peak
from ucudnn.memory.plans.plan import MemoryPlan, drafts
from ucudnn.memory.plans.unfolded import UnfoldedStep
from ucudnn.memory.policies.selective import ActivationSelection, search_of
from ucudnn.memory.policies.swaps.spill import SpillPolicy
from ucudnn.memory.simulation.configurations import fitting, upgraded
from ucudnn.memory.simulation.copy_bounds import CopyBounds
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.budget import check_budget
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.liveness import measure_liveness

_NAME = "joint"
_SHARES = (0.0, 1 / 6, 1 / 2)  # of the way from the least peak to that of the step: peaks of the first selections
_HIDDEN = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)  # of what copies can move beside compute: the next ones leave it to them
_EXPECTED = 0.5  # the same share where a selection is only estimated
_AMPLE = 2  # times the bytes that are needed at a time, beyond which it hardly matters how many they are
_MOST_PLANNED, _MOST_ESTIMATED = 16, 64  # selections in which one activation changes sides, and activations
_SAME = 1 + 1e-9  # times a time, up to which a difference is rounding
_FASTER = 0.9995  # of the time of a step: less is no difference


class JointPolicy:
    """Recomputation and copies in one plan, with the order of backward and the configurations of convolutions."""

    def plan(self, graph: StepGraph, costs: Costs, budget: int | None) -> MemoryPlan:
        """Return the plan of a step; without a budget, for the least one.

        Raises:
            BudgetError: if the budget is below the floor, even with the configurations of least workspace.
        """
        least = costs.with_configurations(fitting(graph, costs, 0))
        check_budget(graph, least, budget)
        cap = measure_liveness(graph, least).floor_bytes if budget is None else budget
        with drafts():
            found = [
                (each, start, each.plan(start)) for each in _searches(graph, costs, cap) if (start := each.start())
            ]
            search, start, plan = min(found, key=lambda each: simulate(each[2], costs).step_ms)
            improved = search.improved(start)
            plan = plan if improved is start else search.plan(improved)
        return replace(plan, budget=budget)


class _JointPlan(NamedTuple):
    """A plan of the step: its simulated time, the activations that it recomputes, and its actions in order."""

    step_ms: float
    selection: ActivationSelection
    actions: tuple[Action, ...]


class _JointSearch:
    """Looks for the activations that are recomputed in one order of backward, beside which the others move or stay."""

    def __init__(
        self, graph: StepGraph, costs: Costs, cap: int, chosen: Mapping[int, Configuration], is_reordered: bool
    ) -> None:
        self._step, self._step_costs, self._cap, self._chosen = graph, costs, cap, chosen
        self._order, self.graph, self.costs = _ordered(graph, costs, chosen, is_reordered)

    def plan(self, found: _JointPlan) -> MemoryPlan:
        """Return a plan of the step itself, with faster configurations where it leaves room for them."""
        actions = (Action(kind, self._order[at] if kind in COMPUTES else at) for kind, at in found.actions)
        plan = MemoryPlan(policy=_NAME, graph=self._step, actions=(*actions,), configurations=self._chosen)
        return upgraded(plan, self._step_costs, self._cap)

    def start(self) -> _JointPlan:
        """Return the fastest plan beside some selections; the empty one, of the program's order, always has a plan."""
        self._selecting = search_of(self.graph, self.costs)
        self._activations = self._selecting.activations
        self._selections = [*self._selecting.selections(self._cap)]
        least = min(each.peak_bytes for each in self._selections)
        self._is_tight = least > self._cap
        found: list[_JointPlan | None] = []
        for share in _SHARES if self._is_tight else (0.0,):
            peak = max(least, self._cap) + int((self._selections[0].peak_bytes - least) * share)
            chosen = next(each for each in self._selections if each.peak_bytes <= peak)
            found.append(self._planned(self._selecting.thinned(chosen, peak)))
        known_ms = min((each.step_ms for each in found if each is not None), default=inf)
        copied_ms = inf  # below which no step is computed whose copies alone keep the budget
        if self.graph is self._step and known_ms < inf:
            copied_ms = float(CopyBounds(self.graph, self.costs).copied_ms(self._cap).max(initial=0.0))
        if known_ms == inf or copied_ms <= _SAME * known_ms:
            found.append(self._planned(self._selections[0]))
        return min((each for each in found if each is not None), key=lambda each: each.step_ms)

    def improved(self, best: _JointPlan) -> _JointPlan:
        """Return a plan that is no slower, in which copies do more beside compute, or activations change sides."""
        before_ms = inf if self._is_tight else best.step_ms
        for share in _HIDDEN:
            away = self._hidden(share)

            def fits(selection: ActivationSelection, away: Any = away) -> bool:
                return self._activations.peak(selection.recomputed, away)[0] <= self._cap

            kept = bisect_left(self._selections, True, key=fits)
            chosen = self._selections[kept : kept + 1]
            found = self._planned(self._selecting.thinned(chosen[0], self._cap, away)) if chosen else None
            best = min(best, found or best, key=lambda each: each.step_ms)
            if found and found.step_ms > before_ms:
                break
            before_ms = found.step_ms if found else before_ms
        return self._climbed(best) if self._is_tight else best

    def _hidden(self, share: float) -> Any:
        """Return a share of the bytes that copies can have moved before each operation, and move back after it."""
        ends = [0.0, *accumulate(self.costs.time_ms)]
        out, back = (share * each for each in (self.costs.offload_bytes_per_ms, self.costs.prefetch_bytes_per_ms))
        moved = [int(min(begin * out, (ends[-1] - end) * back)) for begin, end in pairwise(ends)]
        return exact_array(moved or [0]).repeat(2)

    def _climbed(self, best: _JointPlan) -> _JointPlan:
        """Return a plan in which activations have changed sides where an estimate promises a faster step, and it is."""
        planned, away = 0, self._hidden(_EXPECTED)
        sizes, best_ms = self._activations.sizes, self._estimated_ms(best.selection, away)
        for storage in sorted(self._activations.spans, key=lambda each: (-sizes[each], each))[:_MOST_ESTIMATED]:
            dropped, brief = best.selection.recomputed.dropped, best.selection.brief
            changes = [(dropped ^ {storage}, brief - {storage}), (dropped, brief ^ {storage})]
            for change in changes if storage in dropped else changes[:1]:
                selection = self._selecting.selection(*change)
                if selection is None or (step_ms := self._estimated_ms(selection, away)) >= best_ms:
                    continue
                planned += 1
                found = self._planned(selection)
                if found is not None and found.step_ms < _FASTER * best.step_ms:
                    best, best_ms = found, step_ms
                    break
            if planned >= _MOST_PLANNED:
                break
        return best

    def _estimated_ms(self, selection: ActivationSelection, away: Any) -> float:
        """Return about how long recomputation takes, and copies of what rises above the cap and is not away anyway."""
        over: list[int] = (self._activations.live(selection.recomputed) - away - self._cap).tolist()
        rises = sum(max(0, after - max(0, before)) for before, after in pairwise([0, *over]))
        rates = self.costs.offload_bytes_per_ms, self.costs.prefetch_bytes_per_ms
        return selection.recomputed.time_ms + sum(rises / each for each in rates)

    def _planned(self, selection: ActivationSelection) -> _JointPlan | None:
        """Return the plan beside what a selection recomputes; None if that does not fit into the budget."""
        step = UnfoldedStep(self.graph, self.costs, self._activations.actions(selection.recomputed))
        try:
            plan = SpillPolicy().plan(step.graph, step.costs, self._cap)
        except BudgetError:  # what runs again needs more beside it than any operation of the step
            return None
        return _JointPlan(simulate(plan, step.costs).step_ms, selection, step.folded(plan.actions))


def _ordered(
    graph: StepGraph, costs: Costs, chosen: Mapping[int, Configuration], is_reordered: bool
) -> tuple[Sequence[int], StepGraph, Costs]:
    """Return an order of a step, and the step in it with the configurations, the same for each budget."""
    key = id(graph), id(costs), is_reordered, *((each, id(own)) for each, own in chosen.items())
    entry = _ORDERED.get(key)
    if entry is None:  # while the parts are kept, no others have their numbers
        order: Sequence[int] = range(len(graph.operations))
        found = order, graph, costs.with_configurations(chosen)
        if is_reordered:
            order = lower_order(graph, found[2])
            other = UnfoldedStep(graph, found[2], [*map(run, order)])
            found = order, other.graph, other.costs
        entry = _ORDERED[key] = (graph, costs, chosen), found
    return entry[1]


_ORDERED: BoundedDict[tuple[object, ...], tuple[object, tuple[Sequence[int], StepGraph, Costs]]] = BoundedDict(4)


def _searches(graph: StepGraph, costs: Costs, cap: int) -> Iterator[_JointSearch]:
    """Yield searches in the program's order, in another one, and with less workspace, where those need fewer bytes."""
    fastest, smallest = fitting(graph, costs, cap), fitting(graph, costs, 0)
    needed: float = inf
    for chosen, is_reordered in ((fastest, False), (fastest, True), (smallest, True)):
        search = _JointSearch(graph, costs, cap, chosen, is_reordered)
        least = needed_peak(search.graph, search.costs)
        if least < needed and measure_liveness(search.graph, search.costs).floor_bytes <= cap:
            needed = least
            yield search
        if cap > _AMPLE * needed:
            break
