"""Actions: the steps of a plan, in the order in which a host program issues them.

There are three queues. `run` and `recompute` go to the compute queue, `offload` to the queue to the host (D2H),
`prefetch` to the queue from the host (H2D). Each queue works in the order of issue. A copy begins no earlier than all
compute that was issued before it has ended, so a copy that stands before `run(i)` runs beside operation i. Compute does
not wait for a copy unless a `wait` says so.

Memory is taken and given back in the order of issue, too: a `run` or `recompute` takes its scratch and those storages
that it writes and that are absent; a `prefetch` takes its storage. Only a `free` of a storage whose offload still runs
takes effect later, when the copy has ended; where an operation ends at the same instant as the copy, the bytes are back
before the next action takes any. A `prefetch` before that takes none: the storage keeps its bytes, which the copy back
overwrites with the same, as soon as the copy to the host has ended. This is how the systems of the papers read:

* vDNN offloads X of layer n beside it and synchronizes: `offload(x) run(n) synchronize() free(x)`.
* vDNNExt frees without waiting: `offload(x) run(n) free(x)`, where the free takes effect when both have ended.
* Layer m prefetches for layer j: `prefetch(x) run(m) ... wait(x) run(j)`.
* Recomputation: `free(y) ... recompute(k) run(j)`, where operation k makes the bytes of y again and j reads them.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, NamedTuple


class ActionKind(Enum):
    """What an action does; the number of an action names an operation or a storage of the step."""

    __hash__ = object.__hash__  # that of an enumeration is Python code, and walks look each action's kind up

    RUN = "run"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    PREFETCH = "prefetch"
    FREE = "free"
    WAIT = "wait"
    SYNCHRONIZE = "synchronize"


COMPUTES = (ActionKind.RUN, ActionKind.RECOMPUTE)
"""Kinds that go to the compute queue."""
COPIES = (ActionKind.OFFLOAD, ActionKind.PREFETCH)
"""Kinds that go to the queues of copies."""


class Action(NamedTuple):
    """One action of a plan.

    Attributes:
        target: index of an operation (run, recompute) or of a storage; -1 where it needs none (synchronize).
    """

    kind: ActionKind
    target: int


def follow(actions: Sequence[Action], walk: Any) -> None:
    """Call what an object has by the name of each action's kind with the target; `at` is the action's index then."""
    calls = {kind: getattr(walk, kind.value) for kind in ActionKind}
    for walk.at, (kind, target) in enumerate(actions):
        calls[kind](target)


class Move(NamedTuple):
    """Storages that move to other places in the device's memory, one after another; their bytes stay the same.

    A storage that slides gives its place back before it takes another one. So it needs no bytes beside its own, and its
    new place may overlap the old one. Else both places are alive while the bytes are copied.

    Where no storage moves, the pads stay until the action behind has ended, so that it takes memory elsewhere.

    Attributes:
        pads: bytes of tensors that are held meanwhile, each as large as a hole, so that no storage moves there.
        opens: those among the pads that are freed before the action takes memory, by their places.
    """

    pads: tuple[int, ...]
    storages: tuple[int, ...]
    slides: bool = False
    opens: tuple[int, ...] = ()


Moves = Mapping[int, tuple[Move, ...]]
"""What moves before an action, by the action's index."""


@cache
def run(operation: int) -> Action:
    """Run an operation of the step; every operation runs exactly once."""
    return Action(ActionKind.RUN, operation)


@cache
def recompute(operation: int) -> Action:
    """Run an operation again, to make bytes again that were freed.

    Storages that are absent, or present in an older version, get the version that the operation makes. A storage that
    is present in this version or a newer one keeps its bytes: what the operation makes of it is dropped when it ends.
    Parameters, buffers, inputs and optimizer state are never written again.
    """
    return Action(ActionKind.RECOMPUTE, operation)


@cache
def offload(storage: int) -> Action:
    """Copy a storage to pinned host memory; it stays on the device until a `free`."""
    return Action(ActionKind.OFFLOAD, storage)


@cache
def prefetch(storage: int) -> Action:
    """Take memory for a storage, unless it has it still, and copy it back from the host; access it after a `wait`."""
    return Action(ActionKind.PREFETCH, storage)


@cache
def free(storage: int) -> Action:
    """Give back the memory of a storage: at once, or when its offload has ended."""
    return Action(ActionKind.FREE, storage)


@cache
def wait(storage: int) -> Action:
    """Let compute wait until the copies of a storage have ended."""
    return Action(ActionKind.WAIT, storage)


def synchronize() -> Action:
    """Let compute wait until all copies in both directions have ended."""
    return Action(ActionKind.SYNCHRONIZE, -1)


MOST_COPIES = 64
"""Copies of a slide at most. Each takes the host 2 to 4 us and a GPU 3 us, so all of them take at most 0.25 ms."""


def slide_copies(source: int, target: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, bytes) of copies in whose order no byte is overwritten before it was copied.

    Each has at most as many bytes as lie between both places. Bytes that go to lower addresses are copied from the
    first one on, others from the last one on.
    """
    step = abs(target - source)
    if not step:
        return
    offsets = range(0, size, step)
    for offset in offsets if target < source else reversed(offsets):
        yield offset, min(step, size - offset)


def count_copies(source: int, target: int, size: int) -> int:
    """Return the number of copies of a slide; arguments as those of `slide_copies`."""
    return -(-size // abs(target - source)) if target != source else 0
