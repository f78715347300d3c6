"""Functions that generated code calls beside PyTorch's operators."""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ucudnn.errors import LayoutError, StepGraphError
from ucudnn.memory.torch.device.allocator_meter import drop, pads
from ucudnn.memory.torch.device.stream_copies import slide
from ucudnn.memory.torch.tracing.real_geometry import layout_of

_POISON = 0xFF  # NaN as floating point, -1 as a whole number
_BUT = "but its trace on fake tensors says"


def retyped(tensor: Tensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor of another type that lies in the storage of a tensor."""
    view = torch.empty(0, dtype=dtype, device=tensor.device)
    return view.set_(tensor.untyped_storage(), offset, shape, stride)


def poisoned(tensor: Tensor) -> StorageWeakRef:
    """Spoil the bytes of a storage that is about to be freed, and return what knows whether it is gone."""
    _bytes(tensor).fill_(_POISON)
    return watched(tensor)


def watched(tensor: Tensor) -> StorageWeakRef:
    """Return what knows whether a storage that is about to be freed is gone."""
    return StorageWeakRef(tensor.untyped_storage())


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def check_gone(reference: StorageWeakRef, name: str) -> None:
    """Check that a storage that was freed is gone."""
    if not reference.expired():
        raise StepGraphError(f"{name} was freed by the plan, but something still holds it")


def check_geometry(
    tensor: Tensor,
    traced: tuple[tuple[int, ...], tuple[int, ...], int, int],
    device: torch.device | None,
    operator: str,
    dtype: torch.dtype,
    place: tuple[int, int] = (0, 0),
) -> None:
    """Check that an operator returned a tensor as it was traced: its shape, strides, offset and bytes.

    No device stands for any. The stride of a dimension of one entry is none that anything is read by, and fakes of
    operators may have another. It raises a LayoutError if it lies otherwise in its storage, so that views of it would
    show other elements, or on another device, so that a copy that comes back would lie where the next operator cannot
    read it.
    """
    shape, stride, offset, size = traced
    found = tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.untyped_storage().nbytes()
    lies_so = found[0] == shape and _read(found[1], shape) == _read(stride, shape) and found[2] == offset
    # On a GPU an operator may take more, which nothing reads. On a CPU none does whose fake is right.
    has_room = found[3] == size or (found[3] > size and tensor.is_cuda)
    # Fakes have other strides than some operators where there are no elements, and no view shows any.
    is_empty = not size and found[0] == shape and 0 in shape
    differs = ""
    if device is not None and tensor.device.type != device.type:
        differs = f"on {tensor.device}, {_BUT} {device}: the plan would move it to another device"
    elif tensor.dtype is not dtype:
        differs = (
            f"of {tensor.dtype}, {_BUT} {dtype}: the plan counts other bytes; give it arguments of one type, or leave"
            " it to the loop"
        )
    elif not is_empty and not (lies_so and has_room):
        differs = (
            f"of shape, strides, offset and bytes {found}, {_BUT} {traced}: the plan would read other elements; leave"
            " it to the loop"
        )
    if differs:
        raise LayoutError(f"{operator} returned a tensor {differs}", layout_of(tensor), place)


def _read(stride: tuple[int, ...], shape: tuple[int, ...]) -> list[int]:
    return [each for each, entries in zip(stride, shape, strict=True) if entries != 1]


def leave(tensor: Tensor) -> Any:
    """Return what finds the bytes of a storage that is freed before they are copied.

    On a GPU that is their address: they stay as they are until something is issued that writes there. On a CPU the
    memory may go back to the system, so that is a copy of them. It lies beside PyTorch's memory, and so no tensor that
    a test counts is added.
    """
    return tensor.data_ptr() if tensor.is_cuda else _bytes(tensor).numpy().copy()


def arrive(tensor: Tensor, left: Any) -> None:
    """Copy the bytes of a storage that was freed, by what `leave` returned, into the one that was taken for it."""
    if tensor.is_cuda:
        slide(tensor, left)
    else:
        _bytes(tensor)[: left.size] = torch.from_numpy(left)


MARK = "ucudnn action "
"""Begin of the name of a mark; behind it the index of the action that begins there, nothing where one has ended."""


def mark(action: str) -> None:
    """Leave a mark of no length in what PyTorch's profiler records."""
    with torch.profiler.record_function(f"{MARK}{action}"):
        pass


SUPPORT: dict[str, Any] = {
    "alias": torch.ops.aten.alias.default,
    "detach": torch.ops.aten.detach.default,
    "as_strided": torch.as_strided,
    "conjugated": torch._conj,
    "negated": torch._neg_view,
    "clone": torch.clone,
    "moved": torch.clone,
    "empty_strided": torch.empty_strided,
    **{
        each.__name__: each
        for each in (retyped, pads, drop, leave, arrive, poisoned, watched, check_gone, check_geometry, mark)
    },
}
"""Names of generated code. PyTorch's functions take the host less time than the same operators of `torch.ops`."""
