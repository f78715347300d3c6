"""Saved tensors whose copies end late, as on a GPU: nothing is freed, read or written before its copy has ended."""

import random
import weakref

import pytest

torch = pytest.importorskip("torch")


from ucudnn.memory.torch.hooks.host_store import HostStore  # noqa: E402
from ucudnn.memory.torch.hooks.pressure import Pressure  # noqa: E402
from ucudnn.memory.torch.hooks.saved_memory import SavedMemory  # noqa: E402

CPU = torch.device("cpu")


class LateEvent:
    """A copy that is made when something waits for it, or after it was asked for some times."""

    def __init__(self, target, source, after, patience):
        self.device_side = weakref.ref((target if after else source).untyped_storage())
        self.target, self.source, self.after, self.patience, self.ended = target, source, after, patience, False
        self.source_side = not after
        if after:
            self.target = None  # memory on the device is not held by its copy
        else:
            self.source = None

    def query(self):
        self.patience -= 1
        if self.patience < 0:
            self.end()
        return self.ended

    def end(self):
        if self.ended:
            return
        if self.after is not None:
            self.after.end()
        storage = self.device_side()
        assert storage is not None, "memory was freed before its copy had ended"
        shown = torch.empty(0, dtype=torch.uint8).set_(storage)
        target, source = (self.target, shown) if self.source_side else (shown, self.source)
        target.copy_(source)
        self.ended = True


class LateStore:
    """A HostStore whose copies end late."""

    def __init__(self, draw):
        self.inner, self.draw, self.begun = HostStore(CPU, 2**30), draw, []
        self.take, self.give_back = self.inner.take, self.inner.give_back

    def leave(self, source, piece):
        return self._begin(piece.memory, source, None)

    def come_back(self, target, piece, departure):
        assert departure is not None
        return self._begin(target, piece.memory, departure)

    def _begin(self, target, source, after):
        self.begun.append(LateEvent(target, source, after, self.draw.randrange(6)))
        return self.begun[-1]

    def wait(self, event):
        if event is not None:
            event.end()

    def settle(self):
        for event in self.begun:
            if event.device_side() is not None:
                event.end()


class Saved:
    """Says that saved tensors are all that is alive."""

    def __init__(self):
        self.memory = None

    def look(self):
        return (0 if self.memory is None else sum(self.memory.owners().values()),) * 2


@pytest.mark.parametrize("seed", range(12))
def test_copies_that_end_late_change_nothing(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    store = LateStore(draw)
    alive = Saved()
    alive.memory = memory = SavedMemory(CPU, Pressure(alive, 5000, 0.0), store)
    for _ in range(6):
        memory.ahead_bytes = draw.choice((0, 4000, 10**6))
        memory.begin_step()
        saved, held = [], []
        for _ in range(40):
            x = torch.randn(draw.randrange(1, 400))
            saved.append((memory.pack(x.detach()), x.clone()))
            held.append(x if draw.random() < 0.1 else None)
            if draw.random() < 0.2:
                saved.pop(draw.randrange(len(saved)))
        kept = []
        while saved:
            packed, expected = saved.pop()
            if draw.random() < 0.9:
                found = memory.unpack(packed)
                assert torch.equal(found, expected)
                kept.append(found if draw.random() < 0.1 else None)
                if draw.random() < 0.1:
                    saved.append((packed, expected))
            del packed
        held.clear()
        kept.clear()
    memory.settle()
    assert (memory.owners(), memory.pressure.away) == ({}, 0)
    assert sum(memory.offloaded.values()) > 10000
    assert len({event.after is None for event in store.begun}) == 2
