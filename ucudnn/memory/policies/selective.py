"""Policy 'checkpoint-selective': drops single activations, those first that are recomputed in the least time.

Blocks make everything again that they hold, convolutions among it. But most bytes of a convolutional network are
outputs of operations that are bounded by memory, such as batch normalization and activation functions, and to make one
of them again takes little time. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
2022, select such activations by hand. Here the step's times select them, as in Jain et al., "Checkmate: Breaking the
Memory Wall with Optimal Tensor Rematerialization", 2020, but greedily: as long as the peak is too high, the activation
is dropped next that lies there and costs the least time for each byte, with all that must run again for it by then.
What the budget turns out not to need stays, the costliest first.
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop
from itertools import count
from math import inf
from typing import Any, NamedTuple

from ucudnn.bounded import BoundedDict
from ucudnn.memory.plans.dropped import DroppedActivations, Recomputed
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.step.budget import check_budget, check_need
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph

_NAME = "checkpoint-selective"
_LOOKED_AT = 16  # kinds that are looked at anew before one of them is dropped, or more if a cheaper one may follow
_MOST_SINGLE = 400  # activations of a small step, in which each is a kind of its own
_MOST_UNLIKE = 1000  # the same where few layers repeat


class SelectivePolicy:
    """Recomputation of single activations, in the program's order."""

    def plan(self, graph: StepGraph, costs: Costs, budget: int | None) -> MemoryPlan:
        """Return the plan of a step; without a budget, for the least peak that the search finds.

        Raises:
            BudgetError: if no selection that was looked at keeps the budget.
        """
        check_budget(graph, costs, budget)
        search = search_of(graph, costs)
        least = min(search.selections(budget), key=lambda each: each.peak_bytes)
        check_need(_NAME, graph, least.peak_bytes, budget)
        chosen = search.thinned(least, least.peak_bytes if budget is None else budget)
        actions = search.activations.actions(chosen.recomputed)
        return MemoryPlan(policy=_NAME, graph=graph, actions=actions, budget=budget)


def search_of(graph: StepGraph, costs: Costs) -> "ActivationSearch":
    """Return the search of a step, which knows what it has selected for other budgets, as for those of `auto`."""
    key = id(graph), id(costs)
    entry = _SEARCHES.get(key)
    if entry is None:  # while both are kept, no others have their numbers
        search = ActivationSearch(DroppedActivations(graph, costs), sum(costs.time_ms[: graph.backward_begins]))
        entry = _SEARCHES[key] = (graph, costs), search
    return entry[1]


class ActivationSelection(NamedTuple):
    """Dropped activations.

    Attributes:
        brief: those among them that stay only where they are read.
        place: the operation at which the peak is, or before which it is, while others run again.
    """

    recomputed: Recomputed
    brief: frozenset[int]
    peak_bytes: int
    place: int


class ActivationSearch:
    """Selects what is dropped. What is selected next does not depend on the budget, which only says when to end.

    So a budget that is refused is told the least one, and that one is kept. A step of many layers has few kinds of
    activations. The search takes all of a kind that lie at the peak at once, so its cost grows with kinds. Of the last
    kind it takes the fewest that keep the budget. In a small step, or one in which few layers repeat, it takes one
    activation at a time.

    Args:
        activations: the activations that may be dropped.
        most_ms: the most time that may run again: that of forward, beyond which blocks take less.
    """

    def __init__(self, activations: DroppedActivations, most_ms: float) -> None:
        self.activations = activations
        self._most_ms = most_ms
        count, kinds = len(activations.spans), len({*activations.kinds.values()})
        self._is_small = count <= _MOST_SINGLE or (count <= _MOST_UNLIKE and count <= 2 * kinds)
        self._kept = set[int]()  # that turned out to be impossible to recompute
        self._found: list[ActivationSelection] = []  # the selections without a budget, as far as one was asked for
        self._is_complete = False
        self._ratios: dict[tuple[int, bool], float] = {}  # milliseconds for each byte of kinds, dropped ones apart

    def selections(self, budget: int | None) -> Iterator[ActivationSelection]:
        """Yield selections that grow, until the budget is kept or nothing is left that lowers the peak."""
        number, before = 0, None
        while (selection := self._number(number)) is not None:
            if budget is not None and selection.peak_bytes <= budget:
                if before is not None:  # the fewest of what is dropped beside that one are enough
                    _, selection = self._between(before, selection, lambda each: each.peak_bytes <= budget)
                yield selection
                return
            yield selection
            number, before = number + 1, selection

    def thinned(self, selection: ActivationSelection, budget: int, away: Any = 0) -> ActivationSelection:
        """Return a selection without what the budget does not need beside bytes that are away, the costliest first."""
        groups: dict[int, list[int]] = {}
        for storage in sorted(selection.recomputed.dropped):
            groups.setdefault(self._kind(storage), []).append(storage)
        live = self.activations.live(selection.recomputed) - away
        for group in sorted(groups.values(), key=lambda each: self._spared(selection, each)):
            if self.activations.least_if_kept(group[-1], selection.recomputed, live) > budget:
                continue
            fewer = self._without(selection, group[-1:], budget, away)
            if fewer is None:
                continue
            low, high = 1, len(group) + 1  # so many of the last ones stay, and so many do not
            while high - low > 1:
                middle = (low + high) // 2
                found = self._without(selection, group[-middle:], budget, away)
                low, high, fewer = (low, middle, fewer) if found is None else (middle, high, found)
            selection = fewer
            live = self.activations.live(selection.recomputed) - away
        return selection

    def selection(self, dropped: frozenset[int], brief: frozenset[int]) -> ActivationSelection | None:
        """Return a selection with its peak; None where an activation cannot be recomputed."""
        return self._selection(self.activations.recomputed(dropped, brief), brief)

    def _number(self, number: int) -> ActivationSelection | None:
        """Return a selection of those without a budget; None behind the last one."""
        while len(self._found) <= number and not self._is_complete:
            nothing = frozenset[int]()
            found = self._next(self._found[-1]) if self._found else self.selection(nothing, nothing)
            if found is not None and found.recomputed.time_ms > self._most_ms:
                before = self._found[-1] if self._found else None
                found = before and self._between(before, found, lambda each: each.recomputed.time_ms > self._most_ms)[0]
                found = None if found is before else found
                self._is_complete = True
            self._is_complete |= found is None
            self._found += [] if found is None else [found]
        return self._found[number] if number < len(self._found) else None

    def _kind(self, storage: int) -> int:
        return storage if self._is_small else self.activations.kinds[storage]

    def _spared(self, selection: ActivationSelection, group: Sequence[int]) -> float:
        """Return the time that activations add, for each byte that they save if they are many; below zero."""
        now = selection.recomputed
        fewer = self.activations.recomputed(now.dropped.difference(group), selection.brief.difference(group))
        spared = 0.0 if fewer is None else now.time_ms - fewer.time_ms
        return -spared if self._is_small else -spared / self._bytes(group)

    def _bytes(self, group: Sequence[int]) -> int:
        return sum(self.activations.sizes[each] for each in group)

    def _without(
        self, selection: ActivationSelection, group: Sequence[int], budget: int, away: Any
    ) -> ActivationSelection | None:
        """Return a selection in which some activations stay; None if it takes more than the budget, or longer."""
        brief = selection.brief.difference(group)
        kept = self.activations.recomputed(selection.recomputed.dropped.difference(group), brief)
        found = None if kept is None or kept.time_ms > selection.recomputed.time_ms else kept
        fewer = self._selection(found, brief, away)
        return fewer if fewer is not None and fewer.peak_bytes <= budget else None

    def _cheapest(self, selection: ActivationSelection) -> list[int]:
        """Return the kind to drop next, or to make brief: that of the least time for each byte of those at the peak.

        What a kind takes changes as others are dropped. So the cheapest ones are looked at anew, and no others.
        """
        made, place = selection.recomputed.made, selection.place
        groups: dict[tuple[int, bool], list[int]] = {}  # those at the peak that nothing reads there, dropped ones apart
        for storage, (last, first) in self.activations.spans.items():
            is_there = (made[storage] - 1 if storage in made else last) < place < first
            if is_there and storage not in selection.brief and storage not in self._kept:
                groups.setdefault((self._kind(storage), storage in made), []).append(storage)
        least = 1 if self._is_small else _LOOKED_AT
        waiting = [(self._ratios.get(key, 0.0), key) for key in groups]
        heapify(waiting)
        best: tuple[float, tuple[int, bool]] | None = None
        for number in count():
            if not waiting or (best is not None and number >= least and best < waiting[0]):
                break
            _, key = heappop(waiting)
            longer_ms = self._longer_ms(selection, groups[key])
            if longer_ms is not None:
                self._ratios[key] = longer_ms / self._bytes(groups[key])
                best = min(best or (inf, key), (self._ratios[key], key))
        return [] if best is None else groups[best[1]]

    def _longer_ms(self, selection: ActivationSelection, group: list[int]) -> float | None:
        """Return the time that dropping a kind adds, or making it brief; None if that is impossible.

        What cannot be recomputed leaves the group.
        """
        recomputed, _ = self._more(selection, group)
        if recomputed is None:
            possible = [each for each in group if self._more(selection, [each])[0] is not None]
            self._kept.update({*group} - {*possible})
            group[:] = possible
            recomputed = self._more(selection, group)[0] if possible else None
            if recomputed is None and possible:  # they are impossible beside each other
                del group[1:]
                recomputed = self._more(selection, group)[0]
        return None if recomputed is None else recomputed.time_ms - selection.recomputed.time_ms

    def _next(self, selection: ActivationSelection) -> ActivationSelection | None:
        """Return a selection with one more kind; None if none is left."""
        while picked := self._cheapest(selection):
            larger = self._with(selection, picked)
            # Where a whole run of layers is gone, it comes back at once. Each second one lowers the peak more then.
            while larger is not None and len(picked) > 1:
                sparser = self._with(selection, picked[::2])
                if sparser is None or sparser.peak_bytes >= larger.peak_bytes:
                    break
                picked, larger = picked[::2], sparser
            if larger is not None:
                return larger
            self._kept.update(picked)
        return None

    def _between(
        self,
        selection: ActivationSelection,
        larger: ActivationSelection,
        is_enough: Callable[[ActivationSelection], bool],
    ) -> tuple[ActivationSelection, ActivationSelection]:
        """Return the last selection that is not enough and the first one that is, between two, by halves."""
        picked = sorted(larger.recomputed.dropped - selection.recomputed.dropped | larger.brief - selection.brief)
        low, high, most = 0, len(picked), larger
        least = selection
        while high - low > 1:
            middle = (low + high) // 2
            found = self._with(selection, picked[:middle])
            if found is not None and is_enough(found):
                high, most = middle, found
            else:
                low, least = middle, least if found is None else found
        return least, most

    def _with(self, selection: ActivationSelection, picked: Sequence[int]) -> ActivationSelection | None:
        return self._selection(*self._more(selection, picked))

    def _more(self, selection: ActivationSelection, picked: Sequence[int]) -> tuple[Recomputed | None, frozenset[int]]:
        """Return how activations come back if more are dropped, and the brief ones: what is picked again joins them."""
        dropped, brief = selection.recomputed.dropped, selection.brief | (selection.recomputed.dropped & {*picked})
        return self.activations.recomputed(dropped | {*picked}, brief), brief

    def _selection(self, found: Recomputed | None, brief: frozenset[int], away: Any = 0) -> ActivationSelection | None:
        return None if found is None else ActivationSelection(found, brief, *self.activations.peak(found, away))


_SEARCHES: BoundedDict[tuple[int, int], tuple[object, ActivationSearch]] = BoundedDict(4)
