"""Replay of a step: the order in which a plan takes and gives back memory, piece by piece.

PyTorch's operators take what they write, then their scratch. A prefetch takes what comes back, unless an offload of it
still runs, because its piece has not been given back then. The optimizer's state is taken in the first update, and
stays. Gradients are freed before a step, as `zero_grad()` does it, and outputs with them.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from ucudnn.memory.plans.actions import COMPUTES, ActionKind
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import Phase, Role, StepGraph

ABSENT = -1
"""As a version, it says that the storage is not there; as a storage, that the piece is scratch or dropped at once."""

Piece = tuple[int, int]
"""Address and bytes."""


class Space(Protocol):
    """Where pieces lie."""

    def take(self, size: int) -> Piece:
        """Return a piece of a size in bytes."""

    def give_back(self, piece: Piece) -> None:
        """Free a piece."""


class ReplayedPlan(NamedTuple):
    """A plan, and what its replay has to know of it.

    Attributes:
        plan: the plan.
        scratch: bytes of scratch by operation.
        delayed: for each free that waits for an offload, the action before which the bytes go (`Simulation.delayed`).
        ended: by the action of a copy, the action before which the copy has ended (`Simulation.ended`). A copy that is
            missing here ends where compute waits for it.
    """

    plan: MemoryPlan
    scratch: Mapping[int, int]
    delayed: Mapping[int, int]
    ended: Mapping[int, int] = MappingProxyType({})


class StepReplay:
    """Steps of one graph in a space, one after another; each may follow another plan.

    Args:
        graph: the step.
        costs: its costs.
        space: where its pieces lie.
        state_exists: whether the optimizer's state exists before the first step; it lies elsewhere then.
    """

    def __init__(self, graph: StepGraph, costs: Costs, space: Space, *, state_exists: bool) -> None:
        self.graph, self.space = graph, space
        self.pieces: dict[int, Piece] = {}  # by storage
        self._costs = costs
        self._sizes = [costs.rounded(size) for size in graph.sizes]
        states = {each for each, storage in enumerate(graph.storages) if storage.role is Role.OPTIMIZER_STATE}
        self._later = set() if state_exists else states
        self._held: dict[int, Piece] = {}  # by the action that frees them, as long as their offloads run
        self._last_free: dict[int, int] = {}  # of each storage
        self._version: list[int] = []
        self._host = [ABSENT] * len(self._sizes)

    def step(self, replayed: ReplayedPlan) -> None:
        """Replay one step."""
        plan, delayed, scratch = replayed.plan, replayed.delayed, replayed.scratch
        released: dict[int, list[int]] = {}
        for freed_at, released_at in delayed.items():
            released.setdefault(released_at, []).append(freed_at)
        self._begin()
        for index in range(len(plan.actions) + 1):
            for freed_at in released.get(index, ()):
                self._release(freed_at)
            if index < len(plan.actions):
                self.act(index, plan, scratch, waits=index in delayed)

    def act(self, index: int, plan: MemoryPlan, scratch: Mapping[int, int], *, waits: bool) -> None:
        """Replay an action; `waits` is whether it frees what an offload still reads."""
        kind, target = plan.actions[index]
        if kind in COMPUTES:
            made = self._made(target, again=kind is ActionKind.RECOMPUTE)
            self._take(index, self.with_scratch(target, made, scratch))
        elif kind is ActionKind.OFFLOAD:
            self._host[target] = self._version[target]
        elif kind is ActionKind.PREFETCH:
            self._version[target] = self._host[target]
            still = self._held.pop(self._last_free.get(target, ABSENT), None)
            if still is None:
                self._take(index, [(target, self._sizes[target])])
            else:
                self.pieces[target] = still
        elif kind is ActionKind.FREE:
            self._free(index, target, waits=waits)

    def expect(self, index: int, wanted: Sequence[tuple[int, int]]) -> None:
        """Is called before an action takes pieces: (storage, bytes) in their order; ABSENT for what is dropped."""

    def wanted(self, operation: int, *, again: bool) -> list[tuple[int, int]]:
        """Return what an operation of forward or backward takes for what it writes: (storage, bytes), as `expect`."""
        found: list[tuple[int, int]] = []
        reads = self.graph.operations[operation].reads
        for storage, version in self.graph.makes[operation]:
            current = self._version[storage]
            if current == ABSENT:
                found.append((storage, self._sizes[storage]))
            elif again and current >= version and storage not in reads:
                found.append((ABSENT, self._sizes[storage]))
        return found

    def with_scratch(
        self, operation: int, made: Sequence[tuple[int, int]], scratch: Mapping[int, int]
    ) -> list[tuple[int, int]]:
        """Return what an operation takes for what it writes, with its scratch in the order of allocation."""
        before, after, _ = self._costs.pieces(operation, scratch.get(operation, 0))
        return [*((ABSENT, size) for size in before), *made, *((ABSENT, size) for size in after)]

    def _begin(self) -> None:
        for storage in [*self.pieces]:
            if self.graph.storages[storage].role is not Role.OPTIMIZER_STATE:
                self.space.give_back(self.pieces.pop(storage))
        self._version = [0 if exists else ABSENT for exists in self.graph.exists_before]

    def _made(self, operation: int, *, again: bool) -> list[tuple[int, int]]:
        """Return what an operation takes for what it writes, and count up the versions."""
        done, sizes = self.graph.operations[operation], self._sizes
        wanted: list[tuple[int, int]] = []
        if done.phase is Phase.OPTIMIZER:
            for storage in sorted(self._later.intersection((*done.reads, *done.writes))):
                wanted.append((storage, sizes[storage]))
                self._later.remove(storage)
        wanted += self.wanted(operation, again=again)
        for storage, version in self.graph.makes[operation]:
            self._version[storage] = max(self._version[storage], version)
        return wanted

    def _take(self, index: int, wanted: Sequence[tuple[int, int]]) -> None:
        wanted = [(storage, size) for storage, size in wanted if size]
        self.expect(index, wanted)
        dropped = []
        for storage, size in wanted:
            piece = self.space.take(size)
            if storage == ABSENT:
                dropped.append(piece)
            else:
                self.pieces[storage] = piece
        for piece in dropped:
            self.space.give_back(piece)

    def _free(self, index: int, storage: int, *, waits: bool) -> None:
        self._version[storage] = ABSENT
        self._last_free[storage] = index
        piece = self.pieces.pop(storage, None)
        if piece is None:
            return
        if waits:
            self._held[index] = piece
        else:
            self.space.give_back(piece)

    def _release(self, freed_at: int) -> None:
        piece = self._held.pop(freed_at, None)
        if piece is not None:
            self.space.give_back(piece)
