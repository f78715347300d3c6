"""Choice: the plan of a step, by one policy or by the fastest of all, that keeps a budget in its allocator, too.

A plan keeps a budget in bytes that are alive. PyTorch's allocator takes more, because holes between tensors are lost.
So each plan is replayed in one block that the allocator takes at once. Where a tensor finds no hole, storages move
within the block. One that does not fit even so is made again for fewer bytes, until it fits. An allocator with a bound
can also give empty pages back in each step. Both take time, with which such a plan competes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf
from typing import Any, NamedTuple, TypeVar, final

from ucudnn.bounded import BoundedDict
from ucudnn.errors import BudgetError
from ucudnn.memory.budget import check_budget
from ucudnn.memory.costs import Costs
from ucudnn.memory.graph import Role, StepGraph
from ucudnn.memory.liveness import measure_liveness
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.catalog import MemoryPolicy, chosen_policies, find_policy
from ucudnn.memory.pools.allocator_replay import ReplayedBytes, ReplayedReturns, replay_allocator, replay_returns
from ucudnn.memory.pools.block import BlockLimits
from ucudnn.memory.pools.compaction import Compaction, compact
from ucudnn.memory.pools.step_replay import ReplayedPlan
from ucudnn.memory.simulation.result import Simulation
from ucudnn.memory.simulation.simulator import predicted_bytes, simulate
from ucudnn.units import exact_bytes

_MOST_TRIES = 16  # plans of one policy that are replayed
_LEAST_STEP, _MOST_STEP = 0.004, 0.02  # shares of its peak by which the next plan has less
_RETURN_BYTES_PER_MS = 2**30 / 5.4  # an H200 took 4.4 ms for each GiB of a 2-D U-Net, 6.5 of a VGG-16
_WORTH = 0.01  # share of the step's time that storages may move only to let the block be smaller
_STEP = 0.4  # share of what is too much by which the next plan has less
_MOST_LATEST = 24  # findings, of which a plan has three
_Found = TypeVar("_Found")


@final
class _LatestPlans:
    """Knows what was found of the latest plans, because several questions about a plan need the same replay of it."""

    def __init__(self) -> None:
        self._found: BoundedDict[tuple[object, ...], tuple[object, Any]] = BoundedDict(_MOST_LATEST)

    def known(self, what: str, plan: MemoryPlan, costs: Costs, find: Callable[[MemoryPlan, Costs], _Found]) -> _Found:
        """Return what a function finds of a plan, whatever the plan's budget is and what moves in it."""
        parts = plan.graph, plan.actions, plan.configurations, plan.buffers, costs
        key = what, plan.scratch_buffer, *map(id, parts)
        entry = self._found.get(key)
        if entry is None:  # while the parts are kept, no others have their numbers
            entry = self._found[key] = parts, find(plan, costs)
        found: _Found = entry[1]
        return found


@dataclass(frozen=True, kw_only=True)
class AllocatorRoom:
    """How much PyTorch's allocator may take.

    Attributes:
        most_bytes: bytes that it may take for the step, the storages that exist before it included.
        lost_bytes: bytes of holes between those storages.
        spare_bytes: bytes of the room that a plan leaves, if there is one that does: what plans do not know of, such as
            kernels that are loaded later, and tensors that the allocator's bound refuses though pages are left.
        state_exists: whether the optimizer's state exists already.
        keeps_state: whether bytes can be kept for the optimizer's state until its first update.
        in_one_block: whether the allocator can take all bytes at once.
        fixed: storages that never move.
        frugal: the plan of the first step, where it takes less than the plan of those after it; None for theirs.
        copied_bytes_per_ms: bytes that the device copies within its memory in a millisecond.
    """

    most_bytes: int
    lost_bytes: int = 0
    spare_bytes: int = 0
    state_exists: bool = False
    keeps_state: bool = True
    in_one_block: bool = True
    fixed: frozenset[int] = frozenset()
    frugal: MemoryPlan | None = None
    copied_bytes_per_ms: float = 1.65e9  # of an H200, which reads and writes 3.3 TB/s
    _latest: _LatestPlans = field(default_factory=_LatestPlans, init=False, repr=False, compare=False)

    def taken_bytes(self, plan: MemoryPlan, costs: Costs) -> int:
        """Return what the allocator takes for a plan, in bytes; counted as `most_bytes`."""
        found = self.compaction(plan, costs)
        taken = self._replayed(plan, costs).reserved_bytes if found is None else found.reserved_bytes
        return self._lasting(plan.graph, costs) + taken

    def compaction(self, plan: MemoryPlan, costs: Costs) -> Compaction | None:
        """Return how a plan runs in one block; None if it does not, although storages move."""
        if not self.in_one_block:
            return None
        return self._latest.known("compaction", plan, costs, self._compacted)

    def _compacted(self, plan: MemoryPlan, costs: Costs) -> Compaction | None:
        done, first = self._simulated(plan, costs), self.first_of(plan, costs)
        limits = BlockLimits(
            most_bytes=self.most_bytes - self.spare_bytes - self._lasting(plan.graph, costs),
            live_bytes=predicted_bytes(plan, costs, done) + self._made_bytes(plan.graph, costs),
            first_live_bytes=predicted_bytes(first or plan, costs, self._simulated(first or plan, costs)),
            state_exists=self.state_exists,
            fixed=self.fixed,
            keeps_state=self.keeps_state,
            worth_bytes=int(_WORTH * done.time_ms * self.copied_bytes_per_ms),
        )
        before = None
        if first is not None:
            before = ReplayedPlan(first, self._scratch(first, costs), self._simulated(first, costs).delayed)
        return compact(ReplayedPlan(plan, self._scratch(plan, costs), done.delayed), costs, limits, before)

    def first_of(self, plan: MemoryPlan, costs: Costs) -> MemoryPlan | None:
        """Return the plan of the first step; None where no plan takes less than this one."""
        frugal = self.frugal
        if frugal is None or self._simulated(frugal, costs).peak_bytes >= self._simulated(plan, costs).peak_bytes:
            return None
        return frugal

    def moves_ms(self, found: Compaction) -> float:
        """Return how long it takes in each step to move storages, in milliseconds."""
        return found.moved_bytes / self.copied_bytes_per_ms

    def paged_bytes(self, plan: MemoryPlan, costs: Costs) -> int:
        """Return what the allocator takes if it gives empty pages back within each step, in bytes."""
        return self._lasting(plan.graph, costs) + self._replayed(plan, costs).paged_bytes

    def returns(self, plan: MemoryPlan, costs: Costs, spare: int = 0) -> ReplayedReturns:
        """Return how often an allocator that may take its room, less some bytes, gives pages back in each step."""
        scratch, delayed = self._scratch(plan, costs), self._simulated(plan, costs).delayed
        most = self.most_bytes - spare - self._lasting(plan.graph, costs)
        return replay_returns(plan, costs, scratch, delayed, most, state_exists=self.state_exists)

    def _replayed(self, plan: MemoryPlan, costs: Costs) -> ReplayedBytes:
        return self._latest.known("bytes", plan, costs, self._replayed_anew)

    def _replayed_anew(self, plan: MemoryPlan, costs: Costs) -> ReplayedBytes:
        scratch, delayed = self._scratch(plan, costs), self._simulated(plan, costs).delayed
        return replay_allocator(plan, costs, scratch, delayed, state_exists=self.state_exists)

    def _simulated(self, plan: MemoryPlan, costs: Costs) -> Simulation:
        return self._latest.known("simulation", plan, costs, simulate)

    @staticmethod
    def _scratch(plan: MemoryPlan, costs: Costs) -> dict[int, int]:
        """Return the bytes of scratch by operation, as the plan chooses them."""
        chosen = {operation: each.workspace_bytes for operation, each in plan.configurations.items()}
        return {**dict(enumerate(costs.scratch_bytes)), **chosen}

    def _made_bytes(self, graph: StepGraph, costs: Costs) -> int:
        """Return the bytes of the optimizer's state that the first update makes."""
        states = (
            costs.rounded(size)
            for size, storage in zip(graph.sizes, graph.storages, strict=True)
            if storage.role is Role.OPTIMIZER_STATE
        )
        return 0 if self.state_exists else sum(states)

    def _lasting(self, graph: StepGraph, costs: Costs) -> int:
        """Return the bytes of the storages that exist before the first step, and of holes between them."""
        return self.lost_bytes + sum(
            costs.rounded(size)
            for size, storage, exists in zip(graph.sizes, graph.storages, graph.exists_before, strict=True)
            if exists and (self.state_exists or storage.role is not Role.OPTIMIZER_STATE)
        )


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

    Raises:
        BudgetError: if no plan keeps the budget, or the room of the allocator even with empty pages given back.
        InvalidValueError: if there is no such policy.
    """
    if policy == "auto" and budget is None:
        return find_policy("stock").plan(graph, costs, None)
    check_budget(graph, costs, budget)
    policies = chosen_policies(policy)
    choice = _Choice(graph, costs, budget, room, host_bytes)
    for number, each in enumerate(policies):
        choice.add(number, each)
        if policy == "auto" and not number and choice.fits:
            break  # nothing is faster than a step of which nothing is moved or recomputed
    return choice.best()


def frugal_plan(
    graph: StepGraph,
    costs: Costs,
    policy: str | MemoryPolicy,
    other: MemoryPlan,
    room: AllocatorRoom | None = None,
) -> MemoryPlan | None:
    """Return a policy's plan for the least budget that it keeps; None where that takes no less than another plan.

    Args:
        graph: the step.
        costs: its costs.
        policy: name of a policy, or a policy; 'auto' stands for recomputation by blocks, which needs no host memory.
        other: the other plan, whose budget the plan keeps, too.
        room: what the allocator may take; a plan that takes more of it than the other one is none.
    """
    found = least_plan(graph, costs, policy)
    if found is None or simulate(found, costs).peak_bytes >= simulate(other, costs).peak_bytes:
        return None
    if room is not None and room.taken_bytes(found, costs) > max(room.most_bytes, room.taken_bytes(other, costs)):
        return None
    return replace(found, budget_bytes=other.budget_bytes)


def least_plan(graph: StepGraph, costs: Costs, policy: str | MemoryPolicy) -> MemoryPlan | None:
    """Return a policy's plan for the least budget that it keeps, as `frugal_plan`; None where there is none."""
    name = "checkpoint" if policy == "auto" else policy
    return _least(find_policy(name) if isinstance(name, str) else name, graph, costs)


def _least(policy: MemoryPolicy, graph: StepGraph, costs: Costs) -> MemoryPlan | None:
    return _near(policy, graph, costs, measure_liveness(graph, costs).floor_bytes)


def _near(policy: MemoryPolicy, graph: StepGraph, costs: Costs, budget: int) -> MemoryPlan | None:
    """Return a policy's plan for a budget, or else for the least one that it keeps; None where there is none."""
    for _ in range(3):  # an error names the floor, or the least budget that the policy keeps
        try:
            return policy.plan(graph, costs, budget)
        except BudgetError as error:
            budget = error.required_bytes
    return None


class _Choice:
    """Plans of some policies, of which the fastest is looked at first."""

    def __init__(
        self,
        graph: StepGraph,
        costs: Costs,
        budget: int | None,
        room: AllocatorRoom | None,
        host_bytes: int | None,
    ) -> None:
        self._graph, self._costs, self._budget, self._room = graph, costs, budget, room
        self._host_bytes = host_bytes
        self._waiting: list[_Candidate] = []
        self._too_much_host: list[_Candidate] = []
        self._refused: list[BudgetError] = []
        self._policies: list[MemoryPolicy] = []

    def add(self, number: int, policy: MemoryPolicy) -> None:
        """Add a policy, if it keeps the budget."""
        self._policies.append(policy)
        try:
            plan = policy.plan(self._graph, self._costs, self._budget)
        except BudgetError as error:
            self._refused.append(error)
        else:
            self._push(number, policy, plan, tries=1)

    @property
    def fits(self) -> bool:
        """Whether there is a plan, and the fastest one fits into the allocator's room, with few moves at most."""
        if not self._waiting:
            return False
        fastest = self._waiting[0]
        over, pause_ms, _ = self._outlook(fastest.plan)
        return not over and pause_ms <= _WORTH * fastest.time_ms

    def best(self) -> MemoryPlan:
        """Return the fastest plan that fits, or one that fits with empty pages given back.

        Raises:
            BudgetError: if there is none.
        """
        if not self._waiting:  # whoever takes the host's memory refuses these
            self._waiting = self._too_much_host[:1]
        if not self._waiting:
            raise min(self._refused, key=lambda error: error.required_bytes)
        least: tuple[int, MemoryPlan] | None = None
        while self._waiting:
            candidate = heappop(self._waiting)
            over, pause_ms, plan = (0, 0.0, candidate.plan) if candidate.priced else self._outlook(candidate.plan)
            if not over and not pause_ms:
                return replace(plan, budget_bytes=self._budget)
            if pause_ms < inf:
                later = candidate._replace(time_ms=candidate.time_ms + pause_ms, plan=plan, priced=True)
                heappush(self._waiting, later)
            beyond = self._paged_over(candidate.plan)
            if least is None or beyond < least[0]:
                least = beyond, candidate.plan
            self._tighten(candidate, over)
        assert least is not None
        for policy in self._policies if least[0] else ():
            found = _least(policy, self._graph, self._costs)
            if found is not None and self._keeps(found):
                least = min(least, (self._paged_over(found), found), key=lambda each: each[0])
        if least[0]:
            raise self._no_room(least[0])
        return replace(least[1], budget_bytes=self._budget)

    def _no_room(self, beyond: int) -> BudgetError:
        assert self._room is not None
        most = self._room.most_bytes
        return BudgetError(
            f"tensors of {self._graph.name} do not fit side by side into {exact_bytes(most)}: the closest plan"
            f" takes {exact_bytes(most + beyond)} of pages, holes between tensors included: raise the budget to that",
            kernel="",
            limit_bytes=most,
            required_bytes=most + beyond,
        )

    def _outlook(self, plan: MemoryPlan) -> tuple[int, float, MemoryPlan]:
        """Return how a plan fits into the room, without what is spared.

        Returns:
            Bytes that the allocator takes beyond it, milliseconds in which storages move or pages go back to the driver
            (infinity where a tensor has no room even so), and the plan with what moves.
        """
        room = self._room
        if room is None:
            return 0, 0.0, plan
        found = room.compaction(plan, self._costs)
        if found is not None:
            return 0, room.moves_ms(found), replace(plan, moves=found.moves)
        most = room.most_bytes - room.spare_bytes
        over = max(0, room.taken_bytes(plan, self._costs) - most)
        return over, returns_ms(room.returns(plan, self._costs, room.spare_bytes)), plan

    def _paged_over(self, plan: MemoryPlan) -> int:
        """Return how much more than its room the allocator takes for a plan although it gives empty pages back."""
        assert self._room is not None
        return max(0, self._room.paged_bytes(plan, self._costs) - self._room.most_bytes)

    def _tighten(self, candidate: "_Candidate", over: int) -> None:
        """Let a policy plan again for fewer bytes, if it can; for its least budget where that is nearer."""
        if candidate.tries == _MOST_TRIES:
            return
        least, most = (int(candidate.peak_bytes * share) for share in (_LEAST_STEP, _MOST_STEP))
        less = min(max(int(over * _STEP), least), most)
        plan = _near(candidate.policy, self._graph, self._costs, candidate.peak_bytes - less)
        if plan is not None and simulate(plan, self._costs).peak_bytes < candidate.peak_bytes:
            self._push(candidate.number, candidate.policy, plan, tries=candidate.tries + 1)

    def _push(self, number: int, policy: MemoryPolicy, plan: MemoryPlan, *, tries: int) -> None:
        found = simulate(plan, self._costs)
        fits_host = self._holds_host(found)
        candidate = _Candidate(found.time_ms, number, tries, found.peak_bytes, policy, plan)
        heappush(self._waiting if fits_host else self._too_much_host, candidate)

    def _keeps(self, plan: MemoryPlan) -> bool:
        """Return whether a plan keeps the budget in live bytes, and the host's memory."""
        found = simulate(plan, self._costs)
        return (self._budget is None or found.peak_bytes <= self._budget) and self._holds_host(found)

    def _holds_host(self, found: Simulation) -> bool:
        """Return whether a plan does with the host's memory."""
        return self._host_bytes is None or found.pinned_bytes <= self._host_bytes


class _Candidate(NamedTuple):
    """A plan of a policy, in the order in which candidates are looked at: the fastest first.

    Its time has what moving storages or giving pages back takes if it is priced.
    """

    time_ms: float
    number: int
    tries: int
    peak_bytes: int
    policy: MemoryPolicy
    plan: MemoryPlan
    priced: bool = False
