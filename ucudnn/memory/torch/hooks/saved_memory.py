"""SavedMemory: lets saved tensors leave a device for the host's memory, and brings them back for backward.

A storage may leave when nothing but saved tensors holds it. The oldest leave first, because backward reads them last.
Backward gets storages back before it asks for them, in the order in which it will.
"""

import weakref
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from heapq import nlargest
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ucudnn.backends.fork_locks import LockLevel, new_lock
from ucudnn.memory.torch.device.storages import GatheredGradients
from ucudnn.memory.torch.hooks.host_store import HostStore
from ucudnn.memory.torch.hooks.pressure import Pressure
from ucudnn.memory.torch.hooks.saved_tensors import (
    KeptTensor,
    Packed,
    SavedStorage,
    SavedTensor,
    storage_key,
)

_LOOKED_AT = 8  # young storages whose holders are looked at whenever something is saved
_LEAST_PART = 4096  # of the limit; a smaller storage takes the host more time than it is worth
_PIECE_PART = 8  # of a new convolution's bytes, which its workspace may take beside them
_LARGE_PART = 32  # of the limit; for a convolution that saved more, gradients are gathered
_GATHERED_PART = 64  # of the limit; fewer gradients stay where they are
_AHEAD = 3  # storages that come back before backward asks for them
_PASSED_BY = 6  # storages that backward reads without a look for what could come back
_NEAR = 16  # so many storages before backward asks for one, it comes back if there is room for what runs now
_Reference = weakref.ref[SavedStorage]


def _convolves() -> bool:
    """Return whether backward of a convolution runs in this thread."""
    node: Any = torch._C._current_autograd_node()
    return node is not None and node.name().startswith("Convolution")


@final
class SavedMemory:
    """The memory of saved tensors of one device. Hooks of several threads may call it.

    Attributes:
        ahead_bytes: bytes that leave in a step as soon as they can, whatever is free.
        gradients: those that lie side by side while backward runs, so that convolutions find larger pieces.
        offloaded, recomputed: bytes that went to the host, or were computed again, so far, by owner.
        owner: the module that runs, or None.
        least_part: smaller storages than this part of the limit stay.
        added, read: are called with each storage that is saved first, or that backward reads first, while learning.
    """

    def __init__(self, device: torch.device, pressure: Pressure, store: HostStore) -> None:
        self.ahead_bytes = 0
        self.offloaded, self.recomputed = Counter[Any](), Counter[Any]()
        self.owner: Any = None
        self.least_part = _LEAST_PART
        self.added: Callable[[int, SavedStorage], None] = lambda key, saved: None
        self.read: Callable[[SavedStorage], None] = lambda saved: None
        self.device, self.pressure, self.gradients = device, pressure, GatheredGradients(device)
        self._lock = new_lock(LockLevel.INNERMOST)
        self._store = store
        self._by_key, self._resident, self._away = dict[int, int](), dict[int, _Reference](), dict[int, _Reference]()
        self._kept: dict[int, Callable[[], Tensor | None]] = {}
        self._young = deque[_Reference]()
        self._leaving = deque[tuple[_Reference, torch.UntypedStorage, Any]]()
        self._gone = deque[tuple[Any, int, int, int, Any, Any]]()
        self._order = self._left_ahead = self._short = self._passed_by = 0

    def keep(self, tensor: Tensor) -> None:
        """Let a tensor stay where it is whenever it is saved, because it is there anyway."""
        key = storage_key(tensor.data) if tensor.device == self.device else None
        if key is not None:
            self._kept[key] = weakref.ref(tensor)

    def is_kept(self, key: int) -> bool:
        """Return whether a storage is that of a tensor that stays."""
        tensor = self._kept[key]() if key in self._kept else None
        if tensor is not None and storage_key(tensor.data) == key:
            return True
        self._kept.pop(key, None)  # the program may have given the tensor another storage
        return False

    def kept(self) -> list[Tensor]:
        """Return the tensors that stay."""
        return [tensor for each in [*self._kept.values()] if (tensor := each()) is not None]

    def saved(self, key: int | None) -> SavedStorage | None:
        """Return the saved storage of a key, if there is one on the device."""
        found = self._resident.get(self._by_key.get(key, 0)) if key is not None else None
        return None if found is None else found()

    def savers(self, least: int) -> tuple[set[Any], int]:
        """Return those who own the most bytes on the device and all who save these, and how many bytes they are.

        A storage can leave only if hooks see each tensor of it that is saved.

        Args:
            least: bytes that are enough.
        """
        seen, size = set[Any](), 0
        for owner, owned in self.owners().most_common():
            if size < least:
                seen.add(owner)
                size += owned
        with self._lock:
            here = [saved for each in self._resident.values() if (saved := each()) is not None]
        return seen.union(*(each.others for each in here if each.owner in seen)), size

    def owners(self) -> Counter[Any]:
        """Return the bytes of saved storages on the device, by owner."""
        with self._lock:
            found = Counter[Any]()
            for each in self._resident.values():
                if (saved := each()) is not None:
                    found[saved.owner] += saved.size
            return found

    def begin_step(self) -> None:
        """Note that all that is saved from now on belongs to another step."""
        self._left_ahead, self._short = self.ahead_bytes, 0
        self._young.clear()

    def pack(self, tensor: Tensor) -> Packed:
        """Return what stands for a tensor until backward reads it."""
        key = storage_key(tensor) if tensor.device == self.device else None
        if key is None:
            return KeptTensor(tensor)
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if not size or size * self.least_part < self.pressure.limit:
            return KeptTensor(tensor)
        if self.is_kept(key) or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():  # has no memory
            return KeptTensor(tensor)
        with self._lock:
            self._settle()
            saved = self.saved(key)
            if saved is not None:
                packed = SavedTensor(tensor, saved)
                if self.owner is not saved.owner and self.owner not in saved.others:
                    saved.others = (*saved.others, self.owner)
            else:
                self._order += 1
                saved = SavedStorage(storage, self.owner, self._order, self._gone)
                packed, reference = SavedTensor(tensor, saved), weakref.ref(saved)
                self._by_key[key], self._resident[saved.order] = saved.order, reference
                if self.pressure.learning:
                    self.added(key, saved)
                self._young.append(reference)
                self._leave_early()
                self.pressure.grew(size)
            del storage, saved
            self._relieve(self.pressure.excess(self.owner))
            return packed

    def unpack(self, packed: Packed) -> Tensor:
        """Return the tensor that was packed; raise a FittedStepError if it was changed in place since."""
        if isinstance(packed, KeptTensor):
            return packed.tensor
        packed.check()
        with self._lock:
            self._settle()
            saved = packed.saved
            self.owner = saved.owner
            if self.pressure.scattered and saved.size * _LARGE_PART > self.pressure.limit and _convolves():
                self._gather_gradients()
            if saved.calls:
                self.read(saved)
            self._back(saved)
            found = packed.shown()
            self._relieve(self.pressure.excess(saved.owner))
            if saved.arrival is not None:
                self._store.wait(saved.arrival)
                saved.arrival = None
            self._passed_by += 1
            if self._away and (self._short <= 0 or self.pressure.learning or self._passed_by >= _PASSED_BY):
                self._fetch_ahead(saved.order)
            return found

    def relieve(self) -> None:
        """Let storages leave until the device has room for what the running module takes for a while."""
        over = self.pressure.excess(self.owner)
        if over > 0:
            with self._lock:
                self._settle()
                self._relieve(over)

    def make_room(self, size: int) -> None:
        """Let storages leave until the device has room for a convolution, as far as any can.

        While steps are learned, or where none has taken as much, the room is one piece, an eighth larger: nobody knows
        what the workspace takes, holes between tensors are no use to it, and a convolution cannot be asked to try
        again. To look for a piece takes longer than a convolution where the allocator must unmap pages for it. The
        device has nothing to compute meanwhile, and that is no time of the module.
        """
        with self._lock, self._store.waiting():
            self._settle()
            is_new = self.pressure.takes(self.owner, size) or self.pressure.learning
            self._relieve(self.pressure.room(self.owner, 0, self.pressure.convolution_bytes(self.owner)))
            piece = size + size // _PIECE_PART
            while is_new and not self._fits(piece) and self._relieve(max(size // 4, self.pressure.limit // 64)):
                pass
            self.pressure.rebase()  # the piece is nothing that the convolution took

    def _gather_gradients(self) -> None:
        """Let new gradients lie side by side until backward ends, if they are many and there is room for a copy."""
        new = self.gradients.new()
        size = sum(each.nbytes for each in new)
        if size * _GATHERED_PART >= self.pressure.limit and self.pressure.room(self.owner, size) <= 0:
            self.gradients.gather(new)
            self.pressure.rebase()  # the copy is nothing that a module took

    def _fits(self, size: int) -> bool:
        """Return whether the allocator has a piece of some bytes, which it keeps for who asks next."""
        try:
            torch.empty(size, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError:
            return False
        return True

    def free(self, size: int) -> bool:
        """Let storages of some bytes leave at once; return whether any did."""
        with self._lock:
            self._settle()
            self.pressure.failed += 1
            self.pressure.room(self.owner, 0)
            return self._relieve(max(size, self.pressure.limit // 64)) > 0

    def settle(self) -> None:
        """End all copies, and forget what others hold. What is saved still can come back."""
        with self._lock:
            self._settle()
            self._store.settle()
            self._drop_departed(0, wait=False)
            self._kept.clear()

    def _relieve(self, over: int) -> int:
        if over <= 0:
            return 0
        freed = self._drop_departed(over, wait=True)
        if freed < over:
            freed += self._send(over - freed)
            freed += self._drop_departed(over - freed, wait=True)
        self.pressure.rebase()
        return freed

    def _back(self, saved: SavedStorage, *, ahead: bool = False) -> None:
        """Bring a storage back to the device if it has left; others leave for it unless it comes ahead."""
        saved.leaves = False
        if saved.storage is not None:
            return
        if not ahead:
            self._relieve(self.pressure.room(saved.owner, saved.size))
        try:
            with _disable_current_modes() if ahead else nullcontext():  # the guard would let others leave for it
                target = torch.empty(saved.size, dtype=torch.uint8, device=self.device)
            if ahead:
                self.pressure.alive.add(target, bounded=True)
        except torch.OutOfMemoryError:  # there are holes between tensors
            if ahead:
                return
            self._relieve(2 * saved.size)
            target = torch.empty(saved.size, dtype=torch.uint8, device=self.device)
        assert saved.piece is not None
        saved.arrival = self._store.come_back(target, saved.piece, saved.departure)
        saved.storage = target.untyped_storage()
        self._resident[saved.order] = self._away.pop(saved.order)
        self.pressure.came(saved.size)

    def _fetch_ahead(self, order: int) -> None:
        """Begin to bring back what backward reads next, as far as there is room.

        What it reads much later must leave room for all that runs until then, because it would have to leave again.
        A look takes as long as an operation. So where there is no room, the next look comes when enough was freed.
        Hooks do not see all that is freed, so it also comes when backward has read some more.
        """
        self._passed_by = 0
        for each in nlargest(_AHEAD, (key for key in self._away if key < order)):
            saved = self._away[each]()
            if saved is not None:
                passing = 0 if order - each <= _NEAR else self.pressure.most_passing
                self._short = self.pressure.room(self.owner, saved.size, passing)
                if self._short > 0:
                    return
                self._back(saved, ahead=True)
                if saved.storage is None:  # only holes are free, and each try flushes the allocator's cache
                    return

    def _leave_early(self) -> None:
        """Send storages on their way that are to leave anyway, so that copies run beside forward."""
        if self._left_ahead <= 0 and not self._leaving:
            return
        if self.pressure.learning:
            self.pressure.room(self.owner, 0)
        for _ in range(min(_LOOKED_AT, len(self._young))):
            if self._left_ahead <= 0:
                break
            reference = self._young.popleft()
            saved = reference()
            if saved is None or saved.storage is None or saved.leaves:
                continue
            if saved.is_alone():
                self._left_ahead -= saved.size
                self._depart(saved)
            else:
                self._young.append(reference)
            del saved
        self._drop_departed(0, wait=False)
        self.pressure.rebase()

    def _send(self, size: int) -> int:
        """Let so many bytes of the oldest storages leave; return how many have left without a copy.

        Those that have come back are younger in the dictionary than they are.
        """
        left = sent = 0
        for order in sorted(self._resident):
            saved = self._resident[order]()
            if left + sent >= size:
                break
            if saved is None or saved.leaves or not saved.is_alone():
                continue
            if saved.is_copied():
                self._store.wait(saved.arrival)
                self._store.wait(saved.departure)
                saved.arrival = None
                self._dropped(saved)
                left += saved.size
            else:
                self._depart(saved)
                sent += saved.size
            del saved
        self.pressure.relieved += sent
        self.pressure.lacked += min(sent, max(0, size - left))
        return left

    def _depart(self, saved: SavedStorage) -> None:
        """Begin to copy a storage to the host; its memory is freed when that has ended."""
        assert saved.storage is not None
        if not saved.is_copied():
            self._store.wait(saved.arrival)
            saved.arrival = None
            saved.piece = saved.piece or self._store.take(saved.size)
            source = torch.empty(0, dtype=torch.uint8, device=self.device).set_(saved.storage)
            saved.departure = self._store.leave(source, saved.piece)
            saved.copied_version = saved.version
            self.offloaded[saved.owner] += saved.size
        saved.leaves = True
        self._leaving.append((weakref.ref(saved), saved.storage, saved.departure))

    def _drop_departed(self, size: int, *, wait: bool) -> int:
        """Free storages whose copies have ended, or so many bytes, for which computing waits; return the bytes."""
        found = 0
        while self._leaving:
            reference, storage, event = self._leaving[0]
            if event is not None and not event.query():
                if not wait or found >= size:
                    break
                self._store.wait(event)
            self._leaving.popleft()
            saved = reference()
            if saved is None:
                found += storage.nbytes()
            elif saved.leaves and saved.storage is storage and saved.departure is event:
                found += saved.size
                self._dropped(saved)
            del storage, saved
        return found

    def _dropped(self, saved: SavedStorage) -> None:
        assert saved.storage is not None
        if self._by_key.get(saved.storage._cdata) == saved.order:
            del self._by_key[saved.storage._cdata]
        saved.drop()
        self._away[saved.order] = self._resident.pop(saved.order)
        self.pressure.away += saved.size

    def _settle(self) -> None:
        """Count what has gone since."""
        while self._gone:
            storage, order, key, size, piece, arrival = self._gone.popleft()
            if self._resident.pop(order, None) is not None:
                self._short -= size
            if self._away.pop(order, None) is not None:
                self.pressure.away -= size
            if self._by_key.get(key) == order:
                del self._by_key[key]
            self._store.wait(arrival)
            del storage
            if piece is not None:
                self._store.give_back(piece, arrival)
