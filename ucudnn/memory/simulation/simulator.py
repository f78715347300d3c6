"""The simulator: walks a plan's actions once, with a clock, queues of copies and collectives, and the bytes that exist.

Compute issues the actions in order. A copy can begin when the compute before it has ended, so everything that is known
at the clock's time decides what happens next, and one walk is exact. Copies and compute that end at one instant have
all ended before the next action is issued, so a free that waited for an offload gives its bytes back before that action
takes any.
"""

from collections.abc import Callable, Collection, Sequence, Set
from itertools import chain, compress

from ucudnn.errors import BudgetError
from ucudnn.memory.plans.actions import COMPUTES, COPIES, ActionKind, follow
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.copies import CopyQueues, CopyRequest
from ucudnn.memory.simulation.result import Queue, Simulation, TimelineEntry
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepOperation
from ucudnn.units import bytes_down, bytes_up

_ABSENT = -1
_LATEST = "_latest_simulation"  # of a plan, beside its fields


def simulate(plan: MemoryPlan, costs: Costs, cap_bytes: int | None = None) -> Simulation:
    """Return what a plan takes on a device.

    Args:
        plan: the plan.
        costs: times and sizes of the plan's step on the device.
        cap_bytes: where it is given, taking memory waits as long as it would exceed the cap, until running offloads
            have freed enough (vDNNExt, section 4.3: an allocation blocks until memory is freed).

    Raises:
        BudgetError: if the cap would be exceeded although no offload is left to wait for.
        InvalidValueError: if the costs belong to a step with another number of operations.
    """
    known: tuple[Costs, Simulation] | None = vars(plan).get(_LATEST)
    if known is not None and known[0] is costs and (cap_bytes is None or known[1].peak_bytes <= cap_bytes):
        return known[1]
    costs.check(len(plan.graph.operations))
    walk = _Walk(plan, costs, cap_bytes)
    try:
        follow(plan.actions, walk)
        found = walk.end()
    finally:
        del walk.queues  # which know the walk
    if cap_bytes is None or not found.stalls:  # a plan never changes, and its planner asks several times
        vars(plan)[_LATEST] = costs, found
    return found


def fixed_bytes(plan: MemoryPlan, costs: Costs) -> int:
    """Return the bytes that a plan holds during the whole step: what exists before it, and the plan's buffers."""
    graph = plan.graph
    sizes = costs.sizes_of(graph)
    held = sum(compress(sizes, graph.exists_before))
    held += sum(max(sizes[storage] for storage in buffer) for buffer in plan.buffers if buffer)
    return held + (max(_scratch(plan, costs), default=0) if plan.scratch_buffer else 0)


def predicted_bytes(plan: MemoryPlan, costs: Costs, simulation: Simulation) -> int:
    """Return the most bytes that forward and backward of a plan take beyond those that exist before."""
    operations, ends = (target for kind, target in plan.actions if kind in COMPUTES), plan.graph.optimizer_begins
    found = (size for each, size in zip(operations, simulation.running_bytes, strict=True) if each < ends)
    return max(found, default=0) - fixed_bytes(plan, costs)


class _Walk:
    """The device between two actions."""

    def __init__(self, plan: MemoryPlan, costs: Costs, cap_bytes: int | None) -> None:
        graph = plan.graph
        self.at, self.count = -1, len(plan.actions)  # the action, and how many there are
        self.graph, self.cap = graph, cap_bytes
        self.makes, self.stays = graph.makes, graph.exists_after
        self.queues = CopyQueues(costs, self._copy_ended)
        self.times, self.scratch = [*costs.with_configurations(plan.configurations).time_ms], _scratch(plan, costs)
        if plan.scratch_buffer:
            self.scratch = [0] * len(self.scratch)
        self.beside = {each: self.times[each] for each in graph.collectives if plan.overlapped}
        for each in self.beside:  # compute only issues them
            self.times[each] = 0.0
        self.compute = self._work_beside if self.beside else self._work
        self.running_beside: dict[int, StepOperation] = {}  # collectives that have not ended, by their action
        self.out_rate, self.back_rate = costs.offload_bytes_per_ms, costs.prefetch_bytes_per_ms
        self.sizes = [*costs.sizes_of(graph)]
        for storage in chain.from_iterable(plan.buffers):
            self.sizes[storage] = 0
        self.version = [0 if exists else _ABSENT for exists in graph.exists_before]
        self.host = [_ABSENT] * len(graph.storages)
        self.born: dict[int, tuple[int, int]] = {}  # action and event at which a storage's memory was taken
        self.offloading: dict[int, int] = {}  # the action that issued the last offload of a storage, while it runs
        # what is freed when the offload of an action ends, its birth, and the action that frees it
        self.freeing: dict[int, tuple[int, tuple[int, int], int]] = {}
        self.computing = False
        self.delayed: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self.pinned: set[int] = set()
        self.unpins = _last_prefetches(plan)
        self.event = self.offloaded = self.prefetched = self.pinned_now = self.pinned_peak = 0
        self.live = self.peak = fixed_bytes(plan, costs)
        self.compute_ms = self.recompute_ms = self.contention_ms = self.wait_ms = self.memory_stall_ms = 0.0
        self.issue, self.issued_ms = costs.issue_ms or (0.0,) * len(costs.time_ms), 0.0
        self.running: list[int] = []
        self.stalls: list[tuple[int, int]] = []
        self.last_freed = _ABSENT  # the storage whose offload ended last of those that were freed
        self.timeline: list[TimelineEntry] = []
        self.memory = [(0.0, self.live)]
        self.event_ms = [0.0]
        self.taken: list[tuple[int, int, int, int, int]] = []  # as those of a `Lifetime`

    def run(self, operation: int) -> None:
        born, versions = [], self.version
        for storage, version in self.makes[operation]:
            if versions[storage] == _ABSENT:
                born.append(storage)
            versions[storage] = version
        self.compute_ms += self.times[operation]
        self.compute(operation, born, ())

    def recompute(self, operation: int) -> None:
        reads = self.graph.operations[operation].reads
        born, dropped = [], []
        for storage, version in self.makes[operation]:
            current = self.version[storage]
            if current == _ABSENT:
                born.append(storage)
            elif current >= version and storage not in reads:
                dropped.append(storage)
            self.version[storage] = max(current, version)
        self.recompute_ms += self.times[operation]
        self.compute(operation, born, dropped)

    def offload(self, storage: int) -> None:
        self._await_storage(storage)
        size = self.graph.sizes[storage]
        self.host[storage] = self.version[storage]
        self.offloading[storage] = self.at
        self.offloaded += size
        if storage not in self.pinned:
            self.pinned.add(storage)
            self.pinned_now += size
            self.pinned_peak = max(self.pinned_peak, self.pinned_now)
        self.queues.put(self.queues.out, CopyRequest(storage, self.at, size / self.out_rate))

    def prefetch(self, storage: int) -> None:
        self._await_storage(storage)
        size = self.graph.sizes[storage]
        self.version[storage] = self.host[storage]
        left = self.freeing.pop(self.offloading.get(storage, _ABSENT), None)
        if left is None:
            self._take(self.sizes[storage], self.graph.storage_name, storage)
            self._begin_life(storage)
        else:  # its bytes have not gone yet, so they stay
            _, self.born[storage], freed_at = left
            self.delayed[freed_at] = self.at + 1
        self.prefetched += size
        self.queues.put(self.queues.back, CopyRequest(storage, self.at, size / self.back_rate))

    def free(self, storage: int) -> None:
        if self.running_beside:  # a collective that reads it may hold another operand already, and holds one only
            self._await_storage(storage, written=self.offloading.get(storage) in self.freeing)
        self.version[storage] = _ABSENT
        born = self.born.pop(storage)
        if storage in self.offloading:
            self.freeing[self.offloading[storage]] = (storage, born, self.at)
        else:
            self._give_back(storage, born)

    def wait(self, storage: int) -> None:
        before = self.queues.now
        while self.queues.runs(storage):
            self.queues.run_to_next_end()
        self.wait_ms += self.queues.now - before
        self._await_storage(storage)

    def synchronize(self, _: int) -> None:
        before = self.queues.now
        while not self.queues.idle:
            self.queues.run_to_next_end()
        self.wait_ms += self.queues.now - before

    def end(self) -> Simulation:
        self.at = self.count
        self.synchronize(_ABSENT)
        for storage in [*self.born]:
            self._give_back(storage, self.born.pop(storage))
        return Simulation(
            peak_bytes=self.peak,
            time_ms=self.queues.now,
            compute_ms=self.compute_ms,
            recompute_ms=self.recompute_ms,
            contention_ms=self.contention_ms,
            wait_ms=self.wait_ms,
            memory_stall_ms=self.memory_stall_ms,
            offloaded_bytes=self.offloaded,
            prefetched_bytes=self.prefetched,
            pinned_bytes=self.pinned_peak,
            running_bytes=tuple(self.running),
            stalls=tuple(self.stalls),
            timeline=tuple(self.timeline),
            memory=tuple(self.memory),
            delayed=self.delayed,
            ended=self.ended,
            taken=tuple(self.taken),
            event_ms=tuple(self.event_ms),
            issue_ms=self.issued_ms,
        )

    def _work_beside(self, operation: int, born: Sequence[int], dropped: Sequence[int]) -> None:
        """Run an operation after the collectives that it waits for; a collective itself only begins."""
        found = self.graph.operations[operation]
        self._await({*found.reads, *found.writes}, found.writes)
        for storage in found.reads if operation in self.beside else ():
            if storage in self.born and storage in self.offloading:  # one holds what nothing else may hold
                self.wait(storage)
        self._work(operation, born, dropped)
        if operation in self.beside:  # it holds its operands as an offload does
            self.running_beside[self.at] = found
            self.offloading.update((storage, self.at) for storage in found.reads if storage in self.born)
            self.queues.put(self.queues.ranks, CopyRequest(_ABSENT, self.at, self.beside[operation]))

    def _work(self, operation: int, born: Sequence[int], dropped: Sequence[int]) -> None:
        """Take an operation's memory, let it compute, and free the storages that it drops at its end."""
        sizes, scratch, queues = self.sizes, self.scratch[operation], self.queues
        passing = scratch
        for storage in dropped:
            passing += sizes[storage]
        taken = passing
        for storage in born:
            taken += sizes[storage]
        if taken:
            self._take(taken, self.graph.operation_name, operation)
        for storage in born:
            self._begin_life(storage)
        self.issued_ms += self.issue[operation]
        self.running.append(self.live)
        now, begin, time_ms = queues.now, self.event, self.times[operation]
        self.computing = True
        queues.compute(time_ms)
        self.computing = False
        ended = queues.now
        self.contention_ms += ended - now - time_ms
        if time_ms:
            self.timeline.append(TimelineEntry(Queue.COMPUTE, self.at, now, ended))
        if passing:
            self.live -= passing
            self.memory.append((ended, self.live))
            self.event += 1  # copies that ended beside the operation may have counted it up, too
            self.event_ms.append(ended)
            if scratch:
                self.taken.append((_ABSENT, self.at, scratch, begin, self.event))
            for storage in dropped:
                if sizes[storage]:
                    self.taken.append((storage, self.at, sizes[storage], begin, self.event))

    def _await_storage(self, storage: int, *, written: bool = True) -> None:
        """Wait for collectives that make a storage, and where it is written, for those that read it."""
        if self.running_beside:
            self._await({storage}, {storage} if written else ())

    def _await(self, accessed: Set[int], written: Collection[int] = ()) -> None:
        """Wait for collectives whose results are accessed, or whose operands are written."""
        before = self.queues.now
        while any(
            not accessed.isdisjoint(each.writes) or not {*each.reads}.isdisjoint(written)
            for each in self.running_beside.values()
        ):
            self.queues.run_to_next_end()
        self.wait_ms += self.queues.now - before

    def _take(self, size: int, name: Callable[[int], str], of: int) -> None:
        """Take memory at the clock's time, or when running offloads have freed enough under the cap."""
        if not size:
            return
        if self.cap is not None and self.live + size > self.cap:
            before = self.queues.now
            while self.live + size > self.cap and self.freeing:
                self.queues.run_to_next_end()
                if self.live + size <= self.cap:
                    self.stalls.append((self.at, self.last_freed))
            self.memory_stall_ms += self.queues.now - before
            if self.live + size > self.cap:
                raise BudgetError(
                    f"action {self.at}: {name(of)} needs {bytes_up(size)} beside {bytes_up(self.live)}, which"
                    f" exceeds the cap of {bytes_down(self.cap)}, and no offload is left to wait for",
                    kernel=name(of),
                    limit_bytes=self.cap,
                    required_bytes=self.live + size,
                )
        self.live += size
        self.memory.append((self.queues.now, self.live))
        if self.live > self.peak:
            self.peak = self.live

    def _begin_life(self, storage: int) -> None:
        if not self.stays[storage]:
            self.born[storage] = (self.at, self.event)
            self.offloading.pop(storage, None)  # what still runs reads the bytes of its life before

    def _give_back(self, storage: int, born: tuple[int, int]) -> None:
        size, now = self.sizes[storage], self.queues.now
        if size:
            self.event += 1
            self.event_ms.append(now)
            self.taken.append((storage, born[0], size, born[1], self.event))
            self.live -= size
            self.memory.append((now, self.live))

    def _copy_ended(self, copy: CopyRequest, queue: Queue, start_ms: float, end_ms: float) -> None:
        self.timeline.append(TimelineEntry(queue, copy.action, start_ms, end_ms))
        self.ended[copy.action] = self.at + self.computing
        collective = self.running_beside.pop(copy.action, None)
        if queue is not Queue.FROM_HOST:
            for storage in (copy.storage,) if collective is None else collective.reads:
                if self.offloading.get(storage) == copy.action:
                    del self.offloading[storage]
            if copy.action in self.freeing:
                storage, born, freed_at = self.freeing.pop(copy.action)
                self.last_freed = storage
                self.delayed[freed_at] = self.ended[copy.action]
                self._give_back(storage, born)
        elif copy.action in self.unpins:
            self.pinned.discard(copy.storage)
            self.pinned_now -= self.graph.sizes[copy.storage]


def _scratch(plan: MemoryPlan, costs: Costs) -> list[int]:
    scratch = list(costs.rounded_scratch)
    for operation, configuration in plan.configurations.items():
        scratch[operation] = costs.rounded(configuration.workspace_bytes)
    return scratch


def _last_prefetches(plan: MemoryPlan) -> set[int]:
    """Return the prefetches after which the host's copy of their storage is of no use."""
    last: dict[int, int] = {}
    found = set()
    for index, (kind, target) in [each for each in enumerate(plan.actions) if each[1][0] in COPIES]:
        if kind is ActionKind.PREFETCH:
            last[target] = index
        elif target in last:
            found.add(last.pop(target))
    return found | set(last.values())
