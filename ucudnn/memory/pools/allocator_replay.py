"""Replay: what PyTorch's allocator takes from a GPU for a plan, tensor by tensor.

The order in which a step takes and gives back memory is fixed, and so are the allocator's choices. With expandable
segments it has one range of addresses for tensors up to 1 MiB and one for larger ones. A tensor gets the smallest hole
that is large enough, else the range grows at its end, by whole pages of 2 MiB or 20 MiB (`c10/cuda/
CUDACachingAllocator.cpp`: `get_free_block`, `map_block`, `kSmallBuffer`, `kLargeBuffer`). Holes that nothing fits are
why the allocator takes more than the bytes that are alive.

Two steps are replayed, because the first update makes the optimizer's state between gradients, where it stays.

The allocator may have a bound (`set_per_process_memory_fraction`, or the GPU's memory). Before it grows, it adds the
whole tensor to what it has, though it may grow by less. Where that exceeds the bound, it waits for the GPU, and gives
all empty pages back to the driver. In each step it maps them again when they are needed, because steps ask for the
same. Its statistics call that a retry (`num_alloc_retries`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ucudnn.memory.costs import Costs
from ucudnn.memory.graph import Phase, Role
from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.pools.growing_range import GrowingRange

_SMALL = 2**20  # the largest tensor of the first range
_PAGES = (2 * 2**20, 20 * 2**20)  # bytes of a page in each range
_STEPS = 2
_LEAST_ASKED = 10 * 2**20  # the smallest tensor that counts as it is; smaller ones count as a page
_ABSENT = -1


@dataclass(frozen=True, kw_only=True)
class ReplayedBytes:
    """What a plan takes beside the storages that exist before the first step.

    Attributes:
        live_bytes: most bytes that are alive at a time.
        reserved_bytes: bytes that the allocator takes from the device; no fewer.
        paged_bytes: most bytes of pages that hold something at a time. The allocator can do with them if it gives empty
            pages back to the driver in each step, which takes time.
    """

    live_bytes: int
    reserved_bytes: int
    paged_bytes: int


@dataclass(frozen=True, kw_only=True)
class ReplayedReturns:
    """How an allocator with a bound carries out a step.

    Attributes:
        fits: whether it finds room for every tensor.
        times: how often it gives empty pages back in a step; none where a plan fits side by side.
        returned_bytes: bytes of the pages that it gives back in a step.
    """

    fits: bool
    times: int
    returned_bytes: int


def replay_allocator(
    plan: MemoryPlan,
    costs: Costs,
    scratch: Mapping[int, int],
    delayed: Mapping[int, int],
    *,
    state_exists: bool = False,
) -> ReplayedBytes:
    """Return what PyTorch's allocator takes for a plan.

    Parameters, buffers and inputs exist before and are not counted. Gradients are freed before a step, as `zero_grad()`
    does it, and outputs with them.

    Args:
        plan: the plan.
        costs: costs of its step.
        scratch: bytes of scratch by operation.
        delayed: for each free that waits for an offload, the action before which the bytes go (`Simulation.delayed`).
        state_exists: whether the optimizer's state exists before, too.
    """
    walk = _Replay(plan, costs, scratch, _Space(), state_exists=state_exists)
    for _ in range(_STEPS):
        _walk(walk, plan, delayed)
    return walk.found()


def replay_returns(
    plan: MemoryPlan,
    costs: Costs,
    scratch: Mapping[int, int],
    delayed: Mapping[int, int],
    most_bytes: int,
    *,
    state_exists: bool = False,
) -> ReplayedReturns:
    """Return how often an allocator with a bound gives pages back in each step of a plan; arguments as above.

    Args:
        plan: the plan.
        costs: costs of its step.
        scratch: bytes of scratch by operation.
        delayed: the frees that wait.
        most_bytes: bytes that the allocator may have beside the storages that exist before the first step.
        state_exists: whether the optimizer's state exists before, too.
    """
    space = _Space(most_bytes)
    walk = _Replay(plan, costs, scratch, space, state_exists=state_exists)
    before = 0, 0
    for step in range(_STEPS + 1):
        if step >= _STEPS and space.times == before[0]:
            break  # the next step finds all that this one found
        before = space.times, space.returned_bytes
        _walk(walk, plan, delayed)
        if not space.fits:
            break
    return ReplayedReturns(
        fits=space.fits, times=space.times - before[0], returned_bytes=space.returned_bytes - before[1]
    )


def _walk(walk: "_Replay", plan: MemoryPlan, delayed: Mapping[int, int]) -> None:
    """Replay one step."""
    released: dict[int, list[int]] = {}
    for freed_at, released_at in delayed.items():
        released.setdefault(released_at, []).append(freed_at)
    walk.begin_step()
    for index in range(len(plan.actions) + 1):
        for freed_at in released.get(index, ()):
            walk.release(freed_at)
        if index < len(plan.actions):
            walk.act(index, waits=index in delayed)


class _Space:
    """The two ranges of addresses, and what they may have together."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most = most_bytes
        self._ranges = tuple(map(GrowingRange, _PAGES))
        self._live = self.peak = self.paged_peak = self.reserved = 0
        self.fits, self.times, self.returned_bytes = True, 0, 0

    def take(self, size: int) -> tuple[int, int]:
        found = self._ranges[size > _SMALL]
        address = found.find(size)
        if address is None:
            self._make_room(size)
            address = found.grow(size)
            self.reserved = max(self.reserved, self._mapped)
        found.take(address, size)
        self._live += size
        self.peak = max(self.peak, self._live)
        self.paged_peak = max(self.paged_peak, sum(each.paged_bytes for each in self._ranges))
        return address, size

    def give_back(self, piece: tuple[int, int]) -> None:
        address, size = piece
        self._ranges[size > _SMALL].give_back(address, size)
        self._live -= size

    @property
    def _mapped(self) -> int:
        return sum(each.mapped_bytes for each in self._ranges)

    def _make_room(self, size: int) -> None:
        """Give empty pages back where a tensor exceeds the bound with all that the allocator has."""
        asked = size if size >= _LEAST_ASKED else _PAGES[size > _SMALL]
        if self._most is None or self._mapped + asked <= self._most:
            return
        self.times += 1
        self.returned_bytes += sum(each.release() for each in self._ranges)
        self.fits &= self._mapped + asked <= self._most


class _Replay:
    """The allocator between two actions."""

    def __init__(
        self, plan: MemoryPlan, costs: Costs, scratch: Mapping[int, int], space: "_Space", *, state_exists: bool
    ) -> None:
        graph = plan.graph
        self._plan, self._graph = plan, graph
        self._sizes = [costs.rounded(size) for size in graph.sizes]
        self._scratch = {operation: costs.rounded(size) for operation, size in scratch.items()}
        roles = [storage.role for storage in graph.storages]
        self._later = (
            set() if state_exists else {each for each, role in enumerate(roles) if role is Role.OPTIMIZER_STATE}
        )
        self._space = space
        self._pieces: dict[int, tuple[int, int]] = {}  # by storage
        self._held: dict[int, tuple[int, int]] = {}  # by the action that frees them, as long as their offloads run
        self._version: list[int] = []
        self._host = [_ABSENT] * len(self._sizes)

    def begin_step(self) -> None:
        kept = {Role.OPTIMIZER_STATE}
        for storage in [*self._pieces]:
            if self._graph.storages[storage].role not in kept:
                self._space.give_back(self._pieces.pop(storage))
        self._version = [0 if exists else _ABSENT for exists in self._graph.exists_before]

    def act(self, index: int, *, waits: bool) -> None:
        kind, target = self._plan.actions[index]
        if kind in (ActionKind.RUN, ActionKind.RECOMPUTE):
            self._run(target, again=kind is ActionKind.RECOMPUTE)
        elif kind is ActionKind.OFFLOAD:
            self._host[target] = self._version[target]
        elif kind is ActionKind.PREFETCH:
            self._version[target] = self._host[target]
            self._take(target)
        elif kind is ActionKind.FREE:
            self._free(index, target, waits=waits)

    def release(self, freed_at: int) -> None:
        piece = self._held.pop(freed_at, None)
        if piece is not None:
            self._space.give_back(piece)

    def found(self) -> ReplayedBytes:
        space = self._space
        return ReplayedBytes(live_bytes=space.peak, reserved_bytes=space.reserved, paged_bytes=space.paged_peak)

    def _run(self, operation: int, *, again: bool) -> None:
        done = self._graph.operations[operation]
        if done.phase is Phase.OPTIMIZER:
            for storage in sorted(self._later.intersection((*done.reads, *done.writes))):
                self._take(storage)
                self._later.remove(storage)
        dropped = []
        for storage, version in self._graph.makes[operation]:
            current = self._version[storage]
            if current == _ABSENT:
                self._take(storage)
            elif again and current >= version and storage not in done.reads:
                dropped.append(self._space.take(self._sizes[storage]))
            self._version[storage] = max(current, version)
        if self._scratch.get(operation):
            dropped.append(self._space.take(self._scratch[operation]))
        for piece in dropped:
            self._space.give_back(piece)

    def _take(self, storage: int) -> None:
        if self._sizes[storage]:
            self._pieces[storage] = self._space.take(self._sizes[storage])

    def _free(self, index: int, storage: int, *, waits: bool) -> None:
        self._version[storage] = _ABSENT
        piece = self._pieces.pop(storage, None)
        if piece is None:
            return
        if waits:
            self._held[index] = piece
        else:
            self._space.give_back(piece)
