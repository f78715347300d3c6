"""The measured timeline and memory of a step: what a device computed and copied when, and what operations took.

On a GPU PyTorch's profiler (CUPTI) sees each kernel and each copy. On a CPU a copy is part of the program: transfers
measure it, all other time counts as compute, and nothing overlaps.

Memory is measured in a step of its own. The plan's code marks each operation there, and PyTorch's profiler sees every
allocation between the marks. That is the order in which the host calls operators, which is the plan's. A GPU runs them
later, but what its allocator hands out follows the host.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, final

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ucudnn.memory.plans.actions import COMPUTES
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.reports.plan_summary import COPIES, Lane, plan_lanes, plan_phases
from ucudnn.memory.simulation.hidden_copies import DeviceWork, merged, share_beside
from ucudnn.memory.simulation.result import Queue, Simulation
from ucudnn.memory.torch.codegen.code_support import MARK
from ucudnn.memory.torch.measuring.measured_peak import memory_between_marks
from ucudnn.memory.torch.measuring.training_step import TrainingStep
from ucudnn.memory.torch.running.fitted_step import FittedStep
from ucudnn.memory.torch.running.transfers import Transfers
from ucudnn.plots.bands import QueuePicture
from ucudnn.units import format_bytes

_COPIES = {"Memcpy DtoH": Queue.TO_HOST, "Memcpy HtoD": Queue.FROM_HOST}  # by beginnings of CUPTI's names


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimeline:
    """What a device did during one step: the work of each queue in the order of time, and the end of the last piece.

    Pieces of one queue do not overlap.
    """

    lanes: Mapping[Queue, tuple[DeviceWork, ...]]
    end_ms: float

    def busy_ms(self, queue: Queue) -> float:
        """Return for how long a queue worked."""
        return sum(end - begin for begin, end in self.lanes[queue])

    @property
    def overlap(self) -> float | None:
        """The share of the copies' time during which the device computed; None without copies."""
        copies = [*self.lanes[Queue.TO_HOST], *self.lanes[Queue.FROM_HOST]]
        return share_beside(copies, self.lanes[Queue.COMPUTE])


def measure_timeline(
    run: Callable[[], object], device: torch.device, transfers: Transfers | None
) -> MeasuredTimeline | None:
    """Return the timeline of one step; None where the profiler cannot see the device.

    Without a plan there are no transfers.
    """
    return _on_gpu(run) if device.type == "cuda" else _on_cpu(run, transfers)


def beside_prediction(
    plan: MemoryPlan,
    simulation: Simulation,
    timeline: MeasuredTimeline,
    allocated: int,
    library: int,
    memory: Sequence["OperationMemory"] = (),
) -> QueuePicture:
    """Return the measured lanes of a plan below the predicted ones, and the measured memory over the predicted one.

    Both curves of memory have the predicted times, so that bytes of the same operation stand above each other. The plan
    does not know the bytes that libraries keep in the allocator.
    """
    lanes: dict[str, Lane] = dict(plan_lanes(plan, simulation))
    for queue, work in timeline.lanes.items():
        lanes[f"{queue.value}, measured"] = [(COPIES.get(queue, "measured compute"), *piece) for piece in work]
    peak = simulation.peak_bytes + library
    return QueuePicture(
        lanes=lanes,
        memory=[(time, size + library) for time, size in simulation.memory],
        end_ms=max(simulation.time_ms, timeline.end_ms),
        marks=[(f"predicted {format_bytes(peak)}", peak), (f"measured {format_bytes(allocated)}", allocated)],
        phases=plan_phases(plan, simulation),
        measured=[(each.begin_ms, each.measured_bytes) for each in memory],
    )


def _on_gpu(run: Callable[[], object]) -> MeasuredTimeline | None:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    results: Any = profiler.profiler
    found: dict[Queue, list[tuple[float, float]]] = {queue: [] for queue in Queue}
    for event in results.kineto_results.events():
        if event.device_type() == DeviceType.CUDA and event.duration_ns():
            begin = event.start_ns() / 1e6
            queue = next((each for name, each in _COPIES.items() if event.name().startswith(name)), Queue.COMPUTE)
            found[queue].append((begin, begin + event.duration_ns() / 1e6))
    if not found[Queue.COMPUTE]:
        return None
    start = min(begin for pieces in found.values() for begin, _ in pieces)
    return _timeline({queue: [(b - start, e - start) for b, e in pieces] for queue, pieces in found.items()})


def _on_cpu(run: Callable[[], object], transfers: Transfers | None) -> MeasuredTimeline:
    if transfers is not None:
        transfers.start_log()
    begin_ms = perf_counter() * 1e3
    run()
    end_ms = perf_counter() * 1e3 - begin_ms
    found: dict[Queue, list[tuple[float, float]]] = {queue: [] for queue in Queue}
    now = 0.0
    for to_host, *times in transfers.end_log() if transfers is not None else []:
        begin, end = (time - begin_ms for time in times)
        found[Queue.TO_HOST if to_host else Queue.FROM_HOST].append((begin, end))
        found[Queue.COMPUTE].append((now, begin))
        now = end
    found[Queue.COMPUTE].append((now, max(now, end_ms)))
    return _timeline(found)


def _timeline(found: Mapping[Queue, Sequence[tuple[float, float]]]) -> MeasuredTimeline:
    lanes = {queue: merged(pieces) for queue, pieces in found.items()}
    return MeasuredTimeline(lanes=lanes, end_ms=max(lane[-1].end_ms for lane in lanes.values() if lane))


_UPDATE = "Optimizer.step#"  # begin of the name that PyTorch gives an update


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OperationMemory:
    """The memory while one operation of a plan, or the whole optimizer's update, runs.

    It begins when it is predicted to. The predicted bytes are those of the plan and of libraries; the measured ones are
    the most that existed, scratch included.
    """

    operation: str
    begin_ms: float
    predicted_bytes: int
    measured_bytes: int


def measure_memory(step: TrainingStep, fitted: FittedStep, library: int) -> tuple[OperationMemory, ...]:
    """Take one step of a plan, which has run before, and return its memory, operation by operation in the plan's order.

    The plan does not know the bytes that libraries keep in the allocator.
    """
    with fitted.marked():
        marks = dict(memory_between_marks(step, (MARK, _UPDATE)))
    begins = {action: begin for queue, action, begin, _ in fitted.simulation.timeline if queue is Queue.COMPUTE}
    graph = fitted.plan.graph
    ran = [(index, target) for index, (kind, target) in enumerate(fitted.plan.actions) if kind in COMPUTES]
    found: list[tuple[str, float, int, int]] = []
    update: list[tuple[float, int]] = []
    for (action, target), predicted in zip(ran, fitted.simulation.running_bytes, strict=True):
        if (mark := f"{MARK}{action}") in marks:
            found.append((graph.operation_name(target), begins[action], predicted + library, marks[mark]))
        else:
            update.append((begins[action], predicted + library))
    measured = [size for name, size in marks.items() if name.startswith(_UPDATE)]
    if update and measured:
        found.append(("optimizer", update[0][0], max(size for _, size in update), max(measured)))
    return tuple(
        OperationMemory(operation=name, begin_ms=begin, predicted_bytes=predicted, measured_bytes=size)
        for name, begin, predicted, size in found
    )
