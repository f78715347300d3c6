"""SavedTensor: what a hook returns in the place of a saved tensor; a storage is there once for all its views.

PyTorch does not check tensors that hooks have packed for changes in place. So each keeps the counter of versions that
its tensor shares with its views, with or without the memory, and compares it when it is unpacked.
"""

from functools import cache
from typing import Any, final

import torch
from torch import Tensor

from ucudnn.errors import FittedStepError
from ucudnn.memory.torch.device.storages import holders, is_plain
from ucudnn.memory.torch.hooks.host_store import HostPiece
from ucudnn.torch.device.compilation import never_compiled


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def storage_key(tensor: Tensor) -> int | None:
    """Return what tells a plain tensor's storage from others that exist; None for a tensor of another kind."""
    return tensor.untyped_storage()._cdata if is_plain(tensor) else None


class VersionCheck:
    """Knows a tensor's version when it was saved, and its type and shape for the message. It holds no memory."""

    __slots__ = ("_counter", "form", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.version, self.form, self._counter = tensor._version, (tensor.dtype, _shape(tensor)), tensor.detach()
        if is_plain(tensor):  # the counter stays that of the tensor
            self._counter.data = _nothing(tensor.dtype, tensor.device)

    def check(self) -> None:
        """Raise PyTorch's error, a FittedStepError, if the tensor was changed in place since it was saved."""
        if self._counter._version != self.version:
            raise changed_in_place(self._counter._version, self.version, *self.form)


def _shape(tensor: Tensor) -> torch.Size:
    """Return the shape of a tensor; that of a number for nested ones, which have none."""
    return torch.Size() if tensor.is_nested else tensor.shape


def changed_in_place(now: int, version: int, dtype: torch.dtype, shape: torch.Size) -> FittedStepError:
    """Return PyTorch's error for a tensor that has another version than when it was saved, a FittedStepError."""
    return FittedStepError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a"
        f" {dtype} of shape {[*shape]} is at version {now}; expected version {version} instead: change it after"
        " backward, or change a clone of it"
    )


@final
class SavedStorage:
    """The memory of saved tensors, on the device, in the host's memory or in both.

    Attributes:
        tensors: what was saved, without its graph. None of them has memory once this has left the device.
        places: their parts of the storage, once it has left: types, offsets, shapes and strides.
        piece: its bytes in the host's memory, or None; `copied_version` is its version when it was copied.
        departure, arrival: events of copies on a GPU.
        leaves: whether the memory on the device is to be freed at its departure.
        owner: the module that ran when it was saved, or None; `others` are those that saved it later.
        order: counts up with time.
        key: that of the storage when it was saved.
        calls: the calls of modules that saved it, as far as they are measured.
    """

    __slots__ = (
        *("__weakref__", "_gone", "arrival", "calls", "copied_version", "departure", "key", "leaves"),
        *("order", "others", "owner", "piece", "places", "size", "storage", "tensors"),
    )

    def __init__(self, storage: torch.UntypedStorage, owner: Any, order: int, gone: Any) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.tensors: list[Tensor] = []
        self.places: list[tuple[torch.dtype, int, torch.Size, tuple[int, ...]]] = []
        self.piece: HostPiece | None = None
        self.departure: Any = None
        self.arrival: Any = None
        self.leaves = False
        self.calls: list[Any] = []
        self.key, self.size, self.copied_version = storage._cdata, storage.nbytes(), -1
        self.owner, self.order, self._gone = owner, order, gone
        self.others: tuple[Any, ...] = ()

    @property
    def version(self) -> int:
        """The version now, which all of its tensors share."""
        return self.tensors[0]._version

    def is_alone(self) -> bool:
        """Return whether the memory on the device would be freed if it left."""
        held = 0 if self.places else len(self.tensors)
        return self.storage is not None and holders(self.storage) == held

    def is_copied(self) -> bool:
        """Return whether the host has the bytes as they are."""
        return self.piece is not None and self.copied_version == self.version

    def drop(self) -> None:
        """Free the memory on the device."""
        if not self.places:
            self.places = [(each.dtype, int(each.storage_offset()), each.shape, each.stride()) for each in self.tensors]
            for each in self.tensors:  # they keep their counters of versions
                each.data = _nothing(each.dtype, each.device)
        self.storage, self.leaves = None, False

    @never_compiled
    def __del__(self) -> None:
        # This only notes what is left to do, because any thread may call it at any time. A copy to the device may still
        # be writing to the storage.
        arriving = None if self.arrival is None else self.storage
        self._gone.append((arriving, self.order, self.key, self.size, self.piece, self.arrival))


@final
class SavedTensor:
    """A tensor that was saved for backward, as a part of its storage."""

    __slots__ = ("_at", "_tensor", "_version", "saved")

    def __init__(self, tensor: Tensor, saved: SavedStorage) -> None:
        self._tensor, self._version, self.saved = tensor.detach(), tensor._version, saved
        self._at = len(saved.tensors)
        saved.tensors.append(self._tensor)

    def check(self) -> None:
        """Raise PyTorch's error, a FittedStepError, if the tensor was changed in place since it was saved."""
        if self._tensor._version != self._version:
            shape = self.saved.places[self._at][2] if self.saved.places else self._tensor.shape
            raise changed_in_place(self._tensor._version, self._version, self._tensor.dtype, shape)

    def shown(self) -> Tensor:
        """Return the tensor, whose storage is on the device."""
        if not self.saved.places:
            return self._tensor.detach()
        assert self.saved.storage is not None
        dtype, *place = self.saved.places[self._at]
        return torch.empty(0, dtype=dtype, device=self.saved.storage.device).set_(self.saved.storage, *place)


@final
class KeptTensor:
    """A tensor that was saved and stays where it is, because it is small, others hold it or it is no plain tensor."""

    __slots__ = ("__weakref__", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # Without its graph, because a node that saved its own output would hold itself.
        self._tensor, self._version = tensor.detach(), tensor._version

    @property
    def tensor(self) -> Tensor:
        """The tensor, if it was not changed in place."""
        tensor, version = self._tensor, self._version
        if tensor._version != version:
            raise changed_in_place(tensor._version, version, tensor.dtype, _shape(tensor))
        return tensor


Packed = SavedTensor | KeptTensor
