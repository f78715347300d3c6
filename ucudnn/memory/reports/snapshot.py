"""A plan as a snapshot of PyTorch's memory visualizer (https://pytorch.org/memory_viz), as if it had run.

The format is that of `torch.cuda.memory._snapshot()`: a pickled dictionary with the segments of the allocator and a
trace of what it handed out and got back. Here a segment holds what exists before or after the step, and another one is
the pool of the plan, placed with all lifetimes known. Each piece names its storage, its operation, its layer and its
source line.
"""

import pickle
from typing import Any

from ucudnn.memory.plans.actions import COMPUTES, ActionKind
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.pools.planned import PlannedPool
from ucudnn.memory.simulation.result import Simulation
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.costs import Costs

_POOL = 0x7F00_0000_0000  # addresses: any would do, if the segments lie apart
_FIXED = 0x7E00_0000_0000
_Entry = dict[str, Any]


def encode_snapshot(plan: MemoryPlan, costs: Costs) -> bytes:
    """Return the snapshot of a plan as the bytes of its file."""
    return pickle.dumps(plan_snapshot(plan, costs), protocol=4)


def plan_snapshot(plan: MemoryPlan, costs: Costs) -> dict[str, Any]:
    """Return the snapshot of a plan: segments, and a trace in microseconds since the step began."""
    done = simulate(plan, costs)
    placement = PlannedPool().place(done.lifetimes)
    fixed, born, fixed_bytes = _fixed(plan, costs, done)
    pieces = [
        (_POOL + address, life, _frames(plan, life.storage, life.action))
        for address, life in zip(placement.addresses, placement.lifetimes, strict=True)
        if life.size
    ]
    events = [(event, 1, entry) for event, entry in born]
    for address, life, frames in pieces:
        begin, end = (done.event_ms[event] * 1e3 for event in (life.begin, life.end))
        events.append((life.begin, 2, _entry("alloc", address, life.size, begin, frames)))
        for action in ("free_requested", "free_completed"):
            events.append((life.end, 0, _entry(action, address, life.size, end, frames)))
    events.sort(key=lambda event: event[:2])  # at one event, memory is given back before it is taken
    segments = ((_FIXED, fixed_bytes), (_POOL, placement.extent_bytes))
    trace = [_entry("segment_alloc", base, size, 0.0, []) for base, size in segments]
    return {
        "segments": [_segment(_FIXED, fixed_bytes, fixed), _segment(_POOL, placement.extent_bytes, [])],
        "device_traces": [trace + [entry for *_, entry in events]],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _fixed(plan: MemoryPlan, costs: Costs, done: Simulation) -> tuple[list[_Entry], list[tuple[int, _Entry]], int]:
    """Return blocks of what exists after the step, event and entry of those that the step makes, and all bytes."""
    graph, first = plan.graph, dict[int, int]()
    for index, (kind, target) in enumerate(plan.actions):
        for storage in graph.operations[target].writes if kind is ActionKind.RUN else ():
            first.setdefault(storage, index)
    blocks, born = [], []
    address = _FIXED
    for storage, stays in enumerate(graph.exists_after):
        size = costs.rounded(graph.sizes[storage])
        if not stays or not size:
            continue
        action = first.get(storage, -1)
        frames = _frames(plan, storage, action)
        if not graph.exists_before[storage]:
            # The event at which the action takes memory is that of its other pieces, or of the next action with some.
            events = (life.begin for life in done.lifetimes if life.action >= action)
            event = min(events, default=len(done.event_ms) - 1)
            born.append((event, _entry("alloc", address, size, done.event_ms[event] * 1e3, frames)))
        block = {"address": address, "size": size, "requested_size": size, "state": "active_allocated"}
        blocks.append({**block, "frames": frames})
        address += size
    return blocks, born, address - _FIXED


def _segment(address: int, size: int, blocks: list[_Entry]) -> _Entry:
    used = sum(block["size"] for block in blocks)
    free = {"address": address + used, "size": size - used, "requested_size": 0, "state": "inactive", "frames": []}
    sizes = {"total_size": size, **dict.fromkeys(("allocated_size", "active_size", "requested_size"), used)}
    kind = {"segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False}
    place = {"device": 0, "stream": 0, "address": address, "frames": []}
    return {**place, **sizes, **kind, "blocks": [*blocks, *([free] if size > used else [])]}


def _entry(action: str, address: int, size: int, time_us: float, frames: list[_Entry]) -> _Entry:
    place = {"device": 0, "stream": 0, "addr": address, "size": size}
    return {**place, "action": action, "time_us": int(time_us), "frames": frames}


def _frames(plan: MemoryPlan, storage: int, action: int) -> list[_Entry]:
    """Return who asks for memory, the innermost first: the storage, its action, its layer."""
    graph = plan.graph
    what = f"storage {graph.storages[storage].name}" if storage >= 0 else "scratch"
    if action < 0:
        return [_frame(what)]
    kind, target = plan.actions[action]
    if kind not in COMPUTES:
        return [_frame(what), _frame(kind.value)]
    operation = graph.operations[target]
    file, _, line = operation.source.rpartition(":")
    named = [_frame(what), _frame(f"{kind.value} {operation.name}", file, line)]
    return [*named, _frame(operation.module)] if operation.module else named


def _frame(name: str, file: str = "", line: str = "") -> _Entry:
    return {"name": name, "filename": file or "plan", "line": int(line) if line.isdigit() else 0}
