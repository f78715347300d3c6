"""Chooses the modules that are called again in backward, by the profile of a step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any, final

import torch
from torch import nn

from ucudnn.memory.torch.device.step_clock import passed_ms

_LEAST_PART = 1000  # of the bytes that are too many; to call a module again takes the host time, too
_PARTS = (2, 4, 8, 16, 32)  # of the limit, what one call may save: all of it is there while it is called again
_LEAST_PARTS = (32, 128, 512)  # of the limit, what a module saves at least: parts of it are in the way of it
_RARELY = 4  # to this power, the part of the time in which a device or its host computes is how far its time counts
_STARVED = 0.15  # a device that takes as long as the host, up to this part, waits for it


@final
@dataclass(slots=True, eq=False)
class Call:
    """A call of a module in a step that is recorded.

    Attributes:
        given: keys of the storages of its arguments.
        size: bytes that it saves, those of its arguments and its output left out.
        begin, end: marks in the work of the device.
        host_ms: milliseconds of the host, without those that it takes to follow and guard what runs.
        passed_ms: those and the others.
        waits: marks before and behind each copy or piece of memory for which the device waited meanwhile.
        inner: the calls in it that are in no other one in it.
        starves: whether a GPU had begun with it before all of it was issued, so that it may have waited for the host.
        ended_at, back_at: the last event of the step before it ended, and the first that reads what it saved, counted
            from 1; 0 where nothing has read it.
    """

    given: set[int | None]
    begin: Any
    end: Any = None
    size: int = 0
    ended_at: int = 0
    back_at: int = 0
    host_ms: float = 0.0
    passed_ms: float = 0.0
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    inner: list["Call"] = field(default_factory=list)
    starves: bool = False

    def device_ms(self) -> float:
        """Return what the call takes a device, which has ended it. What it waited for memory does not count.

        While steps are learned, the host takes several times as long for a call as later. So a GPU that waits for the
        host says nothing but that it takes no longer than that.
        """
        inner = self.inner
        starves = self.starves and (not inner or any(each.starves for each in inner))
        device_ms = passed_ms(self.begin, self.end) - sum(passed_ms(each.begin, each.end) for each in inner)
        host_ms = self.passed_ms - sum(each.passed_ms for each in inner)
        if starves and abs(device_ms - host_ms) < _STARVED * host_ms:
            device_ms = min(device_ms, max(0.0, self.host_ms - sum(each.host_ms for each in inner)))
        else:
            device_ms -= self.waited_ms() - sum(each.waited_ms() for each in inner)
        return max(0.0, device_ms) + sum(each.device_ms() for each in inner)

    def waited_ms(self) -> float:
        """Return the milliseconds for which the device waited for memory."""
        return sum(passed_ms(*each) for each in self.waits)


@final
@dataclass(slots=True)
class ModuleUse:
    """What is known of a module.

    Attributes:
        calls: its calls in this step, as far as they were recorded.
        size: bytes that its largest call saved.
        same_bits: whether a call that is repeated saves the same bits; None where that was not tried.
        repeated: whether calls drop what they save, or do so once they were tried.
        stays: whether what calls save themselves stays where it is, so that no hook need see it.
        unseen: whether what all in it save stays and none is repeated, so that no call in it is followed.
        sizes: those of the tensors that its last call was given, and their types, if it was in no other one; else None.
        passed_ms: milliseconds that its last recorded call took the host while no queue was kept.
        host_ms: the least that its calls of a step took the host without what it takes to record and guard them.
        device_ms: what those of the last recorded step take the device.
    """

    calls: list[Call] = field(default_factory=list)
    size: int = 0
    same_bits: bool | None = None
    repeated: bool = False
    stays: bool = False
    unseen: bool = False
    sizes: list[tuple[torch.Size, torch.dtype]] | None = None
    passed_ms: float = 0.0
    host_ms: float = inf
    device_ms: float = 0.0


@final
@dataclass(slots=True, eq=False)
class RepeatableModule:
    """A module that may be called again: its calls, their milliseconds and bytes, and the modules in it."""

    module: nn.Module
    calls: list[Call]
    ms: float
    inside: set[nn.Module]
    size: int = field(init=False)
    largest: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(each.size for each in self.calls)
        self.largest = max(each.size for each in self.calls)

    def drop(self, excess: list[int], sign: int) -> None:
        """Subtract from the profile what the calls save while nothing reads it, which may be beyond its end."""
        for each in self.calls:
            for at in range(each.ended_at + 1, min(each.back_at + 1, len(excess))):
                excess[at] -= sign * each.size


def weights(device_ms: float, host_ms: float) -> tuple[float, float]:
    """Return how far times of a device and of its host count, by what all calls take them. The longer counts fully."""
    longest = max(device_ms, host_ms)
    return ((device_ms / longest) ** _RARELY, (host_ms / longest) ** _RARELY) if longest else (1.0, 0.0)


def choose_modules(
    candidates: Iterable[RepeatableModule],
    demand: list[int],
    limit: int,
    most_ms_per_byte: float,
    allowed: Callable[[nn.Module], bool],
) -> tuple[list[RepeatableModule], int]:
    """Return modules to call again, and the bytes that are too many even so.

    Args:
        candidates: those that may be called again as far as was seen.
        demand: bytes of each event of the step.
        limit: the most that an event may have.
        most_ms_per_byte: what copies to the host take; nothing dearer is chosen.
        allowed: whether a module may be called again at all.
    """
    excess = [size - limit for size in (0, *demand)]
    least = max(excess) // _LEAST_PART
    fitting = [
        each
        for each in candidates
        if least < each.size
        and each.largest * _PARTS[0] < limit
        and each.ms < most_ms_per_byte * each.size
        and all(call.back_at for call in each.calls)
        and allowed(each.module)
    ]
    bounds = [*((part, limit) for part in _PARTS), *((_PARTS[0], part) for part in _LEAST_PARTS)]
    found = [
        _greedy([each for each in fitting if each.largest * most < limit <= each.size * least], [*excess])
        for most, least in bounds
    ]
    return min(found, key=lambda each: sum(one.ms for one in each[0]) + each[1] * most_ms_per_byte)


def _greedy(fitting: list[RepeatableModule], excess: list[int]) -> tuple[list[RepeatableModule], int]:
    """Choose the module with the least time for each byte at the worst event, until none is too many or helps.

    What turns out not to be needed is left out again.
    """
    chosen = list[RepeatableModule]()
    while max(excess) > 0:
        at = excess.index(max(excess))
        covering = [each for each in fitting if any(call.ended_at < at <= call.back_at for call in each.calls)]
        if not covering:
            break
        best = min(covering, key=lambda each: each.ms / each.size)
        best.drop(excess, 1)
        chosen.append(best)
        fitting = [each for each in fitting if each.module not in best.inside and best.module not in each.inside]
    left = max(0, *excess)
    for each in sorted(chosen, key=lambda each: -each.ms):
        each.drop(excess, -1)
        if max(excess) > left:
            each.drop(excess, 1)
        else:
            chosen.remove(each)
    return chosen, left
