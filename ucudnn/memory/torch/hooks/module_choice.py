"""Chooses the modules that are called again in backward, by the profile of a step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, final

from torch import nn

_LEAST_PART = 1000  # of the bytes that are too many; to call a module again takes the host time, too
_PARTS = (2, 4, 8, 16, 32)  # of the limit, what one call may save: all of it is there while it is called again


@final
@dataclass(slots=True, eq=False)
class Call:
    """A call of a module in a step that is recorded.

    Attributes:
        given: keys of the storages of its arguments.
        size: bytes that it saves, those of its arguments and its output left out.
        begin, end: marks in the work of the device.
        ended_at, back_at: the last event of the step before it ended, and the first that reads what it saved, counted
            from 1; 0 where nothing has read it.
    """

    given: set[int | None]
    begin: Any
    end: Any = None
    size: int = 0
    ended_at: int = 0
    back_at: int = 0


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
    found = [_greedy([each for each in fitting if each.largest * part < limit], [*excess]) for part in _PARTS]
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
