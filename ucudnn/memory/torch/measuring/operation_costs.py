"""Measures the operations of a step one by one on its device, before the step runs: time, and scratch on a GPU.

The operands of an operation are made for it and freed after it, so measuring takes no more memory than the operation
itself. Operations that are alike are measured once. The first call lets cuDNN and cuBLAS choose their kernels; what
they choose stays, so the step runs what was measured.

cuDNN's trials (`torch.backends.cudnn.benchmark`) are remembered for each thread apart (`benchmark_cache` in
`aten/src/ATen/native/cudnn/Conv_v8.cpp`). So operations of backward are measured in the thread that runs backward, and
where there are trials, those of forward, too, because they may be computed again there. Otherwise the first step would
try algorithms, with workspaces that no plan knows.

Measuring keeps the budget, too. PyTorch's allocator may take no more than what the budget leaves beside the storages
that stay, so cuDNN chooses among algorithms whose workspace fits. An operation that does not run within that keeps its
estimated time, and its scratch is bounded by that of its like.

On a GPU the operations that take the most time run beside copies, too: from them comes the contention of all.
"""

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.step.costs import Costs, ScratchPieces
from ucudnn.memory.step.graph import Phase, StepGraph
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.torch.device.allocator import AllocatorCap
from ucudnn.memory.torch.measuring.copy_slowdown import CopiesBeside, alone_and_beside
from ucudnn.memory.torch.measuring.made_operands import operand_storages, operator_on_made_up
from ucudnn.memory.torch.measuring.measure import AHEAD_CYCLES, COPIED_BYTES, bandwidth, between_ms, memory_bytes
from ucudnn.memory.torch.measuring.progress import Stages
from ucudnn.memory.torch.measuring.scratch_order import with_scratch_pieces
from ucudnn.memory.torch.subject.left_as_found import Snapshot
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.memory.torch.subject.traced_values import TracedCall, TracedTensor

_GRANULARITY = {"cuda": 512, "cpu": 1}  # bytes of which PyTorch's allocators count multiples
_PROFILE = "h200"
_MOST_CONTENDED = 16  # kinds of operations that run beside copies
_TURNS = 4  # how often each of them does; an even number has both directions
_Operator = Callable[[], object]
_Found = TypeVar("_Found")


class OperatorCost(NamedTuple):
    """What a call of an operator takes.

    Attributes:
        time_ms: median time on its device, in milliseconds.
        scratch_bytes: bytes that it takes on a GPU beyond those that it returns; None on a CPU.
        issue_ms: median time that the host takes to issue it to a GPU, in milliseconds; 0 on a CPU.
        pieces: the pieces of its scratch. It is None where the scratch is one piece that the call allocates after what
            it returns, and where the pieces are not known.
    """

    time_ms: float
    scratch_bytes: int | None
    issue_ms: float
    pieces: ScratchPieces | None = None


def step_costs(graph: StepGraph, device: torch.device) -> Costs:
    """Return the costs of a step by a device profile, without a choice of convolution algorithms."""
    costs = device_costs(load_device(_PROFILE), graph)
    return replace(
        costs,
        granularity=_GRANULARITY.get(device.type, 1),
        scratch_bytes=(0,) * len(graph.operations),
        configurations={},
    )


def measure_operations(
    program: StepProgram,
    estimated: Costs,
    *,
    tensor_bytes: int | None = None,
    repeats: int = 5,
    stages: Stages | None = None,
) -> Costs:
    """Return the costs of a step as measured; random numbers that the program draws later stay the same.

    Args:
        program: the step.
        estimated: what counts for operations that cannot run on made-up operands, and for all that is not measured:
            on a CPU that is scratch.
        tensor_bytes: bytes that a plan may use, storages that stay included; None bounds nothing.
        repeats: how often each operation is timed; the medians count.
        stages: are told what is measured; None tells nothing.
    """
    device, stages = program.device, stages or Stages()
    on_gpu = device.type == "cuda"
    rooms = _rooms(program.graph, estimated, tensor_bytes)
    costs = _MeasuredCosts(estimated, program.outside)
    given = {value for call in program.calls for value in call.kwargs.values() if isinstance(value, torch.Generator)}
    with ExitStack() as after, AllocatorCap(device) as cap:
        after.callback(Snapshot(*given).restore_modes)
        kinds = [*_alike(program).values()]
        stages.begin(f"measuring {len(kinds)} kinds of operations")
        for number, operations in enumerate(kinds):
            stages.done(number, len(kinds))
            room = None if rooms is None else min(rooms[operation] for operation in operations)
            cap.allow(room)
            costs.note(operations, _measured(program, operations, room, repeats))
        gc.collect()
        most = None if rooms is None else max(rooms, default=0)
        cap.allow(most)
        stages.begin("measuring copies, and operations beside them")
        links = _links(device, most)
        contention = _contention(program, costs.times, rooms, min(links)) if on_gpu else estimated.contention
    if on_gpu:  # the blocks of operands would stay in the allocator's cache, where the step's do not fit well
        torch.cuda.empty_cache()
        costs.scratch = _bounded(program, costs.scratch, costs.known)
    return replace(
        estimated,
        device=torch.cuda.get_device_name(device) if on_gpu else "cpu",
        time_ms=tuple(costs.times),
        scratch_bytes=tuple(costs.scratch),
        offload_bytes_per_ms=links[0],
        prefetch_bytes_per_ms=links[1],
        contention=contention,
        memory_bytes=memory_bytes(device),
        issue_ms=tuple(costs.issue) if on_gpu else (),
        scratch_pieces=costs.pieces,
    )


class _MeasuredCosts:
    """What is known of each operation: what was measured, and estimates of the others.

    Attributes:
        times: milliseconds.
        scratch: bytes.
        issue: milliseconds of the host; 0 where they were not measured.
        pieces: the pieces of scratch, where there are several or they come first.
        known: the operations that were measured, or are not the device's.
    """

    def __init__(self, estimated: Costs, outside: Iterable[int]) -> None:
        self.times, self.scratch = [*estimated.time_ms], [*estimated.scratch_bytes]
        self.issue = [0.0] * len(self.times)
        self.pieces: dict[int, ScratchPieces] = {}
        self.known = {*outside}

    def note(self, operations: Sequence[int], found: OperatorCost | None) -> None:
        """Note what operations that are alike take; None leaves the estimate."""
        if found is None:
            return
        self.known.update(operations)
        for operation in operations:
            self.times[operation], self.issue[operation] = found.time_ms, found.issue_ms
            if found.scratch_bytes is not None:
                self.scratch[operation] = found.scratch_bytes
            if found.pieces is not None:
                self.pieces[operation] = found.pieces


def _contention(
    program: StepProgram, times: Sequence[float], rooms: Sequence[int] | None, bytes_per_ms: float
) -> float:
    """Return how many times as long the operations take beside copies that take the most time of a step; at least 1.

    Operations that have no room beside what is copied are passed over.
    """
    room = None if rooms is None else max(rooms, default=0)
    size = _copied_bytes(room)
    copies = CopiesBeside(program.device, size, bytes_per_ms)
    alone = beside = 0.0
    kinds = sorted(_alike(program).values(), key=lambda alike: -sum(times[each] for each in alike))
    for alike in kinds[:_MOST_CONTENDED]:
        own = None if rooms is None else min(rooms[each] for each in alike) - size
        found = _beside(program, alike, own, copies, times[alike[0]])
        if found is not None:
            alone, beside = alone + len(alike) * found[0], beside + len(alike) * found[1]
    copies.close()
    return max(1.0, beside / alone) if alone else 1.0


def _beside(
    program: StepProgram, alike: Sequence[int], room: int | None, copies: CopiesBeside, alone_ms: float
) -> tuple[float, float] | None:
    """Return an operation's times alone and beside copies; None without room, or if it does not run on made-up ones."""
    call = program.calls[alike[0]]
    storages = operand_storages(call)
    if room is not None and sum(storages.sizes.values()) > room:
        return None

    def timed() -> tuple[float, float]:
        with _below_autograd():
            operator()  # a thread chooses its own kernels
            return alone_and_beside(operator, copies, alone_ms, _TURNS)

    try:
        operator = operator_on_made_up(call, storages, program.device, len(program.graph.storages))
        in_forward = any(program.graph.operations[each].phase is not Phase.BACKWARD for each in alike)
        return timed() if in_forward else in_backward(timed, program.device)
    except (RuntimeError, IndexError, ValueError):
        return None


def _measured(program: StepProgram, alike: Sequence[int], room: int | None, repeats: int) -> OperatorCost | None:
    """Return what operations take; None if they do not run on made-up operands, or not within their room."""
    call = program.calls[alike[0]]
    phases = {program.graph.operations[operation].phase for operation in alike}
    storages = operand_storages(call)
    if room is not None and sum(storages.sizes.values()) > room:
        return None
    try:
        operator = operator_on_made_up(call, storages, program.device, len(program.graph.storages))
        found = []
        if phases != {Phase.BACKWARD}:
            found.append(_measured_below(operator, program.device, repeats))
        if Phase.BACKWARD in phases or (Phase.FORWARD in phases and torch.backends.cudnn.benchmark):
            found.append(
                in_backward(lambda: _measured_below(operator, program.device, 1 if found else repeats), program.device)
            )
        known = [each.scratch_bytes for each in found if each.scratch_bytes is not None]
        if not known:
            return found[0]
        largest = max(found, key=lambda each: each.scratch_bytes or 0)
        return found[0]._replace(scratch_bytes=max(known), pieces=largest.pieces)
    except (RuntimeError, IndexError, ValueError):
        return None  # too little memory, or it wants operands of which nobody knows how to make them up


def _measured_below(operator: _Operator, device: torch.device, repeats: int) -> OperatorCost:
    with _below_autograd():
        return measure_operator(operator, device, repeats)


@contextmanager
def _below_autograd() -> Iterator[None]:
    """Call operators below autograd, where the code of plans calls them."""
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        yield


class _InBackward(torch.autograd.Function):
    """Calls a function during backward."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return source.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return gradients[0], None


def in_backward(call: Callable[[], _Found], device: torch.device) -> _Found:
    """Return what a function returns in the thread that runs backward of tensors on a device."""
    found: list[_Found] = []
    with torch.enable_grad():
        source = torch.zeros((), device=device, requires_grad=True)
        result: Any = _InBackward.apply(source, lambda: found.append(call()))
        result.backward()
    return found[0]


def _rooms(graph: StepGraph, costs: Costs, tensor_bytes: int | None) -> list[int] | None:
    """Return the bytes that each operation may take while it is measured; None where nothing is bounded.

    That is what the budget leaves beside the storages that stay. Those that the operation itself accesses are made up
    a second time, so their bytes count as free.
    """
    if tensor_bytes is None:
        return None
    found = [0] * len(graph.operations)
    liveness = measure_liveness(graph, costs)
    for place, operation in enumerate(liveness.order):
        accessed = {*graph.operations[operation].reads, *graph.operations[operation].writes}
        twice = sum(liveness.sizes[storage] for storage in accessed if graph.exists_after[storage])
        found[operation] = tensor_bytes - liveness.persistent_bytes[place] + twice
    return found


def _bounded(program: StepProgram, scratch: Sequence[int], known: Collection[int]) -> list[int]:
    """Return the scratch of all operations, with a bound where it is not known: the largest scratch of its like.

    An operation without a like may have as much as its operands.
    """
    largest: dict[Any, int] = {}
    for operation in known:
        call = program.calls[operation]
        largest[call.func] = max(scratch[operation], largest.get(call.func, 0))
    found = list(scratch)
    for operation, call in enumerate(program.calls):
        if operation not in known:
            own = largest.get(call.func)
            found[operation] = sum(operand_storages(call).sizes.values()) if own is None else own
    return found


def _links(device: torch.device, room: int | None) -> tuple[float, float]:
    """Return bytes per millisecond to the host and from it."""
    cpu = torch.device("cpu")
    size = _copied_bytes(room)
    return bandwidth(device, cpu, size), bandwidth(cpu, device, size)


def _copied_bytes(room: int | None) -> int:
    """Return the bytes of a copy that is timed; on a CPU there are two of them."""
    return COPIED_BYTES if room is None else max(1, min(COPIED_BYTES, room // 2))


def measure_operator(operator: Callable[[], object], device: torch.device, repeats: int) -> OperatorCost:
    """Return what a call takes, in the median of some repeats."""
    return _on_gpu(operator, repeats) if device.type == "cuda" else _on_cpu(operator, repeats)


def _alike(program: StepProgram) -> dict[str, list[int]]:
    """Return the operations by what they do; what stands for the caller's work is left out."""
    found: dict[str, list[int]] = {}
    for operation, call in enumerate(program.calls):
        if operation not in program.outside:
            args, kwargs = _numbered(call)
            found.setdefault(f"{call.func} {args!r} {kwargs!r}", []).append(operation)
    return found


def _numbered(call: TracedCall) -> Any:
    """Return the arguments of a call with storages in the order in which they appear."""
    numbers: dict[int, int] = {}
    return tree_map_only(
        TracedTensor,
        lambda each: replace(each, storage=numbers.setdefault(each.storage, len(numbers))),
        (call.args, dict(call.kwargs)),
    )


def _on_gpu(operator: _Operator, repeats: int) -> OperatorCost:
    operator()  # chooses kernels, and may try several
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result, pieces = with_scratch_pieces(operator, torch.device("cuda", torch.cuda.current_device()))
    scratch = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del result
    events, issued = [], []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(AHEAD_CYCLES)
        begin.record()
        issuing = perf_counter()
        operator()
        issued.append((perf_counter() - issuing) * 1e3)
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return OperatorCost(median(between_ms(begin, end) for begin, end in events), scratch, median(issued), pieces)


def _on_cpu(operator: _Operator, repeats: int) -> OperatorCost:
    operator()
    found = []
    for _ in range(repeats):
        begin = perf_counter()
        operator()
        found.append((perf_counter() - begin) * 1e3)
    return OperatorCost(median(found), None, 0.0)
