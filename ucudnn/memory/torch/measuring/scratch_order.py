"""In which pieces and in which order a call of an operator allocates its scratch, by the record of PyTorch's allocator.

A convolution whose gradient is not contiguous copies it first, for instance, then allocates what it returns, and then
a workspace. What it returns lies elsewhere than where it would lie without the copy. A bias's gradient comes last, when
the workspace has been freed. Compiled code allocates what it returns in the order of its kernels.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ucudnn.memory.allocator.replay import SMALL_BYTES
from ucudnn.memory.step.costs import ScratchPieces, returned

_MOST_EVENTS = 10_000
_TAKES, _FREES = "alloc", "free_completed"
_Found = TypeVar("_Found")


class AllocatorEvent(NamedTuple):
    """An entry of the allocator's record: 'alloc', 'free_completed' or something else, an address, and bytes."""

    kind: str
    address: int
    size: int


def scratch_pieces(events: Sequence[AllocatorEvent], results: Sequence[int]) -> ScratchPieces | None:
    """Return what is there when a call has allocated the most, by the events during it.

    `results` are the addresses of what the call returned, in order. The answer is None where the pieces say nothing
    new: the call allocates its results above 1 MiB in order, all of them are there at that time, and at most one piece
    of scratch comes behind them.
    """
    last = {each.address: place for place, each in enumerate(events) if each.kind == _TAKES}
    own = [address for address in dict.fromkeys(results) if address in last]
    numbers = {last[address]: returned(number) for number, address in enumerate(own)}
    live: dict[int, tuple[int, int]] = {}  # bytes of each piece, and what stands for it
    most, order, later = 0, list[int](), list[AllocatorEvent]()
    for place, each in enumerate(events):
        if each.kind == _TAKES:
            live[each.address] = each.size, numbers.get(place, each.size)
            later += [each] if place in numbers else []
        elif each.kind == _FREES:
            live.pop(each.address, None)
        now = sum(size for size, _ in live.values())
        if now > most:
            most, order = now, [stands for _, stands in live.values()]
            later.clear()
    order += [numbers[last[each.address]] for each in later]
    pieces = ScratchPieces(tuple(order), tuple(each.size for each in later))
    small = {returned(number) for number, address in enumerate(own) if events[last[address]].size <= SMALL_BYTES}
    large = [each for each in order if each not in small]
    plain = [*sorted((each for each in large if each < 0), reverse=True), *pieces.scratch]
    return None if large == plain and len(pieces.scratch) <= 1 and not later else pieces


def with_scratch_pieces(call: Callable[[], _Found], device: torch.device) -> tuple[_Found, ScratchPieces | None]:
    """Return what a call returns, and the pieces of its scratch on a GPU; None as in `scratch_pieces`.

    No other thread may allocate meanwhile. There are no pieces, either, if somebody else records what the allocator
    does, because that record stays as it is.
    """
    records: Any = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    if records is None or records():
        return call(), None
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=_MOST_EVENTS)
    try:
        earlier = len(_events(device))  # an earlier record, which not every PyTorch forgets at its end
        found = call()
        events = _events(device)[earlier:]
    finally:
        torch.cuda.memory._record_memory_history(None)
    tensors = [each for each in tree_leaves(found) if isinstance(each, Tensor) and each.is_cuda]
    return found, scratch_pieces(events, [each.untyped_storage().data_ptr() for each in tensors])


def _events(device: torch.device) -> list[AllocatorEvent]:
    snapshot: Any = torch.cuda.memory._snapshot()
    index = torch.cuda.current_device() if device.index is None else device.index
    entries = snapshot["device_traces"][index]
    return [AllocatorEvent(each["action"], each.get("addr", 0), each["size"]) for each in entries]
