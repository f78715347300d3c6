"""Replay of a step: the order in which a plan takes and gives back memory, piece by piece.

PyTorch's operators take what they write, then their scratch. A prefetch takes what comes back, unless an offload of it
still runs, because its piece has not been given back then. The optimizer's state is taken in the first update, and
stays. Gradients are freed before a step, as `zero_grad()` does it, and outputs with them.

All that is known before anything has an address. So a step is written down once as events, and they are replayed in
each space that is tried.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from ucudnn.memory.plans.actions import COMPUTES, ActionKind
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.step.costs import Costs, returned
from ucudnn.memory.step.graph import Phase, Role, StepGraph

ABSENT = -1
"""As a version, it says that the storage is not there; as a storage, that the piece is scratch or dropped at once."""

Piece = tuple[int, int]
"""Address and bytes."""
Wanted = tuple[tuple[int, int], ...]
"""Pieces that are taken one after another: (storage, bytes), and ABSENT for what is dropped when the action ends."""


class Space(Protocol):
    """Where pieces lie."""

    def take(self, size: int) -> Piece:
        """Return a piece of a size in bytes."""

    def give_back(self, piece: Piece) -> None:
        """Free a piece."""


class Event(NamedTuple):
    """What an action does to memory.

    Attributes:
        kind: what it does; None behind the last action.
        released: the frees before it whose bytes go now, because their offloads have ended.
        state: the optimizer's state that it takes in the first step.
        wanted: what it takes in each step.
        freed_at: the action of a free whose bytes a prefetch finds still there, or of this free, if its bytes go later.
        updates: whether it belongs to the optimizer.
    """

    action: int
    kind: ActionKind | None
    target: int
    released: tuple[int, ...] = ()
    state: Wanted = ()
    wanted: Wanted = ()
    freed_at: int = ABSENT
    updates: bool = False


class ReplayedStep(NamedTuple):
    """A step by a plan, ready to be replayed.

    Attributes:
        events: what its actions do to memory, without those that do nothing.
        ended: by the action of a copy, the action before which the copy has ended (`Simulation.ended`). A copy that is
            missing here ends where compute waits for it.
    """

    graph: StepGraph
    events: Sequence[Event]
    ended: Mapping[int, int]


def replayed_step(
    plan: MemoryPlan, costs: Costs, delayed: Mapping[int, int], ended: Mapping[int, int] = MappingProxyType({})
) -> ReplayedStep:
    """Return a step by a plan.

    Args:
        plan: the plan.
        costs: costs of its step.
        delayed: for each free that waits for an offload, the action before which the bytes go (`Simulation.delayed`).
        ended: as in `ReplayedStep`.
    """
    released: dict[int, list[int]] = {}
    for freed_at, released_at in delayed.items():
        released.setdefault(released_at, []).append(freed_at)
    walk = _Walk(plan, costs, delayed)
    found = (walk.event(at, *action, tuple(released.get(at, ()))) for at, action in enumerate(plan.actions))
    events, last = [each for each in found if each is not None], len(plan.actions)
    events.append(Event(last, None, ABSENT, tuple(released.get(last, ()))))
    return ReplayedStep(plan.graph, events, ended)


class _Walk:
    """What actions take and give back, as versions of storages come and go."""

    def __init__(self, plan: MemoryPlan, costs: Costs, delayed: Mapping[int, int]) -> None:
        self._graph, self._costs, self._delayed = plan.graph, costs, delayed
        self._sizes = costs.sizes_of(self._graph)
        self._scratch = costs.with_configurations(plan.configurations).scratch_bytes
        self._version = [0 if exists else ABSENT for exists in self._graph.exists_before]
        self._host = [ABSENT] * len(self._sizes)
        self._states = _states(self._graph)
        self._has_updated = False
        self._held: dict[int, int] = {}  # for each storage whose bytes go later the last action that frees it

    def event(self, index: int, kind: ActionKind, target: int, released: tuple[int, ...]) -> Event | None:
        """Return what an action does; None if that is nothing. It comes after those before it."""
        if released:
            self._held = {storage: at for storage, at in self._held.items() if at not in released}
        if kind in COMPUTES:
            return self._computed(index, kind, target, released)
        wanted: Wanted = ()
        freed_at = ABSENT
        if kind is ActionKind.OFFLOAD:
            self._host[target] = self._version[target]
        elif kind is ActionKind.PREFETCH:
            self._version[target] = self._host[target]
            freed_at = self._held.pop(target, ABSENT)
            size = self._sizes[target]
            wanted = ((target, size),) if freed_at == ABSENT and size else ()
        elif kind is ActionKind.FREE:
            self._version[target] = ABSENT
            self._held.pop(target, None)
            if index in self._delayed:
                self._held[target] = freed_at = index
        return Event(index, kind, target, released, (), wanted, freed_at)

    def _computed(self, index: int, kind: ActionKind, target: int, released: tuple[int, ...]) -> Event | None:
        updates = self._graph.operations[target].phase is Phase.OPTIMIZER
        state = self._state(target) if updates else ()
        wanted = self._wanted(target, again=kind is ActionKind.RECOMPUTE)
        if not (wanted or state or released or (updates and not self._has_updated)):
            return None
        self._has_updated |= updates
        return Event(index, kind, target, released, state, wanted, ABSENT, updates)

    def _state(self, target: int) -> Wanted:
        """Return the optimizer's state that an operation is the first to access."""
        operation = self._graph.operations[target]
        found = sorted(self._states.intersection((*operation.reads, *operation.writes)))
        self._states.difference_update(found)
        return tuple((each, self._sizes[each]) for each in found if self._sizes[each])

    def _wanted(self, target: int, *, again: bool) -> Wanted:
        """Return what an operation takes, in the order of allocation, and count up the versions."""
        version, sizes = self._version, self._sizes
        reads = self._graph.operations[target].reads
        found: dict[int, tuple[int, int]] = {}  # by what stands for it in an order of pieces
        for storage, makes in self._graph.makes[target]:
            current, size = version[storage], sizes[storage]
            if size and current == ABSENT:
                found[returned(len(found))] = storage, size
            elif size and again and current >= makes and storage not in reads:
                found[returned(len(found))] = ABSENT, size
            version[storage] = max(current, makes)
        if self._scratch[target] or target in self._costs.scratch_pieces:
            order, _ = self._costs.pieces(target, self._scratch[target])
            ordered = [found.pop(each, (ABSENT, max(0, each))) for each in order]
            return tuple(each for each in (*found.values(), *ordered) if each[1])
        return tuple(found.values())


class StepReplay:
    """Steps of one graph in a space, one after another; each may follow another plan.

    Args:
        graph: the step.
        space: where its pieces lie.
        state_exists: whether the optimizer's state exists before the first step; it lies elsewhere then.
    """

    def __init__(self, graph: StepGraph, space: Space, *, state_exists: bool) -> None:
        self.space = space
        self.pieces: dict[int, Piece] = {}
        self._states = _states(graph)
        self._makes_state = not state_exists
        self._held: dict[int, Piece] = {}  # by the action that frees them, as long as their offloads run

    def step(self, events: Iterable[Event]) -> None:
        """Replay one step."""
        for storage in [*self.pieces]:
            if storage not in self._states:
                self.space.give_back(self.pieces.pop(storage))
        for event in events:
            for freed_at in event.released:
                piece = self._held.pop(freed_at, None)
                if piece is not None:
                    self.space.give_back(piece)
            self.act(event)
        self._makes_state = False

    def act(self, event: Event) -> None:
        """Replay an event, whose released bytes have gone."""
        wanted = event.state + event.wanted if self._makes_state and event.state else event.wanted
        if wanted:
            self.take(event, wanted)
        elif event.kind is ActionKind.FREE:
            piece = self.pieces.pop(event.target, None)
            if piece is None:
                return
            if event.freed_at == ABSENT:
                self.space.give_back(piece)
            else:
                self._held[event.freed_at] = piece
        elif event.freed_at in self._held:
            self.pieces[event.target] = self._held.pop(event.freed_at)

    def take(self, event: Event, wanted: Wanted) -> None:
        """Take the pieces that an event wants."""
        self.assign(wanted, [self.space.take(size) for _, size in wanted])

    def assign(self, wanted: Wanted, pieces: Iterable[Piece]) -> None:
        """Let storages have the pieces that were taken for them, and drop those that do not stay."""
        dropped = []
        for (storage, _), piece in zip(wanted, pieces, strict=True):
            if storage == ABSENT:
                dropped.append(piece)
            else:
                self.pieces[storage] = piece
        for piece in dropped:
            self.space.give_back(piece)


def bytes_before(graph: StepGraph, costs: Costs, *, state_exists: bool) -> int:
    """Return the bytes of the storages that exist before the first step, of which none is replayed."""
    return sum(
        size
        for size, storage, exists in zip(costs.sizes_of(graph), graph.storages, graph.exists_before, strict=True)
        if exists and (state_exists or storage.role is not Role.OPTIMIZER_STATE)
    )


def _states(graph: StepGraph) -> set[int]:
    return {each for each, storage in enumerate(graph.storages) if storage.role is Role.OPTIMIZER_STATE}
