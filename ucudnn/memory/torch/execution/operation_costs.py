"""Measures the operations of a step one by one on its device, before the step runs: time, and scratch on a GPU.

The operands of an operation are made for it and freed after it, so measuring takes no more memory than the operation
itself. Operations that are alike are measured once. The first call lets cuDNN and cuBLAS choose their kernels; what
they choose stays, so the step runs what was measured.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ucudnn.memory.costs import Costs
from ucudnn.memory.torch.execution.step_program import StepProgram
from ucudnn.memory.torch.measure import AHEAD_CYCLES, bandwidth, memory_bytes
from ucudnn.memory.torch.tracer import TracedCall, TracedTensor

_Operator = Callable[[], object]


def measure_operations(program: StepProgram, estimated: Costs, *, repeats: int = 5) -> Costs:
    """Return the costs of a step as measured; random numbers that the program draws later stay the same.

    Args:
        program: the step.
        estimated: what counts for operations that cannot run on made-up operands, and for all that is not measured:
            on a CPU that is scratch.
        repeats: how often each operation is timed; the medians count.
    """
    device = program.device
    on_gpu = device.type == "cuda"
    times, scratch = list(estimated.time_ms), list(estimated.scratch_bytes)
    with (
        torch.random.fork_rng(devices=[device] if on_gpu else []),
        torch.enable_grad(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._DisableAutocast(),
    ):
        operator: _Operator | None = None
        for operations in _alike(program).values():
            call = program.calls[operations[0]]
            try:
                operator = _operator(call, program)
                found = _on_gpu(operator, repeats) if on_gpu else _on_cpu(operator, repeats)
            except (RuntimeError, IndexError, ValueError):
                continue  # it wants operands of which nobody knows how to make them up
            finally:
                operator = None
            for operation in operations:
                times[operation], scratch[operation] = found[0], scratch[operation] if found[1] is None else found[1]
    gc.collect()
    cpu = torch.device("cpu")
    measured = replace(
        estimated,
        device=torch.cuda.get_device_name(device) if on_gpu else "cpu",
        time_ms=tuple(times),
        scratch_bytes=tuple(scratch),
        offload_bytes_per_ms=bandwidth(device, cpu),
        prefetch_bytes_per_ms=bandwidth(cpu, device),
        memory_bytes=memory_bytes(device),
    )
    if on_gpu:  # the blocks of operands would stay in the allocator's cache, where the step's do not fit well
        torch.cuda.empty_cache()
    return measured


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


def _operator(call: TracedCall, program: StepProgram) -> _Operator:
    """Return a function that calls an operator on operands of its own."""
    sizes: dict[int, int] = {}
    types: dict[int, torch.dtype] = {}
    for tensor in call.inputs:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride, strict=True))
        elements = 0 if 0 in tensor.shape else tensor.offset + last + 1
        sizes[tensor.storage] = max(sizes.get(tensor.storage, 0), elements * tensor.dtype.itemsize)
        types.setdefault(tensor.storage, tensor.dtype)
    counted = len(program.graph.storages)
    bases = {
        storage: _base(size, types[storage], torch.device("cpu") if storage >= counted and size else program.device)
        for storage, size in sizes.items()
    }

    def made(tensor: TracedTensor) -> Tensor:
        view = torch.empty(0, dtype=tensor.dtype, device=bases[tensor.storage].device)
        storage: Any = bases[tensor.storage].untyped_storage()
        return view.set_(storage, tensor.offset, tensor.shape, tensor.stride)

    args, kwargs = tree_map_only(TracedTensor, made, (call.args, dict(call.kwargs)))
    given: Mapping[str, Any] = kwargs
    return lambda: call.func(*args, **given)


def _base(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory with random numbers, or zeros, which are valid as indices and labels."""
    base = torch.zeros(-(-size // dtype.itemsize), dtype=dtype, device=device)
    if dtype.is_floating_point:
        base.uniform_(-1.0, 1.0)
    return base


def _on_gpu(operator: _Operator, repeats: int) -> tuple[float, int | None]:
    operator()  # chooses kernels, and may try several
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = operator()
    scratch = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del result
    events = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(AHEAD_CYCLES)
        begin.record()
        operator()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in events), scratch


def _on_cpu(operator: _Operator, repeats: int) -> tuple[float, int | None]:
    operator()
    found = []
    for _ in range(repeats):
        begin = perf_counter()
        operator()
        found.append((perf_counter() - begin) * 1e3)
    return median(found), None
