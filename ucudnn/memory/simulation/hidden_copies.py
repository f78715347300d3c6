"""Hidden copies: for how long copies run while a device computes, so that they cost nothing."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

from ucudnn.memory.simulation.result import Queue, Simulation


class DeviceWork(NamedTuple):
    """A piece of work of a device, or several of the same queue without a gap between them.

    Attributes:
        begin_ms: its begin, in milliseconds since the step began.
    """

    begin_ms: float
    end_ms: float


def merged(pieces: Iterable[tuple[float, float]]) -> tuple[DeviceWork, ...]:
    """Return pieces in the order of time, those that overlap or touch as one."""
    found: list[DeviceWork] = []
    for begin, end in sorted(pieces):
        if found and begin <= found[-1].end_ms:
            found[-1] = DeviceWork(found[-1].begin_ms, max(end, found[-1].end_ms))
        else:
            found.append(DeviceWork(begin, end))
    return tuple(found)


def share_beside(copies: Sequence[DeviceWork], compute: Sequence[DeviceWork]) -> float | None:
    """Return the share of the copies' time during which compute works; None without copies."""
    total = sum(end - begin for begin, end in copies)
    pairs = product(copies, compute)
    beside = sum(max(0.0, min(copy.end_ms, end) - max(copy.begin_ms, begin)) for copy, (begin, end) in pairs)
    return beside / total if total else None


def planned_overlap(simulation: Simulation, *, collectives: bool = False) -> float | None:
    """Return the share of the copies' or collectives' time during which a simulated plan computes; None without any."""
    lanes: dict[bool, list[DeviceWork]] = {True: [], False: []}
    for queue, _, begin, end in simulation.timeline:
        if queue is Queue.COMPUTE or queue.copies is not collectives:
            lanes[queue is Queue.COMPUTE].append(DeviceWork(begin, end))
    return share_beside(lanes[False], merged(lanes[True]))
