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
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.step.costs import Costs, ScratchPieces
from ucudnn.memory.step.graph import Phase, StepGraph
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.torch.device.allocator import allocator_cap
from ucudnn.memory.torch.measuring.copy_slowdown import CopiesBeside, alone_and_beside
from ucudnn.memory.torch.measuring.made_operands import operand_storages, operator_on_made_up
from ucudnn.memory.torch.measuring.measure import (
    COPIED_BYTES,
    GRANULARITY,
    bandwidth,
    between_ms,
    gpu_scratch,
    memory_bytes,
    queued,
    timed,
)
from ucudnn.memory.torch.measuring.progress import Stages
from ucudnn.memory.torch.measuring.scratch_order import with_scratch_pieces
from ucudnn.memory.torch.subject.left_as_found import Snapshot
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.memory.torch.subject.traced_values import TracedCall, TracedTensor
from ucudnn.memory.torch.tracing.known_values import COLLECTIVE

_PROFILE = "h200"
_MOST_CONTENDED = 16  # kinds of operations that run beside copies
_ALIGNED_BYTES = 512  # of a GPU's allocator
_FOR_HOLES = 0.06  # share of a budget that scratch leaves to holes and to kernels that are loaded later
_TURNS = 4  # how often each of them does; an even number has both directions
_Operator = Callable[[], object]
_Found = TypeVar("_Found")


class OperatorCost(NamedTuple):
    """What a call of an operator takes.

    Attributes:
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
        granularity=GRANULARITY.get(device.type, 1),
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
    known: Costs | None = None,
) -> Costs:
    """Return the costs of a step as measured; random numbers that the program draws later stay the same.

    Args:
        program: the step.
        estimated: what counts for operations that cannot run on made-up operands, and for scratch on a CPU.
        tensor_bytes: bytes that a plan may use, storages that stay included; None bounds nothing.
        repeats: how often each operation is timed; the medians count.
        stages: are told what is measured; None tells nothing.
        known: what an earlier process measured of the same operations on such a device, or None. An operation that
            takes the same scratch here takes the same time.
    """
    device, stages = program.device, stages or Stages()
    on_gpu = device.type == "cuda"
    rooms = _rooms(program.graph, estimated, tensor_bytes)
    found: dict[int, OperatorCost] = {}
    given = {value for call in program.calls for value in call.kwargs.values() if isinstance(value, torch.Generator)}
    with ExitStack() as after, allocator_cap(device) as allow:
        after.callback(Snapshot(*given).restore_modes)
        kinds = [*alike_operations(program).values()]
        stages.begin(f"measuring {len(kinds)} kinds of operations{', whose times are known' if known else ''}")
        for number, operations in enumerate(kinds):
            stages.done(number, len(kinds))
            room = None if rooms is None else min(rooms[operation] for operation in operations)
            allow(room)
            cost = _measured(program, operations, room, repeats, known)
            if cost is not None:
                found.update(dict.fromkeys(operations, cost))
        times = [found[each].time_ms if each in found else time for each, time in enumerate(estimated.time_ms)]
        gc.collect()
        allow(None if rooms is None else max(rooms, default=0))
        copied = known or _with_copies(program, replace(estimated, time_ms=tuple(times)), rooms, stages)
    scratch = [*estimated.scratch_bytes]
    for operation, cost in found.items():
        if cost.scratch_bytes is not None:
            scratch[operation] = cost.scratch_bytes
    if on_gpu:  # the blocks of operands would stay in the allocator's cache, where the step's do not fit well
        torch.cuda.empty_cache()
        scratch = _bounded(program, scratch, {*found, *program.outside})
    return replace(
        estimated,
        device=torch.cuda.get_device_name(device) if on_gpu else "cpu",
        time_ms=tuple(times),
        scratch_bytes=tuple(scratch),
        offload_bytes_per_ms=copied.offload_bytes_per_ms,
        prefetch_bytes_per_ms=copied.prefetch_bytes_per_ms,
        contention=copied.contention,
        memory_bytes=memory_bytes(device),
        issue_ms=tuple(found[each].issue_ms if each in found else 0.0 for each in range(len(times))) if on_gpu else (),
        scratch_pieces={each: cost.pieces for each, cost in found.items() if cost.pieces is not None},
    )


def _with_copies(program: StepProgram, costs: Costs, rooms: Sequence[int] | None, stages: Stages) -> Costs:
    stages.begin("measuring copies, and operations beside them")
    cpu, size = torch.device("cpu"), _copied_bytes(None if rooms is None else max(rooms, default=0))
    links = bandwidth(program.device, cpu, size), bandwidth(cpu, program.device, size)
    on_gpu = program.device.type == "cuda"
    contention = _contention(program, costs.time_ms, rooms, min(links)) if on_gpu else costs.contention
    return replace(costs, offload_bytes_per_ms=links[0], prefetch_bytes_per_ms=links[1], contention=contention)


def _contention(
    program: StepProgram, times: Sequence[float], rooms: Sequence[int] | None, bytes_per_ms: float
) -> float:
    """Return how many times as long the operations take beside copies that take the most time of a step; at least 1.

    Operations that have no room beside what is copied are passed over.
    """
    size = _copied_bytes(None if rooms is None else max(rooms, default=0))
    copies = CopiesBeside(program.device, size, bytes_per_ms)
    alone = beside = 0.0
    kinds = sorted(alike_operations(program).values(), key=lambda alike: -sum(times[each] for each in alike))
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
    in_forward = any(program.graph.operations[each].phase is not Phase.BACKWARD for each in alike)

    def timed(operator: _Operator) -> tuple[float, float]:
        with _below_autograd():
            operator()  # a thread chooses its own kernels
            return alone_and_beside(operator, copies, alone_ms, _TURNS)

    def measure(operator: _Operator) -> tuple[float, float]:
        return timed(operator) if in_forward else in_backward(lambda: timed(operator), program.device)

    return _of_made_up(program, alike[0], room, measure)


def _of_made_up(
    program: StepProgram, operation: int, room: int | None, measure: Callable[[_Operator], _Found]
) -> _Found | None:
    """Return what is found of an operation on made-up operands; None if they do not fit or it does not run on them."""
    call = program.calls[operation]
    storages = operand_storages(call)
    if call.func.namespace in COLLECTIVE or (room is not None and sum(storages.sizes.values()) > room):
        return None
    try:
        return measure(operator_on_made_up(call, storages, program.device, len(program.graph.storages)))
    except (RuntimeError, IndexError, ValueError):
        return None  # too little memory, or it wants operands of which nobody knows how to make them up


def _measured(
    program: StepProgram, alike: Sequence[int], room: int | None, repeats: int, known: Costs | None = None
) -> OperatorCost | None:
    """Return what operations take; None if they do not run on made-up operands, or not within their room.

    What is known of them counts where they take the same scratch here. So they run even then, which lets cuDNN choose
    its kernels and loads them while the budget counts what is loaded. A CPU's scratch is not measured.
    """
    device, phases = program.device, {program.graph.operations[operation].phase for operation in alike}

    if known is not None and device.type != "cuda":
        return OperatorCost(known.time_ms[alike[0]], None, 0.0)

    def in_its_threads(call: Callable[[int], _Found]) -> list[_Found]:
        call, found = _below_autograd()(call), []
        if phases != {Phase.BACKWARD}:
            found.append(call(repeats))
        if Phase.BACKWARD in phases or (Phase.FORWARD in phases and torch.backends.cudnn.benchmark):
            found.append(in_backward(partial(call, 1 if found else repeats), device))
        return found

    def measure(operator: _Operator) -> OperatorCost:
        if known is not None:
            here = in_its_threads(lambda _: _with_scratch(operator, operator)[1])
            scratch, pieces = known.scratch_bytes[alike[0]], known.scratch_pieces.get(alike[0])
            if max(here) == scratch:
                return OperatorCost(known.time_ms[alike[0]], scratch, known.issue_ms[alike[0]], pieces)
        found = in_its_threads(lambda times: measure_operator(operator, device, times))
        sizes = [each.scratch_bytes for each in found if each.scratch_bytes is not None]
        if not sizes:
            return found[0]
        largest = max(found, key=lambda each: each.scratch_bytes or 0)
        return found[0]._replace(scratch_bytes=max(sizes), pieces=largest.pieces)

    return _of_made_up(program, alike[0], room, measure)


@contextmanager
def _below_autograd() -> Iterator[None]:
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        yield


class _InBackward(torch.autograd.Function):
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
    a second time, so their bytes count as free. Holes and kernels that are loaded later take some of the budget, too,
    so scratch is to leave that, up to half of what there is for it.
    """
    if tensor_bytes is None:
        return None
    found = [0] * len(graph.operations)
    liveness = measure_liveness(graph, costs)
    for place, operation in enumerate(liveness.order):
        accessed = {*graph.operations[operation].reads, *graph.operations[operation].writes}
        twice = sum(liveness.sizes[storage] for storage in accessed if graph.exists_after[storage])
        room = tensor_bytes - liveness.persistent_bytes[place]
        for_scratch = max(0, room - liveness.working_bytes[place])
        found[operation] = room + twice - min(for_scratch // 2, int(_FOR_HOLES * tensor_bytes))
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


def _copied_bytes(room: int | None) -> int:
    """Return the bytes of a copy that is timed; on a CPU there are two of them."""
    return COPIED_BYTES if room is None else max(1, min(COPIED_BYTES, room // 2))


def measure_operator(operator: _Operator, device: torch.device, repeats: int) -> OperatorCost:
    """Return what a call takes, in the median of some repeats."""
    if device.type == "cuda":
        return _on_gpu(operator, repeats)
    operator()
    return OperatorCost(median(timed(operator)[1] for _ in range(repeats)), None, 0.0)


def alike_operations(program: StepProgram) -> dict[str, list[int]]:
    """Return the operations by what they do; what stands for the caller's work is left out."""
    found: dict[str, list[int]] = {}
    for operation, call in enumerate(program.calls):
        if operation not in program.outside:
            args, kwargs = _numbered(call)
            found.setdefault(f"{call.func} {args!r} {kwargs!r}", []).append(operation)
    return found


def _numbered(call: TracedCall) -> Any:
    """Return the arguments of a call with storages in the order in which they appear.

    Where tensors begin counts by alignment alone, so that parts of a mini-batch are alike.
    """
    numbers: dict[int, int] = {}

    def numbered(tensor: TracedTensor) -> TracedTensor:
        number = numbers.setdefault(tensor.storage, len(numbers))
        return replace(tensor, storage=number, offset=tensor.offset % (_ALIGNED_BYTES // tensor.dtype.itemsize))

    return tree_map_only(TracedTensor, numbered, (call.args, dict(call.kwargs)))


def _on_gpu(operator: _Operator, repeats: int) -> OperatorCost:
    device = torch.device("cuda", torch.cuda.current_device())
    (result, pieces), scratch = _with_scratch(operator, lambda: with_scratch_pieces(operator, device))
    del result
    issued_ms: list[float] = []
    events = [queued(lambda: issued_ms.append(timed(operator)[1]))[1] for _ in range(repeats)]
    torch.cuda.synchronize()
    return OperatorCost(median(between_ms(*pair) for pair in events), scratch, median(issued_ms), pieces)


def _with_scratch(operator: _Operator, again: Callable[[], _Found]) -> tuple[_Found, int]:
    operator()  # chooses kernels, and may try several
    torch.cuda.synchronize()
    return gpu_scratch(again)
