"""Views by PyTorch's operators, from how tensors lie in a storage.

A trace keeps how a tensor lies in its storage, and not which views led there. Inductor knows nothing of storages, and
computes a tensor first where code takes `as_strided` of it. So the operators are found again.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch

from ucudnn.memory.torch.subject.traced_values import TracedTensor

aten = torch.ops.aten

ViewCall = tuple[Any, tuple[Any, ...]]
"""An operator, and its arguments behind the tensor."""


def view_calls(base: TracedTensor, wanted: TracedTensor) -> list[ViewCall] | None:
    """Return the operators that lead from a tensor to another one in the same storage; None where none are known."""
    if base.geometry == wanted.geometry:
        return []
    plain = base.is_plain and wanted.is_plain and base.dtype is wanted.dtype
    offset = wanted.offset - base.offset
    if not (plain and base.is_dense and offset >= 0) or 0 in base.shape or 0 in wanted.shape:
        return None
    sliced = _slices(base, wanted, offset)
    if sliced is None:
        return None
    order = sorted(range(len(base.shape)), key=lambda dim: (-base.stride[dim], base.shape[dim] == 1))
    found: list[ViewCall] = []
    if order != [*range(len(order))]:
        found.append((aten.permute.default, (order,)))
    shape, slices = sliced
    if shape != [base.shape[dim] for dim in order]:
        found.append((aten.view.default, (shape,)))
    for dim, (begin, count) in enumerate(slices):
        if count != shape[dim]:
            found.append((aten.slice.Tensor, (dim, begin, begin + count)))
    if len(shape) > len(_strided(wanted)):  # elements between those of the innermost dimension
        found.append((aten.squeeze.dim, (len(shape) - 1,)))
    return [*found, *_arranged(wanted)]


def _strided(tensor: TracedTensor) -> list[int]:
    """Return the dimensions by which elements are read, from the largest stride to the smallest."""
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1 and tensor.stride[dim]]
    return sorted(dims, key=lambda dim: -tensor.stride[dim])


def _slices(base: TracedTensor, wanted: TracedTensor, offset: int) -> tuple[list[int], list[tuple[int, int]]] | None:
    """Return a shape of all elements of a dense tensor, and begin and size of what another one shows of each dimension.

    The shape's dimensions have the other's strides. Behind them is one of the elements that it skips, if there are any.
    """
    elements = prod(base.shape)
    dims = _strided(wanted)
    strides = [wanted.stride[dim] for dim in dims]
    whole = [elements, *strides]
    if any(large % small for large, small in pairwise(whole)):
        return None
    shape = [large // small for large, small in pairwise(whole)]
    sizes = [wanted.shape[dim] for dim in dims]
    if not strides or strides[-1] > 1:
        shape.append(strides[-1] if strides else elements)
        sizes.append(1)
        strides.append(1)
    slices = []
    for stride, size, entries in zip(strides, sizes, shape, strict=True):
        begin, offset = divmod(offset, stride)
        if begin + size > entries:
            return None
        slices.append((begin, size))
    return shape, slices


def _arranged(wanted: TracedTensor) -> Iterator[ViewCall]:
    """Yield what brings strided dimensions into their order, and adds those of one entry and expanded ones."""
    dims: Sequence[int] = _strided(wanted)
    inner = sorted(dims)
    if [*dims] != inner:
        yield aten.permute.default, ([dims.index(dim) for dim in inner],)
    for dim in range(len(wanted.shape)):
        if dim not in dims:
            yield aten.unsqueeze.default, (dim,)
    if any(size > 1 and not stride for size, stride in zip(wanted.shape, wanted.stride, strict=True)):
        yield aten.expand.default, (list(wanted.shape),)
