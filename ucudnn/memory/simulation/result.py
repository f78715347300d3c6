"""Simulation: what a plan takes on a device, with its timeline and the life of its bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import starmap
from typing import NamedTuple


class Queue(Enum):
    """The queues of a device; the last one is that of collectives which run beside compute."""

    COMPUTE = "compute"
    TO_HOST = "D2H"
    FROM_HOST = "H2D"
    RANKS = "ranks"

    @property
    def copies(self) -> bool:
        """Whether it copies to or from the host."""
        return self in (Queue.TO_HOST, Queue.FROM_HOST)


class TimelineEntry(NamedTuple):
    """One entry of a timeline.

    Attributes:
        queue: where it runs.
        action: index of the action in the plan.
    """

    queue: Queue
    action: int
    start_ms: float
    end_ms: float


class Lifetime(NamedTuple):
    """A piece of transient memory from when it is taken to when it is given back.

    Attributes:
        storage: the storage that it holds; -1 for the scratch of an operation.
        action: index of the action that takes it.
        begin: when it is taken, counted in events of the simulation.
        end: when it is given back, in the same count; it shares no byte with what is alive in [begin, end).
    """

    storage: int
    action: int
    size: int
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a plan takes on a device.

    `time_ms` is the sum of `compute_ms`, `recompute_ms`, `contention_ms`, `wait_ms` and `memory_stall_ms`.

    Attributes:
        peak_bytes: most bytes that exist at a time, persistent bytes and scratch included.
        time_ms: from the start to the end of the last operation and the last copy.
        compute_ms: time of all operations, each run once, without copies beside them. Collectives that run beside
            compute are not among them.
        recompute_ms: time of all recomputations without copies beside them.
        contention_ms: time that copies add to the operations beside them.
        wait_ms: time in which compute waits for a copy or a collective, at the end of the step too.
        memory_stall_ms: time in which compute waits for memory that an offload will free.
        pinned_bytes: most bytes of the host that are held at a time.
        running_bytes: bytes that exist while each run and recomputation works, scratch included, in the plan's order.
        stalls: (action, storage) where an action waited for memory, and the offload whose end gave it enough.
        timeline: entries in the order of their ends.
        memory: (milliseconds, bytes that exist from then on) at every action that changes them; bytes include scratch.
        delayed: for each free that waited for an offload, by its action, the action before which the bytes are back:
            the number of actions where that is the end.
        ended: by the action of a copy or a collective beside compute, the action before which it has ended, counted as
            those of `delayed`.
        taken: all memory that the step takes and gives back, as fields of lifetimes, in the order of giving back;
            persistent bytes, gradients, outputs and buffers of the plan are not among them.
        issue_ms: time in which the host issues all operations, those that run again included; 0 where it is not known.
        event_ms: the time of each event that lifetimes count, from event 0, in milliseconds. What is taken at an event
            is taken at this time or later, before the next event.
    """

    peak_bytes: int
    time_ms: float
    compute_ms: float
    recompute_ms: float
    contention_ms: float
    wait_ms: float
    memory_stall_ms: float
    offloaded_bytes: int
    prefetched_bytes: int
    pinned_bytes: int
    running_bytes: tuple[int, ...]
    stalls: tuple[tuple[int, int], ...]
    timeline: tuple[TimelineEntry, ...]
    memory: tuple[tuple[float, int], ...]
    delayed: Mapping[int, int]
    ended: Mapping[int, int]
    taken: tuple[tuple[int, int, int, int, int], ...]
    event_ms: tuple[float, ...]
    issue_ms: float = 0.0

    @cached_property
    def lifetimes(self) -> tuple[Lifetime, ...]:
        """All memory that the step takes, in the order of taking; an operation takes its scratch after its storages."""
        found = starmap(Lifetime, self.taken)
        return tuple(sorted(found, key=lambda each: (each.begin, each.action, each.storage < 0, each.storage)))

    @property
    def waits_for_host(self) -> bool:
        """Whether the host takes longer to issue the operations than the device needs for the step."""
        return self.issue_ms > self.time_ms

    @property
    def step_ms(self) -> float:
        """The time of the step: what the device needs, or what the host takes to issue it if that is longer."""
        return max(self.time_ms, self.issue_ms)
