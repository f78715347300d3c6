"""Calls of modules that are repeated in backward: what gives the same bits, and what does not."""

import pytest
import torch
from torch import nn

from tests.support.plain_training import assert_same_bits
from ucudnn.errors import FittedStepError
from ucudnn.memory.torch.hooks.host_store import HostStore
from ucudnn.memory.torch.hooks.live_bytes import CountedBytes
from ucudnn.memory.torch.hooks.pressure import Pressure
from ucudnn.memory.torch.hooks.repeated_call import RepeatedCall, may_be_repeated
from ucudnn.memory.torch.hooks.saved_memory import SavedMemory

CPU = torch.device("cpu")
WIDTH = 8


def new_memory(module):
    memory = SavedMemory(CPU, Pressure(CountedBytes(2**30), 2**18, 0.0), HostStore(CPU, 2**30))
    for each in (*module.parameters(), *module.buffers()):
        memory.keep(each)
    return memory


def repeated(module, *args, memory=None, tried=None, **kwargs):
    """Call a module so that backward calls it again; return its output."""

    def run(module, *args, **kwargs):
        return module(*args, **kwargs)

    return RepeatedCall(memory or new_memory(module), run, module, 100, tried)(args, kwargs)


class Counting(nn.Module):
    """Changes a list, a number and a buffer that it reads in each call, which a second call would see."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls, self.inner = kind, 0, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.seen = []
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        if self.kind == "list":
            self.seen.append(self.calls)
        if self.kind == "buffer":
            self.count.add_(1)
        factor = {"list": len(self.seen), "number": self.calls, "buffer": self.count, "nothing": 1}[self.kind]
        return self.inner(x * factor)


def trial(module, *args):
    """Return what a trial says, once backward has run."""
    found = []
    repeated(module, *args, tried=lambda tried, same: found.append((tried, same))).sum().backward()
    [(tried, same)] = found
    assert tried is module
    return same


@pytest.mark.parametrize(("kind", "same"), [("list", False), ("number", False), ("buffer", False), ("nothing", True)])
def test_a_trial_finds_what_a_second_call_would_change(kind, same):
    module = Counting(kind)
    assert trial(module, torch.randn(4, WIDTH)) is same
    assert (module.calls, len(module.seen)) == (1, kind == "list")
    assert module.count.item() == (kind == "buffer")


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
