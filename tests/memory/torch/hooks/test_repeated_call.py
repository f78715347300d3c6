"""Calls of modules that are repeated in backward: what gives the same bits, and what does not."""

import copy
import itertools
import random
import sys
import time  # noqa: F401  # in lines of modules
import weakref

import numpy
import pytest
import torch
from torch import nn

from tests.support.plain_training import assert_same_bits
from ucudnn.errors import FittedStepError
from ucudnn.memory.torch.hooks.call_effects import MOST_CLONED
from ucudnn.memory.torch.hooks.host_store import HostStore
from ucudnn.memory.torch.hooks.pressure import CountedBytes, Pressure
from ucudnn.memory.torch.hooks.repeated_call import RepeatedCall, _as_before, may_be_repeated
from ucudnn.memory.torch.hooks.saved_memory import SavedMemory
from ucudnn.memory.torch.hooks.saved_tensors import storage_key

CPU = torch.device("cpu")
WIDTH = 8
LIMIT = 0


@pytest.fixture(autouse=True, params=[2**18, 2**10])
def limit(request, monkeypatch):
    """Let what calls save again stay, or leave, because it is more than an eighth of these bytes."""
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", request.param)
    return request.param


def new_memory(module):
    memory = SavedMemory(CPU, Pressure(CountedBytes(2**30), LIMIT, 0.0), HostStore(CPU, 2**30))
    for each in (*module.parameters(), *module.buffers()):
        memory.keep(each)
    return memory


def repeated(module, *args, memory=None, tried=None, **kwargs):
    """Call a module so that backward calls it again; return its output."""

    def run(module, *args, **kwargs):
        return module(*args, **kwargs)

    return RepeatedCall(memory or new_memory(module), run, module, 100, tried)(args, kwargs)


NUMBERS, STATE, GENERATOR = itertools.count(), {"calls": 0}, torch.Generator()
CALLS = 0


class Traces(nn.Module):
    """Computes a factor by lines that leave traces, which a second call would see or leave again."""

    def __init__(self, lines):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.calls, self.seen, self.table, self.last = 0, [], {"calls": 0}, None
        self.drawn, self.sums, self.recent = random.Random(1), torch.zeros(1), numpy.random.default_rng(1)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("large", torch.zeros(MOST_CLONED))
        found = {}
        exec(
            "def factor(self, x):\n    factor = 1\n    " + "\n    ".join(lines.splitlines()) + "\n    return factor",
            globals(),
            found,
        )
        self.factor = found["factor"]

    def forward(self, x):
        return self.inner(x * self.factor(self, x))

    def traces(self):
        """Return all that calls may leave."""
        own = (
            self.calls,
            self.seen,
            self.table,
            self.drawn.getstate(),
            self.sums.item(),
            str(self.recent.bit_generator.state),
        )
        drawn = (
            random.getstate(),
            str(numpy.random.get_state()),
            torch.get_rng_state().tolist(),
            GENERATOR.get_state().tolist(),
        )
        return copy.deepcopy((*own, *drawn, repr(NUMBERS), STATE, CALLS, self.count.item(), self.large[0].item()))


def trial(module, *args):
    """Return what a trial says, once backward has run."""
    found = []
    repeated(module, *args, tried=lambda tried, same: found.append((tried, same))).sum().backward()
    [(tried, same)] = found
    assert tried is module
    return same


@pytest.mark.parametrize(
    ("lines", "same"),
    [
        ("", True),
        ("self.calls += 1\nfactor = self.calls", True),
        ("self.calls += 1\nfactor = 2 if self.calls % 8 == 0 else 1", True),
        ("factor = 1 if self.last is None else self.last.mean()\nself.last = x.detach()", True),
        ("self.count.add_(1)", False),
        ("self.count.add_(1)\nfactor = self.count", False),
        ("self.large.add_(1)", False),
        ("self.sums.add_(1)", False),
        ("x.detach().add_(0)", False),
        ("self.seen.append(1)", False),
        ("self.table['calls'] += 1", False),
        ("STATE['calls'] += 1", False),
        ("global CALLS\nCALLS += 1", False),
        ("factor = next(NUMBERS)", False),
        ("factor = random.random()", False),
        ("factor = self.drawn.random()", False),
        ("factor = float(numpy.random.rand())", False),
        ("factor = float(self.recent.random())", False),
        ("factor = torch.rand(1)", True),
        ("factor = torch.rand(1, generator=GENERATOR)", False),
        ("factor = time.time() % 1", False),
    ],
)
def test_a_call_that_leaves_traces_is_made_once(lines, same):
    torch.manual_seed(0)
    module, found = Traces(lines), []
    for _ in range(2):
        y = repeated(module, torch.randn(4, WIDTH), tried=lambda _, same: found.append(same))
        before = module.traces()
        y.sum().backward()
        assert module.traces() == before
    assert {*found} == {same}


@pytest.mark.parametrize("calls", [1, 6, 7])
def test_a_repeated_call_has_the_attributes_of_the_first_one(calls):
    """A call in eight differs from the others, and which one it is depends on an attribute."""
    module, twin = (Traces("self.calls += 1\nfactor = 2 if self.calls % 8 == 0 else 1") for _ in range(2))
    twin.load_state_dict(module.state_dict())
    module.calls = twin.calls = calls
    x = torch.randn(4, WIDTH)
    repeated(module, x).sum().backward()
    twin(x).sum().backward()
    assert_same_bits([each.grad for each in module.parameters()], [each.grad for each in twin.parameters()])
    assert module.calls == calls + 1


def test_a_repeated_call_has_the_names_of_attributes_of_the_first_one():
    class Renames(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.even = None

        def forward(self, x):
            name, other = ("even", "odd") if hasattr(self, "even") else ("odd", "even")
            delattr(self, name)
            setattr(self, other, None)
            return super().forward(x * (2 if name == "even" else 3)).tanh()

    module, x = Renames(), torch.randn(4, WIDTH)
    twin = copy.deepcopy(module)
    for _ in range(2):
        repeated(module, x).sum().backward()
        twin(x).sum().backward()
        assert_same_bits([each.grad for each in module.parameters()], [each.grad for each in twin.parameters()])
    assert hasattr(module, "even")
    assert not hasattr(module, "odd")


@pytest.mark.parametrize(
    ("module", "same"),
    [
        (nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(WIDTH), nn.Tanh()), True),
        (nn.Sequential(nn.ReLU(inplace=True), nn.Tanh()), False),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), False),
    ],
)
def test_modules_of_pytorch_are_tried(module, same):
    assert trial(module, torch.randn(4, WIDTH) + torch.zeros(1, requires_grad=True)) is same


def test_a_call_with_other_objects_is_not_repeated():
    class Taking(nn.Linear):
        def forward(self, x, other):
            return super().forward(x)

    said = []
    module = Taking(WIDTH, WIDTH)
    repeated(module, torch.randn(4, WIDTH), object(), tried=lambda _, same: said.append(same)).sum().backward()
    assert said == [False]


def test_a_repeated_call_saves_nothing_and_gives_the_same_gradients():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH), nn.GELU())
    x = torch.randn(4, WIDTH, requires_grad=True)
    found = []
    for memory in (None, new_memory(module)):
        torch.manual_seed(1)
        module[2].reset_running_stats()
        y = module(x) if memory is None else repeated(module, x, memory=memory)
        assert memory is None or sum(memory.owners().values()) == x.nbytes
        state = torch.get_rng_state()
        found.append([*torch.autograd.grad(y.sum(), [x, *module.parameters()]), *module.buffers(), state])
        found[-1] = [each.clone() for each in found[-1]]
        assert torch.equal(torch.get_rng_state(), state)
    assert_same_bits(*found)
    assert memory.recomputed[module] == 100


OUTSIDE = [1, 2]


@pytest.mark.parametrize("attribute", ["list", "outside", "dict", "buffer", "parameter", "module"])
def test_a_call_that_adds_to_what_a_module_has_is_an_error_once_it_is_repeated(attribute):
    class Adds(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.seen, self.table = [], {}

        def forward(self, x):
            if attribute == "list":
                self.seen.append(1)
            elif attribute == "outside":  # becomes an attribute meanwhile
                self.seen = OUTSIDE
                self.seen.append(len(x))
            elif attribute == "dict":
                self.table["x"] = 1
            elif attribute == "buffer":
                self.register_buffer("added", torch.zeros(1))
            elif attribute == "parameter":
                self.register_parameter("added", nn.Parameter(torch.zeros(1)))
            else:
                self.add_module("added", nn.Identity())
            return super().forward(x)

    with pytest.raises(FittedStepError, match="changes arguments, parameters, buffers or lists"):
        repeated(Adds(), torch.randn(4, WIDTH))


class Renews(nn.Linear):
    """Counts calls in buffers that each of them makes anew, a small and a large one, and scales by a mask."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("large", torch.zeros(MOST_CLONED))
        self.register_buffer("mask", torch.ones(WIDTH))
        self.table, self.calling = {"scale": 1.0}, []

    def forward(self, x):
        self.calls, self.large = self.calls + 1, self.large + 1
        factor = (2 if int(self.calls) % 2 == 0 else 1) * (3 if int(self.large[0]) % 2 == 0 else 1)
        return (super().forward(x * self.table["scale"]) * self.mask * factor).tanh()


def test_a_repeated_call_has_the_buffers_of_the_first_one():
    module, x = Renews(), torch.randn(4, WIDTH)
    twin = copy.deepcopy(module)
    memory = new_memory(module)
    for each in (module, twin):
        each.mask = torch.full((WIDTH,), 0.5)  # the memory does not know it
    first, second = (repeated(module, x, memory=memory) for _ in range(2))
    memory.settle()  # as when the block ends before backward
    (first + second.square()).sum().backward()
    first, second = (twin(x) for _ in range(2))
    (first + second.square()).sum().backward()
    assert_same_bits([each.grad for each in module.parameters()], [each.grad for each in twin.parameters()])
    assert module.calls == 2
    assert memory.recomputed[module] == 200


def test_clones_of_buffers_live_until_a_repeated_call_ends():
    module = Renews()
    own = set()
    with _as_before([(module, vars(module).copy(), module._buffers.copy())], own):
        clone = weakref.ref(module.calls)
        module.calls = module.calls + 1  # an activation that lay in its place would be taken for it
        assert storage_key(clone()) in own
    assert clone() is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda module: module.mask.add_(1), "parameter or buffer that was modified"),
        (
            lambda module: setattr(module.weight, "data", module.weight.data * 2),
            "parameter or buffer that was modified",
        ),
        (lambda module: module.table.update(scale=2.0), "list or dict that was changed"),
        (lambda module: module.calling.append(1), "list or dict that was changed"),
    ],
)
def test_what_forward_depends_on_and_the_program_changes_before_backward_is_an_error(change, words):
    module = Renews()
    y = repeated(module, torch.randn(4, WIDTH))
    change(module)
    with pytest.raises(FittedStepError, match=words):
        y.sum().backward()


def test_a_list_that_a_call_makes_anew_is_no_trace():
    class Sized(nn.Linear):
        sizes: list[int]

        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.sizes = [0, 0]

        def forward(self, x):
            self.sizes = [1000 + len(x), 2000 + len(x)]  # each time other objects
            return super().forward(x * self.sizes[0]).tanh()

    module = Sized()
    twin = copy.deepcopy(module)
    xs = [torch.randn(rows, WIDTH) / 1000 for rows in (4, 5)]
    sum(repeated(module, x).sum() for x in xs).backward()
    sum(twin(x).sum() for x in xs).backward()
    assert_same_bits([each.grad for each in module.parameters()], [each.grad for each in twin.parameters()])
    assert module.sizes == [1005, 2005]


def test_a_call_that_ends_early_leaves_nothing_behind():
    class Nested(Renews):
        def forward(self, x):
            self.calling.append(1)
            y = super().forward(x)
            self.calling.pop()
            return y

    class Double(Renews):
        def forward(self, x):
            torch.set_default_dtype(torch.float64)
            torch.use_deterministic_algorithms(True, warn_only=True)
            y = super().forward(x)
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)
            return y

    assert trial(Nested(), torch.randn(4, WIDTH)) is False
    repeated(Double(), torch.randn(4, WIDTH)).sum().backward()
    assert torch.get_default_dtype() is torch.float32
    assert not torch.are_deterministic_algorithms_enabled()


def test_modules_with_slots_are_not_repeated():
    class Slotted(nn.Linear):
        __slots__ = ("hidden",)

    assert not may_be_repeated(nn.Sequential(Slotted(WIDTH, WIDTH)))


def test_a_parameter_that_changed_since_forward_is_an_error():
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    y = repeated(module, torch.randn(4, WIDTH))
    with torch.no_grad():
        module[0].bias.add_(1)
    with pytest.raises(FittedStepError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_call_that_saves_other_tensors_is_an_error():
    class Once(nn.Linear):
        first = True

        def forward(self, x):
            x = super().forward(x)
            found = x.exp().sin() if Once.first else x.exp()
            Once.first = False
            return found

    with pytest.raises(FittedStepError, match="saves 1 tensors in the place of 2"):
        repeated(Once(WIDTH, WIDTH), torch.randn(4, WIDTH)).sum().backward()


def test_hooks_and_compiled_modules_are_called_once():
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    assert may_be_repeated(module)
    assert not may_be_repeated(nn.Sequential(nn.SyncBatchNorm(WIDTH)))
    assert not may_be_repeated(nn.Sequential(torch.compile(module, backend="aot_eager")))
    module[0].register_forward_hook(lambda *_: None)
    assert not may_be_repeated(module)


@pytest.mark.parametrize(("part", "packed"), [(1, 4), (2 * 8, 2), (4 * 8, 0)])
def test_an_eighth_of_the_limit_stays_of_what_a_call_saves_again_and_the_rest_can_leave(part, packed):
    class Sines(nn.Module):
        def forward(self, x):
            for _ in range(5):
                x = x.sin()  # saves its argument, so four results are saved
            return x

    module, seen = Sines(), []
    memory, x = new_memory(module), torch.randn(64, WIDTH, requires_grad=True)
    pack, memory.pressure.limit = memory.pack, part * x.nbytes
    memory.pack = lambda tensor: seen.append(tensor.nbytes) or pack(tensor)
    y = repeated(module, x, memory=memory)
    for _ in range(2):
        seen.clear()
        y.sum().backward(retain_graph=True)
        assert seen == packed * [x.nbytes]


def test_sparse_tensors_that_are_saved_after_the_trial_stay():
    class Sparse(nn.Module):
        def forward(self, x):
            return torch.sparse.mm(torch.eye(4).to_sparse(), x.sin()).cos()

    x = torch.randn(4, WIDTH, requires_grad=True)
    repeated(Sparse(), x).sum().backward()
    assert torch.allclose(x.grad, -x.sin().sin() * x.cos())
