"""Host slots: where the storages that a plan offloads lie in one block of pinned host memory.

A storage has one slot, from its first offload to the first wait behind its last prefetch. From then on other storages
may have the bytes. All lifetimes are known before the step runs, so planned placement divides the block.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.pools.planned import PlannedPool
from ucudnn.memory.simulation.result import Lifetime

_ALIGNMENT = 512  # bytes; copies between aligned addresses are fastest


@dataclass(frozen=True, kw_only=True)
class HostSlots:
    """The places of offloaded storages in one block of host memory.

    Attributes:
        sizes: bytes of each storage that has a slot, by its number.
        addresses: the first byte of its slot, counted from the begin of the block.
    """

    sizes: Mapping[int, int]
    addresses: Mapping[int, int]
    extent_bytes: int


def plan_host_slots(plan: MemoryPlan) -> HostSlots:
    """Return the slots of all storages that a plan offloads; two share bytes only where their lifetimes do not meet.

    A storage that is never fetched back, or whose prefetch nothing waits for, has its slot until the end of the step.
    """
    actions, sizes = plan.actions, plan.graph.sizes
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    arriving: set[int] = set()
    for index, (kind, target) in enumerate(actions):
        if kind is ActionKind.OFFLOAD:
            begins.setdefault(target, index)
            ends[target] = len(actions)
        elif kind is ActionKind.PREFETCH:
            ends[target] = len(actions)
            arriving.add(target)
        elif kind in (ActionKind.WAIT, ActionKind.SYNCHRONIZE):
            for storage in sorted(arriving) if kind is ActionKind.SYNCHRONIZE else arriving & {target}:
                ends[storage] = index
                arriving.discard(storage)
    lifetimes = [
        Lifetime(storage, begin, -(-sizes[storage] // _ALIGNMENT) * _ALIGNMENT, begin, ends[storage])
        for storage, begin in begins.items()
        if sizes[storage]
    ]
    placed = PlannedPool().place(lifetimes)
    addresses = {life.storage: address for life, address in zip(placed.lifetimes, placed.addresses, strict=True)}
    return HostSlots(
        sizes={storage: sizes[storage] for storage in begins},
        addresses={storage: addresses.get(storage, 0) for storage in begins},
        extent_bytes=placed.extent_bytes,
    )
