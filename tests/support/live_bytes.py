"""LiveBytes: counts the bytes of all storages that operators make, while they live, and which operators run."""

import weakref
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered.

    Args:
        present: tensors that are there before.

    Attributes:
        live: bytes that live now.
        peak: most bytes that lived at the end of an operator.
        calls: how often each operator ran.
    """

    def __init__(self, present=()):
        super().__init__()
        self.live = self.peak = 0
        self.calls = Counter()
        self._known = {}
        for tensor in present:
            self._add(tensor.untyped_storage())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)}
        result = func(*args, **kwargs)
        self.calls[func] += 1
        for each in tree_leaves(result):
            if torch.is_tensor(each) and each.untyped_storage()._cdata not in given:
                self._add(each.untyped_storage())
        self.peak = max(self.peak, self.live)
        return result

    def _add(self, storage):
        address, size = storage._cdata, storage.nbytes()
        if address not in self._known:
            self.live += size
            self._known[address] = weakref.ref(storage, lambda _: self._gone(address, size))

    def _gone(self, address, size):
        del self._known[address]
        self.live -= size
