"""Masks of dropout from seeds of eight bytes, so that no mask is saved.

Eager PyTorch draws a mask for each dropout, and backward reads it. Here a step draws a seed for each dropout. A mask is
an elementwise function of its seed and of where an element lies. It is computed in whole numbers, so forward,
recomputation and backward have the same bits, compiled or not. What is drawn differs from what eager PyTorch draws.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple, final

import torch
from torch import Tensor

from ucudnn.memory.step.graph import Affine, Phase, Role, StepOperation, Storage
from ucudnn.memory.torch.compiling.fusible_calls import OwnOperator
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.memory.torch.subject.traced_values import TracedCall, TracedTensor

aten = torch.ops.aten

SEEDS = -1
"""The storage of all seeds of a step, which is numbered when the step is written."""
_APART = 2  # places between seeds, because kernels are compiled for operands that begin at 16 bytes
_WORD = 0xFFFFFFFF


def seeded_mask(seed: Tensor, shape: Sequence[int], stride: Sequence[int], keep: float, dtype: torch.dtype) -> Tensor:
    """Return a tensor that is 1 where an element is kept, with a probability, and 0 elsewhere."""
    order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], shape[dim] == 1))
    places = torch.arange(prod(shape), device=seed.device)
    bits = _mixed(_mixed((places ^ seed) & _WORD) ^ (seed >> 32) ^ (places >> 32))
    kept = (bits < round(keep * 2**32)).to(dtype).view([shape[dim] for dim in order])
    found = kept.permute([order.index(dim) for dim in range(len(shape))])
    if found.stride() == tuple(stride):
        return found
    return torch.empty_strided(shape, stride, dtype=dtype, device=seed.device).copy_(found)


def _mixed(bits: Tensor) -> Tensor:
    """Return 32 bits, each of which depends on all of others, by a function that has an inverse.

    The factors are those of `hash-prospector`. They have 31 bits, so that no product exceeds 63.
    """
    bits = ((bits ^ (bits >> 16)) * 0x21F0AAAD) & _WORD
    bits = ((bits ^ (bits >> 15)) * 0x735A2D97) & _WORD
    return bits ^ (bits >> 15)


MASK = OwnOperator(
    seeded_mask, "seeded_mask(Tensor seed, int[] shape, int[] stride, float keep, ScalarType dtype) -> Tensor"
)


@final
class NewOperation(NamedTuple):
    """An operation of another step: its call, and those of the step as it is that it stands for."""

    members: tuple[int, ...]
    operation: StepOperation
    call: TracedCall


def seeded_rows(program: StepProgram) -> tuple[list[NewOperation], Storage] | None:
    """Return the operations of a step whose masks have seeds, and the storage of these; None where it has no masks."""
    taken = _masks_of(program)
    if not taken:
        return None
    rows: list[NewOperation] = []
    emptied = {each for each in taken.values() if each is not None}
    numbers = {index: number for number, index in enumerate(sorted(taken))}
    for index, (operation, call) in enumerate(zip(program.graph.operations, program.calls, strict=True)):
        if index in numbers:
            rows += [] if numbers[index] else [_draw(program, operation, call, len(numbers))]
            rows += _seeded(index, operation, call, numbers[index], taken[index])
        elif index not in emptied:
            rows.append(NewOperation((index,), operation, call))
    return rows, Storage(name="dropout.seeds", role=Role.ACTIVATION, size=Affine(8 * _APART * len(numbers)))


def _masks_of(program: StepProgram) -> dict[int, int | None]:
    """Return the calls that draw masks, each with the one that takes the mask's memory; None where it does so itself.

    Those that draw from a generator of the program's own stay as they are.
    """
    graph, found = program.graph, dict[int, int | None]()
    turns = {at for at, _ in program.uncounted}
    for index, call in enumerate(program.calls):
        stays = index in program.outside or index in program.functions or call.phase is not Phase.FORWARD
        if stays or call.kwargs.get("generator") is not None:
            continue
        if call.func is aten.native_dropout.default and 0.0 < call.args[1] < 1.0 and call.args[2] is not False:
            found[index] = None
        elif call.func is aten.bernoulli_.float and _is_whole(program, call.args[0]):
            writers = graph.writers[call.args[0].storage]
            maker = program.calls[writers[0]]
            if writers[1:2] == (index,) and maker.func._opname.startswith("empty") and writers[0] not in turns:
                found[index] = writers[0]
    return found


def _is_whole(program: StepProgram, tensor: TracedTensor) -> bool:
    is_dense = tensor.is_plain and tensor.is_dense and not tensor.dtype.is_complex
    known = tensor.storage < len(program.graph.storages) and 0 not in tensor.shape
    return is_dense and known and tensor.bytes_touched == program.sizes[tensor.storage]


def _draw(program: StepProgram, operation: StepOperation, call: TracedCall, count: int) -> NewOperation:
    size = _APART * count
    taken = {"dtype": torch.int64, "device": program.device}
    own = replace(
        operation, name="dropout_seeds", kind="aten.randint", dtype="int64", reads=(), writes=(SEEDS,), flops=Affine(0)
    )
    results = TracedTensor(SEEDS, (size,), (1,), 0, torch.int64)
    made = replace(call, func=aten.randint.low, args=(0, 2**62, [size]), kwargs=taken, results=results)
    return NewOperation((), replace(own, traffic=Affine(8 * size), repeatable=False), made)


def _seeded(
    index: int, operation: StepOperation, call: TracedCall, number: int, empty: int | None
) -> list[NewOperation]:
    """Return what computes a mask, and behind it what applies that, if one operator does both."""
    seed = TracedTensor(SEEDS, (), (), _APART * number, torch.int64)
    if empty is not None:
        mask, keep = call.args[0], call.argument("p")
    else:
        mask, keep = call.results[1], 1.0 - call.args[1]
    args = seed, [*mask.shape], [*mask.stride], keep, mask.dtype
    own = replace(operation, kind="ucudnn.seeded_mask", reads=(SEEDS,), writes=(mask.storage,), repeatable=True)
    own = replace(own, flops=Affine(0), traffic=Affine(8 + mask.bytes_touched))
    made = replace(call, func=MASK, args=args, kwargs={}, results=mask)
    if empty is not None:
        return [NewOperation((empty, index), own, made)]
    # Applying a mask to a gradient, as backward does, is the same as applying it to the input.
    func, args_of_it = aten.native_dropout_backward.default, (call.args[0], mask, 1.0 / keep)
    applied = replace(call, func=func, args=args_of_it, results=call.results[0])
    reads = tuple(sorted({*operation.reads, mask.storage}))
    writes = tuple(each for each in operation.writes if each != mask.storage)
    rest = replace(operation, kind="aten.native_dropout_backward", reads=reads, writes=writes, repeatable=True)
    return [NewOperation((), replace(own, name=f"{own.name}.mask"), made), NewOperation((index,), rest, applied)]
