"""Operands that are made up, so that an operator can be measured by itself.

Floating-point numbers are random. Integers are zeros, which are valid as labels and as most indices. What some
operators do with indices takes far longer where all of them are the same, because their sums wait for each other: on an
H200 the backward of the largest max-pooling of a 3-D U-Net took 57 ms, and 1.3 ms on the indices of its forward. So
indices are spread over what they point into.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ucudnn.memory.torch.subject.traced_values import TracedCall, TracedTensor

_PLANES = "max_pool"  # operators whose indices are those of a plane, in each sample and channel apart


class OperandStorages(NamedTuple):
    """The bytes and the type of each storage that a call is given."""

    sizes: Mapping[int, int]
    types: Mapping[int, torch.dtype]


def operand_storages(call: TracedCall) -> OperandStorages:
    """Return the storages that a call is given."""
    sizes: dict[int, int] = {}
    types: dict[int, torch.dtype] = {}
    for tensor in call.inputs:
        elements = tensor.extent and tensor.offset + tensor.extent
        sizes[tensor.storage] = max(sizes.get(tensor.storage, 0), elements * tensor.dtype.itemsize)
        types.setdefault(tensor.storage, tensor.dtype)
    return OperandStorages(sizes, types)


def operator_on_made_up(
    call: TracedCall, storages: OperandStorages, device: torch.device, counted: int
) -> Callable[[], object]:
    """Return a function that calls an operator on operands of its own, which are made on a device.

    Storages behind the counted ones are on the host.
    """
    bases = {
        storage: _base(size, storages.types[storage], torch.device("cpu") if storage >= counted and size else device)
        for storage, size in storages.sizes.items()
    }

    def made(tensor: TracedTensor) -> Tensor:
        return tensor.within(bases[tensor.storage])

    args, kwargs = tree_map_only(TracedTensor, made, (call.args, dict(call.kwargs)))
    indices = call.argument("indices")
    if isinstance(indices, TracedTensor):
        _spread(made(indices), call)
    given: Mapping[str, Any] = kwargs
    return lambda: call.func(*args, **given)


def _base(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    base = torch.zeros(-(-size // dtype.itemsize), dtype=dtype, device=device)
    if dtype.is_floating_point:
        base.uniform_(-1.0, 1.0)
    return base


def _spread(indices: Tensor, call: TracedCall) -> None:
    """Spread indices evenly over the elements that they select. They stay zero if the call does not give the number."""
    name = call.func._schema.name
    if _PLANES in name:
        pooled = call.argument("self")
        dimensions = indices.dim() - 2
        if isinstance(pooled, TracedTensor) and dimensions > 0:
            plane = indices.shape[-dimensions:]
            indices.copy_(_even(plane, prod(pooled.shape[-dimensions:]), indices.device).expand(indices.shape))
        return
    weight, rows = call.argument("weight"), call.argument("num_weights")
    bound = weight.shape[0] if isinstance(weight, TracedTensor) else rows
    if "embedding" in name and isinstance(bound, int) and bound > 0:
        indices.copy_(_even(indices.shape, bound, indices.device))


def _even(shape: Sequence[int], bound: int, device: torch.device) -> Tensor:
    count = prod(shape)
    return (torch.arange(count, device=device) * bound // max(1, count)).reshape(shape)
