"""Choice: the plan of a step, by one policy or by the fastest of all, that keeps a budget in its allocator, too.

A plan keeps a budget in bytes that are alive. PyTorch's allocator takes more, because holes between tensors are lost.
So each plan is replayed in one block that the allocator takes at once. Where a tensor finds no hole, storages move
within the block. One that does not fit even so is planned again for fewer bytes, until it fits. An allocator with a
bound can also give empty pages back in each step. All this takes time, with which such a plan competes.

A policy plans only when its bound, the least time that the step takes by it, is below the times of all known plans.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from math import inf

from ucudnn.errors import BudgetError
from ucudnn.memory.allocator.headroom import AllocatorRoom
from ucudnn.memory.allocator.replay import ReplayedReturns
from ucudnn.memory.planner.bounds import StepBounds
from ucudnn.memory.planner.condensed import planned
from ucudnn.memory.planner.least import holds_host, least_paged, near
from ucudnn.memory.planner.search import PlanCandidate, PlanSearch, uncollected
from ucudnn.memory.plans.plan import MemoryPlan, drafts
from ucudnn.memory.policies.catalog import MemoryPolicy, chosen_policies, find_policy
from ucudnn.memory.policies.foreign import ForeignPolicy
from ucudnn.memory.policies.joint import JointPolicy
from ucudnn.memory.simulation.early_collectives import with_early_collectives
from ucudnn.memory.simulation.late_copies import with_late_copies
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.budget import below_floor, check_budget, with_need
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.units import bytes_down, bytes_up

_MOST_TRIES = 16  # plans of one policy that are replayed
_MOST_FEW_TRIES = 3  # the same of one that fits, though storages move, and of 'joint', which looks at many for each
_LEAST_STEP, _MOST_STEP = 0.004, 0.02  # shares of its peak by which the next plan has less
_RETURN_BYTES_PER_MS = 2**30 / 5.4  # an H200 took 4.4 ms for each GiB of a 2-D U-Net, 6.5 of a VGG-16
_DEAR = 1.1  # times the time of a plan that needs what is spared, beyond which it is better than one that does not
_STEP = 0.4  # share of what is too much by which the next plan has less
_LITTLE = 1e-3  # share of a step's time that moves may take without a look at other plans
_GAIN = 0.995  # share of the time of a plan of other policies above which 'joint' is not looked at
_SAME = 1 - 1e-9  # share of a time beyond which a difference is no rounding


def returns_ms(returns: ReplayedReturns) -> float:
    """Return how long pages take in each step that go back to the driver and are mapped again, in milliseconds."""
    return returns.returned_bytes / _RETURN_BYTES_PER_MS if returns.fits else inf


def make_plan(
    graph: StepGraph,
    costs: Costs,
    budget: int | None,
    policy: str | MemoryPolicy,
    room: AllocatorRoom | None = None,
    host_bytes: int | None = None,
    search: PlanSearch | None = None,
) -> MemoryPlan:
    """Return the plan of a policy, or the fastest one of all policies that keep the budget for 'auto'.

    Plans with which the allocator keeps its room only if it gives empty pages back to the driver in each step compete
    with the time that this takes. Where a tensor finds no room even so, the plan counts that comes closest.

    Args:
        graph: the step.
        costs: its costs.
        budget: most bytes that are alive; None bounds nothing.
        policy: name of a policy, a policy, or 'auto'.
        room: what the allocator may take; None does not look at it.
        host_bytes: most bytes of the host that plans may hold; plans that hold more count only where there is no other.
            None bounds nothing.
        search: bounds the time of the search, and is told what it finds; None bounds nothing. When the time is over,
            the best plan so far counts that keeps the budget and the room, or the first one that does.

    Raises:
        BudgetError: if no plan keeps the budget, or the room of the allocator even with empty pages given back.
        InvalidValueError: if there is no such policy.
    """
    if policy == "auto" and budget is None and not _has_faster(costs):
        return with_early_collectives(find_policy("stock").plan(graph, costs, None), costs)
    policies, search = chosen_policies(policy), search or PlanSearch()
    choose = partial(_Choice, graph, costs, budget, room, host_bytes)
    with uncollected(), nullcontext() if isinstance(policies[0], ForeignPolicy) else drafts():
        found = _best(choose, policies, search)
    return replace(found)  # which checks it


def _best(choose: "Callable[[PlanSearch], _Choice]", policies: list[MemoryPolicy], search: PlanSearch) -> MemoryPlan:
    """Return the plan that `make_plan` returns; raises as that does."""
    choice = choose(search)
    slow = [each for each in policies[1:] if choice.room is not None and isinstance(each, JointPolicy)]
    for number, each in enumerate(each for each in policies if each not in slow):
        choice.add(number, each)
        if len(policies) > 1 and not number and choice.fits and not _has_faster(choice.costs):
            break  # nothing is faster than a step of which nothing is moved or recomputed
    try:
        found = choice.best()
    except BudgetError as error:
        for each in slow if choice.has_budget else ():
            with suppress(BudgetError):
                return _best(choose, [each], PlanSearch())
        raise choice.with_room(error, policies) from None
    for each in slow:
        search.other_ms = choice.whole_ms(found)
        other = choose(search)
        if not search.over and other.is_faster(each):
            with suppress(BudgetError):
                found = min(found, other.best(), key=choice.whole_ms)
    return found


def _has_faster(costs: Costs) -> bool:
    """Return whether a convolution is faster in one of its configurations than as the program computes it."""
    return any(each.time_ms < _SAME * costs.time_ms[operation] for operation, each in costs.fastest.items())


class _Choice:
    """Plans of some policies, of which the fastest is looked at first."""

    def __init__(
        self,
        graph: StepGraph,
        costs: Costs,
        budget: int | None,
        room: AllocatorRoom | None,
        host_bytes: int | None,
        search: PlanSearch,
    ) -> None:
        self._graph, self.costs, self._budget, self.room, self._search = graph, costs, budget, room, search
        self._host_bytes, self._bounds, self._least_ms = host_bytes, StepBounds(graph, costs), inf
        self._gains_ms = inf if search.other_ms is None else _GAIN * search.other_ms
        self._waiting, self._postponed = list[PlanCandidate](), list[PlanCandidate]()
        self._too_much_host = list[PlanCandidate]()
        self._unplaced = list[PlanCandidate]()  # those that run in no block that leaves what is spared
        self._pushed = set[tuple[int, float, int]]()
        self._refused: list[tuple[MemoryPolicy, BudgetError]] = []
        self._policies: list[MemoryPolicy] = []

    @property
    def has_budget(self) -> bool:
        """Whether the budget is not below the floor."""
        return self._budget is None or self._budget >= measure_liveness(self._graph, self.costs).floor_bytes

    def whole_ms(self, plan: MemoryPlan) -> float:
        """Return how long a step takes by a plan, with pages that go back to the driver in each step."""
        step_ms = simulate(plan, self.costs).step_ms
        if self.room is None or self.room.compaction(plan, self.costs) is not None:
            return step_ms
        return step_ms + returns_ms(self.room.returns(plan, self.costs))

    def add(self, number: int, policy: MemoryPolicy) -> None:
        """Add a policy. It plans when nothing that is known can be faster than it."""
        self._policies.append(policy)
        least_ms = self._bounds.least_ms(policy, self._budget)
        step_ms = max(least_ms, sum(self.costs.issue_ms))
        self._least_ms = min(self._least_ms, step_ms)
        heappush(self._waiting, PlanCandidate(step_ms, least_ms, number, 0, 0, policy, None))

    def _next(self) -> PlanCandidate | None:
        """Return the fastest plan that no policy can beat, or of those known when time is over; None without one."""
        while self._waiting or self._postponed:
            if not self._waiting:  # none of the plans that were known has room
                self._waiting, self._postponed = self._postponed, []
            candidate = heappop(self._waiting)
            if candidate.plan is None and self._search.ends(has_plan=self._best() is not None):
                self._postponed.append(candidate)
            elif candidate.plan is None:
                self._plan(candidate)
            elif candidate.bare_ms is not None:
                # A plan that runs in no block takes the time of the pages that go back, too, if it runs at all.
                pause_ms = self._returns_ms(candidate.plan)
                priced = candidate._replace(time_ms=candidate.bare_ms + pause_ms, bare_ms=None, is_priced=True)
                if pause_ms < inf:
                    heappush(self._waiting, priced)
            else:
                return candidate
        return None

    def _best(self, tight: PlanCandidate | None = None, *, placed: bool = False) -> PlanCandidate | None:
        """Return the fastest plan so far, and tell of it; None without one. Of those that have room, if it is asked."""
        known = [each for each in (*self._waiting, tight) if each is not None and each.plan is not None]
        if placed:
            known = [each for each in known if each.is_priced or each is tight]
        best = min(known, key=lambda each: each.time_ms, default=None)
        if best is not None and best.plan is not None:
            is_placed = placed or self.room is None or best.is_priced
            self._search.found(best.plan.policy, best.time_ms, self._least_ms, is_placed=is_placed)
        return best

    def _plan(self, candidate: PlanCandidate) -> None:
        policy, tries = candidate.policy, 1
        if self._budget is not None and self.room is not None and isinstance(policy, JointPolicy):
            most = self._budget - self.room.lost_bytes  # more does not fit side by side
            spared = int((1 - _LEAST_STEP) * (most - self.room.spare_bytes))  # pages of small tensors take some
            budgets = most, spared, int((1 - _MOST_STEP) * spared)  # with less it may find a faster plan
            for budget in budgets if self._search.other_ms is None else budgets[1:]:
                with suppress(BudgetError):
                    plan = planned(policy, self._graph, self.costs, budget)
                    tries = _MOST_FEW_TRIES - (budget < spared)
                    found = self._candidate(candidate.number, policy, plan, tries=tries)
                    self._push(found)
                    if found.time_ms > self._gains_ms:
                        return
        if tries > 1:
            return
        try:
            plan = planned(policy, self._graph, self.costs, self._budget)
        except BudgetError as error:
            self._refused.append((policy, error))
        else:
            self._push(self._candidate(candidate.number, policy, plan, tries=tries))

    def is_faster(self, policy: MemoryPolicy) -> bool:
        """Add a policy, and return whether its plan, wherever its tensors lie, is faster than one known beside it."""
        self.add(0, policy)
        if (candidate := self._next()) is None:
            return False
        heappush(self._waiting, candidate)
        return candidate.time_ms <= self._gains_ms

    @property
    def fits(self) -> bool:
        """Whether there is a plan, and the fastest one fits into the allocator's room although nothing moves."""
        if (candidate := self._next()) is None or candidate.plan is None:
            return False
        heappush(self._waiting, candidate)
        if self.room is None:
            return True
        found = self.room.widest(candidate.plan, self.costs)
        if found is not None:
            return not found.moved_bytes
        return not self._over(candidate.plan) and not self._returns_ms(candidate.plan)

    def best(self) -> MemoryPlan:
        """Return the fastest plan that fits, or one that fits with empty pages given back, or without what is spared.

        Raises:
            BudgetError: if there is none.
        """
        looked_at: list[MemoryPlan] = []
        candidate = self._next() or min(self._too_much_host, default=None)  # whoever takes the host's memory refuses
        if candidate is None:
            raise self._refusal()
        while candidate is not None and candidate.plan is not None:
            plan, room = candidate.plan, self.room
            is_dear = any(candidate.time_ms > _DEAR * each.time_ms for each in self._unplaced)
            if is_dear and (tight := self._tight()) is not None and candidate.time_ms > _DEAR * tight.time_ms:
                break
            if room is None or candidate.is_priced:
                return self._laid_out(plan)
            layout = room.widest(plan, self.costs)
            over = 0 if layout is not None else self._over(plan)
            if layout is not None:
                pause_ms = room.moves_ms(layout)
            else:
                pause_ms = over / _RETURN_BYTES_PER_MS or self._returns_ms(plan)  # a guess where it is over
            if not over and pause_ms <= _LITTLE * candidate.time_ms:
                return self._laid_out(plan)
            if pause_ms < inf:
                bare_ms = candidate.time_ms if over else None
                later = candidate._replace(time_ms=candidate.time_ms + pause_ms, bare_ms=bare_ms, is_priced=not over)
                heappush(self._waiting, later)
            self._unplaced += [candidate] if layout is None else []
            looked_at.append(plan)
            candidate = self._following(candidate, over)
        if (tight := self._tight()) is not None and tight.plan is not None:
            return self._laid_out(tight.plan)
        closest = min(looked_at, key=self._paged_over)
        return self._laid_out(self._closest(self._paged_over(closest), closest))

    def _tight(self) -> PlanCandidate | None:
        """Return the fastest plan that needs what is spared; it takes long, so nobody asks before it counts."""
        tight: PlanCandidate | None = None
        for each in self._unplaced:
            if self.room is not None and each.plan is not None and (tight is None or each.time_ms < tight.time_ms):
                tight = tight if self.room.spending(each.plan, self.costs) is None else each
        self._unplaced = [] if tight is None else [tight]
        return tight

    def _following(self, candidate: PlanCandidate, over: int) -> PlanCandidate | None:
        """Return what is looked at after a plan; None where nothing is left. When time is over, the best with room."""
        best = self._best(self._tight() if self._search.over else None, placed=True)
        if self._search.ends(has_plan=best is not None) and best is not None:
            return best._replace(is_priced=True)
        self._tighten(candidate, over)
        return self._next()

    def _laid_out(self, plan: MemoryPlan) -> MemoryPlan:
        """Return a plan with what moves in the smallest block that is worth it."""
        found = None if self.room is None else self.room.compaction(plan, self.costs)
        return replace(plan, budget=self._budget, moves=plan.moves if found is None else found.moves)

    def _refusal(self) -> BudgetError:
        """Return what refuses a budget that no policy keeps: the floor, if it is below that, else the least need."""
        try:
            check_budget(self._graph, self.costs, self._budget)
        except BudgetError as floor:
            plans = [
                near(policy, self._graph, self.costs, refused.required_bytes)
                for policy, refused in self._refused
                if refused.required_bytes < floor.required_bytes
            ]
            return below_floor(floor, [(each.budget, each.policy) for each in plans if each is not None])
        return min((error for _, error in self._refused), key=lambda error: error.required_bytes)

    def _closest(self, beyond: int, plan: MemoryPlan) -> MemoryPlan:
        """Return a plan of the fewest pages, which the room has; one is given with what it takes beyond that.

        Raises:
            BudgetError: if the room has too few for each. It names what the closest steady plan takes, because that is
                looked at within a larger budget, too: plans of this search are those of this budget alone. Where
                compute may not wait, it names the latter, because plans that wait are looked at next.
        """
        if not beyond:
            return plan
        assert self.room is not None
        most = self.room.tensor_bytes
        needed = most + beyond
        if not self._search.gives_up:
            needed, found = least_paged(self._graph, self.costs, self.room, self._policies, self._host_bytes)
            fits = self._budget is None or found is None or simulate(found, self.costs).peak_bytes <= self._budget
            if found is not None and fits and needed <= most:
                return found
        raise BudgetError(
            f"tensors of {self._graph.name} do not fit side by side into {bytes_down(most)}: the closest plan takes"
            f" {bytes_up(needed)} of pages, holes between tensors included: raise the budget to that",
            kernel="",
            limit_bytes=most,
            required_bytes=needed,
        )

    def with_room(self, refused: BudgetError, policies: Sequence[MemoryPolicy]) -> BudgetError:
        """Return what refuses a budget in live bytes, with what the allocator's room must be, holes included."""
        if self.room is None:
            return refused
        needed, found = least_paged(self._graph, self.costs, self.room, policies, self._host_bytes)
        if found is None or needed <= refused.required_bytes:
            return refused
        pages = f"; its tensors take {bytes_up(needed)} of pages, holes between them included"
        return with_need(refused, pages, needed)

    def _returns_ms(self, plan: MemoryPlan) -> float:
        """Return how long pages take that go back in each step, so that a plan leaves what is spared."""
        assert self.room is not None
        return returns_ms(self.room.returns(plan, self.costs, self.room.spare_bytes))

    def _over(self, plan: MemoryPlan) -> int:
        """Return about how many bytes the allocator takes for a plan beyond the room, without what is spared."""
        assert self.room is not None
        most = self.room.tensor_bytes - self.room.spare_bytes
        if self.room.in_one_block:  # of which holes are no more than a little
            return max(self.room.bound_bytes(plan, self.costs) - most, int(_LEAST_STEP * most))
        return max(0, self.room.least_taken(plan, self.costs) - most)

    def _paged_over(self, plan: MemoryPlan) -> int:
        """Return how much more than its room the allocator takes for a plan although it gives empty pages back."""
        assert self.room is not None
        return max(0, self.room.paged_bytes(plan, self.costs) - self.room.tensor_bytes)

    def _tighten(self, candidate: PlanCandidate, over: int) -> None:
        """Let a policy plan again for fewer bytes, if it can; for its least budget where that is nearer."""
        assert self.room is not None
        few = not over or isinstance(candidate.policy, JointPolicy)
        if self._search.gives_up or candidate.tries >= (_MOST_FEW_TRIES if few else _MOST_TRIES):
            return
        least, most = (int(candidate.peak_bytes * share) for share in (_LEAST_STEP, _MOST_STEP))
        less = over if self.room.in_one_block and over else min(max(int(over * _STEP), least), most)
        plan = near(candidate.policy, self._graph, self.costs, candidate.peak_bytes - less)
        if plan is not None:
            found = self._candidate(candidate.number, candidate.policy, plan, tries=candidate.tries + 1)
            if found.peak_bytes < candidate.peak_bytes:
                self._push(found)

    def _candidate(self, number: int, policy: MemoryPolicy, plan: MemoryPlan, *, tries: int) -> PlanCandidate:
        plan = plan if self.room is None else with_late_copies(plan, self.costs)[0]
        plan = with_early_collectives(plan, self.costs)
        found = simulate(plan, self.costs)
        return PlanCandidate(found.step_ms, found.time_ms, number, tries, found.peak_bytes, policy, plan)

    def _push(self, candidate: PlanCandidate) -> None:
        assert candidate.plan is not None
        same = candidate.number, candidate.time_ms, candidate.peak_bytes
        if same in self._pushed:
            return
        self._pushed.add(same)
        fits_host = holds_host(simulate(candidate.plan, self.costs), self._host_bytes)
        heappush(self._waiting if fits_host else self._too_much_host, candidate)
