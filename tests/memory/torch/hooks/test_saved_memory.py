"""What leaves a device and comes back. Copies may end late, as on a GPU; nothing is freed or read before."""

import random
import weakref
from time import perf_counter

import pytest
import torch

from ucudnn.errors import BudgetError, FittedStepError
from ucudnn.memory.torch.hooks.guard import Guard
from ucudnn.memory.torch.hooks.host_store import HostStore
from ucudnn.memory.torch.hooks.pressure import CountedBytes, Pressure
from ucudnn.memory.torch.hooks.saved_memory import SavedMemory
from ucudnn.memory.torch.hooks.saved_tensors import VersionCheck, storage_key

CPU = torch.device("cpu")
OWNERS = "small", "large"


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
        self.waiting = self.inner.waiting
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
    """Says that saved tensors, and what passes, are all that is alive."""

    def __init__(self):
        self.memory, self.passing = None, 0

    def failures(self):
        return 0, 0

    def look(self):
        level = 0 if self.memory is None else sum(self.memory.owners().values())
        return level, level + self.passing

    def add(self, tensors, *, bounded=False):
        return False


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


@pytest.mark.parametrize("room", [0.3, 0.6, 0.9])
def test_a_step_sends_what_does_not_fit_once_and_brings_it_back_once(room):
    count, size = 80, 4000
    store, alive = LateStore(random.Random(0)), Saved()
    alive.memory = memory = SavedMemory(CPU, Pressure(alive, int(count * size * room), 0.0), store)
    for learning in (True, False):
        memory.pressure.learning, memory.pressure.in_backward = learning, False
        memory.begin_step()
        saved, before = [], len(store.begun)
        for at in range(count):
            memory.owner = OWNERS[at % 2]
            x = torch.randn(size // 4)
            saved.append((memory.pack(x), x.clone()))
            del x
        away = len(store.begun) - before
        assert abs(away - count * (1 - room)) < 8
        memory.pressure.in_backward = True
        while saved:
            packed, expected = saved.pop()
            assert torch.equal(memory.unpack(packed), expected)
            alive.passing = len(saved) % 2 * 3 * size  # until the next look, what every second operation takes
        alive.passing = 0
        sent = sum(event.after is None for event in store.begun[before:])
        back = len(store.begun) - before - sent
        assert sent <= away + 4  # the first of these operations needs room, too
        assert back == sent
    memory.settle()


def test_parts_of_a_storage_come_back_from_the_host_as_they_were_and_a_change_in_place_is_told():
    memory = SavedMemory(CPU, Pressure(Saved(), 5000, 0.0), HostStore(CPU, 2**30))
    x = torch.randn(8, 200)
    expected, packed = [x[2:4].clone(), x.T.clone(), x[5].clone()], [*map(memory.pack, (x[2:4], x.T, x[5]))]
    strides = [(200, 1), (1, 200), (1,)]
    del x
    for _ in range(3):  # as it was saved, and when it has come back
        for each, value, stride in zip(packed, expected, strides, strict=True):
            found = memory.unpack(each)
            assert torch.equal(found, value)
            assert found.stride() == stride
        del found
        assert memory.free(1)
    y = torch.randn(8, 200)
    part = memory.pack(y[2:4])
    y.add_(1)
    with pytest.raises(FittedStepError, match=r"of shape \[2, 200\] is at version 1; expected version 0"):
        memory.unpack(part)


def test_room_for_a_convolution_is_made_until_it_is_one_piece(monkeypatch):
    store = HostStore(CPU, 2**30)
    memory = SavedMemory(CPU, Pressure(Saved(), 64_000, 0.0), store)
    saved = [memory.pack(torch.randn(500)) for _ in range(20)]
    asked, fits = [], iter([False, False, True, True])
    monkeypatch.setattr(SavedMemory, "_fits", lambda _, size: asked.append(size) or next(fits))
    store.waits, begin = [], perf_counter()
    memory.make_room(8000)
    ((first, last),), store.waits = store.waits, None  # one, with the copies in it
    assert begin < first < last < perf_counter()
    assert asked == [9000] * 3
    assert memory.pressure.away == 2 * 2000
    memory.make_room(8000)  # a step that is learned has other holes than the one before
    assert asked == [9000] * 4
    memory.pressure.learning = False
    memory.make_room(8000)  # a convolution has taken as much
    assert asked == [9000] * 4
    monkeypatch.setattr(SavedMemory, "_fits", lambda *_: False)
    memory.make_room(8001)  # all that can leave has left then
    assert memory.pressure.away == 20 * 2000
    assert len(saved) == 20


def test_what_a_convolution_took_once_is_free_before_it_runs_again_and_nobody_looks_for_a_piece():
    alive = Saved()
    memory = SavedMemory(CPU, Pressure(alive, 64_000, 0.0), HostStore(CPU, 2**30))
    alive.memory, memory.owner = memory, "conv"
    memory.make_room(1000)
    alive.passing = 50_000  # results and a workspace that nobody foresaw
    memory.pressure.room("conv", 0)
    memory.pressure.learning, memory.owner = False, "other"
    saved = [memory.pack(torch.randn(500)) for _ in range(20)]
    memory.relieve()
    assert memory.pressure.away == 0
    memory.owner = "conv"
    memory.relieve()
    assert memory.pressure.away == 13 * 2000  # 26,000 of them are too many for 50,000 more
    assert len(saved) == 20


def test_what_would_come_back_ahead_is_asked_for_once_where_only_holes_are_free(monkeypatch):
    memory = SavedMemory(CPU, Pressure(Saved(), 64_000, 0.0), HostStore(CPU, 2**30))
    memory.pressure.learning = False
    saved = [memory.pack(torch.randn(500)) for _ in range(6)]
    assert memory.free(5 * 2000)
    asked, empty = [], torch.empty

    def full(*size, **how):
        if how.get("dtype") is torch.uint8 and size[0]:
            asked.append(size)
            raise torch.OutOfMemoryError
        return empty(*size, **how)

    monkeypatch.setattr(torch, "empty", full)
    memory.unpack(saved[5])
    assert asked == [(2000,)]
    monkeypatch.undo()
    memory.unpack(saved[5])
    assert memory.pressure.away == 2 * 2000


@pytest.mark.parametrize(("room", "here"), [(500, [5]), (2500, [4, 5]), (4500, [3, 4, 5])])
def test_nothing_leaves_for_what_comes_back_ahead_and_there_is_no_error_without_room(room, here):
    alive = CountedBytes(64_000)
    memory = SavedMemory(CPU, Pressure(alive, 64_000, 0.0), HostStore(CPU, 2**30))
    with Guard(CPU, memory, lambda error: BudgetError(str(error)), alive):
        saved = [memory.pack(torch.randn(500)) for _ in range(6)]
        assert memory.free(5 * 2000)
        memory.pressure.learning = False
        alive.cap = alive.look()[0] + room  # holes leave less than the limit says
        memory.unpack(saved[5])
        assert [number for number, each in enumerate(saved) if each.saved.storage is not None] == here
        assert alive.look()[0] <= alive.cap


def test_nobody_looks_for_room_ahead_until_what_was_missing_is_free(monkeypatch):
    alive, looks = Saved(), []
    memory = alive.memory = SavedMemory(CPU, Pressure(alive, 8 * 2000, 0.0), HostStore(CPU, 2**30))
    memory.pressure.learning = False
    saved = [memory.pack(torch.randn(500)) for _ in range(12)]
    away = memory.pressure.away
    assert away >= 4 * 2000
    look = alive.look
    monkeypatch.setattr(alive, "look", lambda: looks.append(1) or look())
    for count in (1, 1):
        memory.unpack(saved[-1])
        assert (len(looks), memory.pressure.away) == (count, away)
    saved.pop()
    memory.unpack(saved[-1])
    assert memory.pressure.away == away - 2000


def test_somebody_looks_again_when_backward_has_read_some_more_because_not_all_that_is_freed_is_seen(monkeypatch):
    alive = Saved()
    memory = alive.memory = SavedMemory(CPU, Pressure(alive, 8 * 2000, 0.0), HostStore(CPU, 2**30))
    memory.pressure.learning = False
    saved = [memory.pack(torch.randn(500)) for _ in range(12)]
    away = memory.pressure.away
    memory.unpack(saved[-1])
    memory.pressure.limit = 16 * 2000
    for _ in range(5):
        memory.unpack(saved[-1])
        assert memory.pressure.away == away
    memory.unpack(saved[-1])
    assert memory.pressure.away == away - 3 * 2000


def test_what_lacked_is_told_apart_from_the_whole_storages_that_left():
    alive = Saved()
    alive.memory = memory = SavedMemory(CPU, Pressure(alive, 10_000, 0.0), LateStore(random.Random(0)))
    memory.pressure.learning = False
    saved = [memory.pack(torch.randn(1000)) for _ in range(2)]
    assert (memory.pressure.relieved, memory.pressure.lacked) == (0, 0)
    saved.append(memory.pack(torch.randn(550)))
    assert (memory.pressure.relieved, memory.pressure.lacked) == (4000, 200)
    memory.free(5000)
    assert (memory.pressure.relieved, memory.pressure.lacked) == (4000 + 6200, 5200)
    memory.free(5000)
    assert memory.pressure.lacked == 5200  # nothing is left
    memory.settle()


def test_hooks_are_to_see_all_who_save_what_could_leave():
    memory = SavedMemory(CPU, Pressure(Saved(), 64_000, 0.0), HostStore(CPU, 2**30))
    saved = []
    for owner, size, others in (("large", 500, "ab"), ("small", 100, "c"), ("middle", 300, ""), ("least", 50, "d")):
        x = torch.randn(size)
        for memory.owner in (owner, *others, owner):
            saved.append(memory.pack(x))
    assert memory.savers(1) == ({"large", "a", "b"}, 2000)
    assert memory.savers(2001) == ({"large", "a", "b", "middle"}, 3200)
    assert memory.savers(3300) == ({"large", "a", "b", "middle", "small", "c"}, 3600)
    del saved[:4]
    assert memory.savers(1300) == ({"middle", "small", "c"}, 1600)


@pytest.mark.parametrize(
    ("scattered", "length", "limit", "moved"),
    [(True, 40_000, 8e6, True), (False, 40_000, 8e6, False), (True, 20_000, 8e6, False), (True, 40_000, 4e6, False)],
)
def test_gradients_become_one_piece_for_large_convolutions_of_backward(scattered, length, limit, moved):
    torch.manual_seed(0)
    convolutions = [torch.nn.Conv1d(2, 2, 3, padding=1) for _ in range(2)]
    linears = [torch.nn.Linear(600, 1000), torch.nn.Linear(1000, 600)]
    model = torch.nn.Sequential(*convolutions, torch.nn.AdaptiveAvgPool1d(600), *linears)
    x = torch.randn(2, length)
    model(x).square().sum().backward()
    plain = [each.grad for each in model.parameters()]
    model.zero_grad()

    memory = SavedMemory(CPU, Pressure(Saved(), int(limit), 0.0), HostStore(CPU, 2**30))
    memory.pressure._since_unmapped = 0 if scattered else 64
    assert memory.pressure.scattered is scattered
    for each in model.parameters():
        memory.keep(each)
    memory.begin_step()
    seen = []

    def storages():
        gradients = [each.weight.grad for each in linears if each.weight.grad is not None]
        return len(gradients), len({each.untyped_storage().data_ptr() for each in gradients})

    def unpack(packed):
        found = memory.unpack(packed)
        seen.append(storages())
        return found

    with torch.autograd.graph.saved_tensors_hooks(memory.pack, unpack):
        loss = model(x).square().sum()
    memory.gradients.begin(memory.kept())
    memory.pressure.in_backward = True
    loss.backward()
    assert seen[0] == (0, 0)
    assert seen[-1] == (2, 1 if moved else 2)
    memory.gradients.end()
    assert storages() == (2, 2)
    for each, expected in zip(model.parameters(), plain, strict=True):
        assert torch.equal(each.grad, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_have_no_shape_and_stay(layout):
    parts = [torch.randn(length, 8) for length in (300, 200)]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    memory = SavedMemory(CPU, Pressure(Saved(), 64_000, 0.0), HostStore(CPU, 2**30))
    packed, check = memory.pack(nested), VersionCheck(nested)
    assert not memory.free(1000)
    check.check()
    for found, part in zip(memory.unpack(packed).unbind(), parts, strict=True):
        assert torch.equal(found, part)
    nested.mul_(2)
    for see in (check.check, lambda: memory.unpack(packed)):
        with pytest.raises(FittedStepError, match="modified by an inplace operation"):
            see()


def test_a_tensor_stays_as_long_as_it_lies_where_it_did():
    memory = SavedMemory(CPU, Pressure(Saved(), 64_000, 0.0), HostStore(CPU, 2**30))
    tensor = torch.nn.Parameter(torch.randn(500))
    memory.keep(tensor)
    key = storage_key(tensor.data)
    assert memory.is_kept(key)
    before = tensor.data
    tensor.data = before.clone()
    assert not memory.is_kept(key)  # an activation may lie there next
    assert not memory.is_kept(storage_key(torch.randn(500)))
