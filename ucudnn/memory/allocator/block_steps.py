"""Steps as a block of large tensors sees them.

Small tensors have a range of their own, so what they take does not depend on the block. It is known before any block is
tried.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

from ucudnn.memory.allocator.placing import Places, places
from ucudnn.memory.allocator.replay import SMALL_BYTES, AllocatorSpace
from ucudnn.memory.allocator.step_replay import Event, Piece, ReplayedStep, StepReplay, Wanted
from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph


class BlockStep(NamedTuple):
    """A step as a block sees it.

    Attributes:
        events: those of large tensors.
        ended: by the action of a copy, the action before which it has ended.
        small_live: bytes of small tensors that are alive before each of the events.
    """

    events: Sequence[Event]
    ended: Mapping[int, int]
    small_live: Sequence[int]


@final
class BlockSteps:
    """Steps of a plan as blocks see them.

    Args:
        step: a step by the plan.
        costs: its costs.
        state_exists: whether the optimizer's state exists before the first step.
        first: what the first step follows; None for the plan itself.

    Attributes:
        small_bytes: pages of small tensors.
        large_bytes: most bytes of large tensors that are alive.
        before_update: the same before the first update.
        led: how they run in a block in which pieces are led to places (`Compaction`), by all that this follows from.
    """

    def __init__(
        self, step: ReplayedStep, costs: Costs, *, state_exists: bool = False, first: ReplayedStep | None = None
    ) -> None:
        self.graph, self.costs, self.follows_other = step.graph, costs, first is not None
        replay = _SmallTensors(self.graph, state_exists=state_exists)
        self.first, self.later = replay.without(first or step), replay.without(step)
        self.small_bytes = replay.small.reserved
        forward = [each for each in self.first.events if not each.updates]
        self.before_update = _most_bytes(self.graph, forward)
        self.large_bytes = _most_bytes(self.graph, self.first.events, self.later.events)
        self._places: dict[tuple[bool, bool], Places] = {}
        self.led: dict[object, Any] = {}

    def places(self, *, first: bool, coarse: bool) -> Places:
        """Return where the pieces of the first step lie, or of those after it; coarse as in `places`."""
        key = first and self.follows_other, coarse
        if key not in self._places:
            step, enough = self.later, 0
            if key[0]:  # the block must hold both steps, so the first one need not take less than those after it
                step, enough = self.first, self.places(first=False, coarse=coarse).extent
            self._places[key] = places(self.graph, step.events, coarse=coarse, enough=enough)
        return self._places[key]


class _LiveBytes:
    """A space of which nobody asks addresses: the bytes that are alive in it, and the most of them."""

    def __init__(self) -> None:
        self.live = self.most = 0

    def take(self, size: int) -> Piece:
        self.live += size
        self.most = max(self.most, self.live)
        return 0, size

    def give_back(self, piece: Piece) -> None:
        self.live -= piece[1]


class _SmallTensors(StepReplay):
    """Steps of the small tensors alone, which leave those of the large ones."""

    def __init__(self, graph: StepGraph, *, state_exists: bool) -> None:
        self.small = AllocatorSpace()
        super().__init__(graph, self.small, state_exists=state_exists)
        self._events: list[Event] = []
        self._live: list[int] = []

    def without(self, step: ReplayedStep) -> BlockStep:
        self._events, self._live = [], []
        self.step(step.events)
        return BlockStep(self._events, step.ended, self._live)

    def act(self, event: Event) -> None:
        wanted = event.state + event.wanted if self._makes_state and event.state else event.wanted
        large = tuple(each for each in wanted if each[1] > SMALL_BYTES)
        small = wanted if not large else tuple(each for each in wanted if each[1] <= SMALL_BYTES)
        large = large if small else wanted
        is_small = small or (event.kind is ActionKind.FREE and event.target in self.pieces)
        if large or event.released or not is_small:
            self._events.append(_with(event, large))
            self._live.append(self.small.live)
        super().act(_with(event, small))


def _with(event: Event, wanted: Wanted) -> Event:
    """Return an event with what it wants in a step that makes no state beside that, faster than by `_replace`."""
    return event if wanted is event.wanted and not event.state else Event(*event[:4], (), wanted, *event[6:])


def _most_bytes(graph: StepGraph, *steps: Sequence[Event]) -> int:
    """Return the most bytes that are alive in steps that follow one another."""
    space = _LiveBytes()
    replay = StepReplay(graph, space, state_exists=True)
    for events in steps:
        replay.step(events)
    return space.most
