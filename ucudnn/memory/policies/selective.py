"""Policy 'checkpoint-selective': drops single activations, those first that are made again in the least time.

Blocks make everything again that they hold, convolutions among it. But most bytes of a convolutional network are
outputs of operations that are bounded by memory, such as batch normalization and activation functions, and to make one
of them again takes little time. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
2022, select such activations by hand. Here the step's times select them, as in Jain et al., "Checkmate: Breaking the
Memory Wall with Optimal Tensor Rematerialization", 2020, but greedily: as long as the peak is too high, the activation
is dropped next that lies there and costs the least time for each byte, with all that must run again for it by then.
What the budget turns out not to need stays, the costliest first.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from ucudnn.memory.budget import check_budget, over_budget
from ucudnn.memory.costs import Costs
from ucudnn.memory.graph import StepGraph
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.plans.remakes import DroppedActivations, Remakes

_NAME = "checkpoint-selective"
_AT_ONCE = 8  # dropped activations of a large step for each that is dropped at once beside another one
_MOST_THINNED = 64  # dropped activations that are looked at once more
_MOST_EXACT = 500  # activations up to which all that runs again is counted for each that is looked at


class SelectivePolicy:
    """Recomputation of single activations, in the program's order."""

    def plan(self, graph: StepGraph, costs: Costs, budget: int | None) -> MemoryPlan:
        """Return the plan of a step; without a budget, for the least peak that the search finds.

        Raises:
            BudgetError: if no selection that was looked at keeps the budget.
        """
        check_budget(graph, costs, budget)
        activations = DroppedActivations(graph, costs)
        search = ActivationSearch(activations, sum(costs.time_ms[: graph.backward_begins]))
        least = min(search.selections(budget), key=lambda each: each.peak_bytes)
        if budget is not None and least.peak_bytes > budget:
            raise over_budget(_NAME, graph, least.peak_bytes, budget)
        chosen = search.thinned(least, least.peak_bytes if budget is None else budget)
        actions = activations.actions(chosen.remakes)
        return MemoryPlan(policy=_NAME, graph=graph, actions=actions, budget_bytes=budget)


class ActivationSelection(NamedTuple):
    """Dropped activations.

    Attributes:
        remakes: how they come back.
        brief: those among them that stay only where they are read.
        peak_bytes: its peak.
        place: the operation at which the peak is, or before which it is, while others run again.
    """

    remakes: Remakes
    brief: frozenset[int]
    peak_bytes: int
    place: int


class ActivationSearch:
    """Selects what is dropped. What is selected next does not depend on the budget, which only says when to end.

    So a budget that is refused is told the least one, and that one is kept.

    Args:
        activations: the activations that may be dropped.
        most_ms: the most time that may run again: that of forward, beyond which blocks take less.
    """

    def __init__(self, activations: DroppedActivations, most_ms: float) -> None:
        self._activations = activations
        self._most_ms = most_ms
        self._is_exact = len(activations.spans) <= _MOST_EXACT
        self._ratios: dict[int, float] = {}  # milliseconds for each byte, when an activation was last looked at
        self._kept = set[int]()  # that turned out to be impossible to make again

    def selections(self, budget: int | None) -> Iterator[ActivationSelection]:
        """Yield selections that grow, until the budget is kept or nothing is left that lowers the peak."""
        nothing = frozenset[int]()
        selection = self.selection(nothing, nothing)
        while selection is not None and selection.remakes.time_ms <= self._most_ms:
            yield selection
            if budget is not None and selection.peak_bytes <= budget:
                return
            selection = self._next(selection, budget)

    def thinned(self, selection: ActivationSelection, budget: int) -> ActivationSelection:
        """Return a selection without what the budget does not need, the costliest first."""
        times = {each: self._spared_ms(selection, each) for each in selection.remakes.dropped}
        for each in sorted(times, key=lambda each: (-times[each], each))[:_MOST_THINNED]:
            fewer = self._without(selection, each)
            if fewer is not None and fewer.peak_bytes <= budget:
                selection = fewer if fewer.remakes.time_ms <= selection.remakes.time_ms else selection
        return selection

    def selection(self, dropped: frozenset[int], brief: frozenset[int]) -> ActivationSelection | None:
        """Return a selection with its peak; None where an activation cannot be made again."""
        return self._selection(self._activations.remakes(dropped, brief), brief)

    def _without(self, selection: ActivationSelection, storage: int) -> ActivationSelection | None:
        return self.selection(selection.remakes.dropped - {storage}, selection.brief - {storage})

    def _spared_ms(self, selection: ActivationSelection, storage: int) -> float:
        """Return the time that an activation spares if it stays; in a large step, what makes it alone."""
        if not self._is_exact:
            return self._activations.remake_ms(storage, selection.remakes) or 0.0
        fewer = self._activations.remakes(selection.remakes.dropped - {storage}, selection.brief - {storage})
        return 0.0 if fewer is None else selection.remakes.time_ms - fewer.time_ms

    def _cheapest(self, selection: ActivationSelection) -> list[int]:
        """Return the next activations to drop, or to make brief: the cheapest for each byte of those at the peak.

        In a large step the more are taken at once, the more are dropped, because a selection takes longer to look at.
        """
        wanted = 1 if self._is_exact else 1 + len(selection.remakes.dropped) // _AT_ONCE
        waiting = [(self._ratios.get(each, 0.0), each) for each in self._at_peak(selection)]
        heapify(waiting)
        looked_at, picked = set[int](), list[int]()
        while waiting and len(picked) < wanted:
            _, storage = heappop(waiting)
            if storage in looked_at:
                picked.append(storage)
                continue
            looked_at.add(storage)
            longer_ms = self._longer_ms(selection, storage)
            if longer_ms is not None:
                self._ratios[storage] = longer_ms / self._activations.sizes[storage]
                heappush(waiting, (self._ratios[storage], storage))
        return picked

    def _longer_ms(self, selection: ActivationSelection, storage: int) -> float | None:
        """Return the time that dropping one more activation adds, or making it brief; None if that is impossible.

        In a large step it is that of the activation alone, without what others need from then on.
        """
        if not self._is_exact:
            return self._activations.remake_ms(storage, selection.remakes)
        remakes, _ = self._remakes_with(selection, [storage])
        return None if remakes is None else remakes.time_ms - selection.remakes.time_ms

    def _at_peak(self, selection: ActivationSelection) -> Iterator[int]:
        """Yield the activations that are at the peak although nothing reads them there."""
        made, place = selection.remakes.made, selection.place
        for storage, (last, first) in self._activations.spans.items():
            since = made[storage] - 1 if storage in made else last
            if since < place < first and storage not in selection.brief and storage not in self._kept:
                yield storage

    def _next(self, selection: ActivationSelection, budget: int | None) -> ActivationSelection | None:
        """Return a selection with more activations, no more than the budget needs; None if none is left."""
        while picked := self._cheapest(selection):
            larger = self._with(selection, picked)
            if larger is None and len(picked) > 1:  # one of them is impossible beside the others
                picked = picked[:1]
                larger = self._with(selection, picked)
            if larger is None:
                self._kept.update(picked)
            elif budget is None or larger.peak_bytes > budget:
                return larger
            else:
                return self._with_fewest(selection, picked, larger, budget)
        return None

    def _with_fewest(
        self, selection: ActivationSelection, picked: Sequence[int], larger: ActivationSelection, budget: int
    ) -> ActivationSelection:
        """Return a selection with the first ones of some activations that keep the budget."""
        low, high = 0, len(picked)
        while high - low > 1:
            middle = (low + high) // 2
            found = self._with(selection, picked[:middle])
            if found is not None and found.peak_bytes <= budget:
                high, larger = middle, found
            else:
                low = middle
        return larger

    def _with(self, selection: ActivationSelection, picked: Sequence[int]) -> ActivationSelection | None:
        return self._selection(*self._remakes_with(selection, picked))

    def _remakes_with(
        self, selection: ActivationSelection, picked: Sequence[int]
    ) -> tuple[Remakes | None, frozenset[int]]:
        """Return how activations come back if more are dropped, and the brief ones: what is picked again joins them."""
        dropped, brief = selection.remakes.dropped, selection.brief | (selection.remakes.dropped & {*picked})
        return self._activations.remakes(dropped | {*picked}, brief), brief

    def _selection(self, remakes: Remakes | None, brief: frozenset[int]) -> ActivationSelection | None:
        """Return a selection with its peak; None where an activation cannot be made again."""
        return None if remakes is None else ActivationSelection(remakes, brief, *self._activations.peak(remakes))
