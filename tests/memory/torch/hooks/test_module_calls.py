"""Which of the tensors that modules save are seen by hooks: all, or few while steps need nothing."""

import copy
from functools import wraps

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional

from tests.support.plain_training import assert_same_bits, gradients_of
from ucudnn.memory import budget
from ucudnn.memory.torch.hooks.host_store import HostStore
from ucudnn.memory.torch.hooks.saved_memory import SavedMemory

WIDTH, ROWS = 64, 512


class Block(nn.Module):
    """Layers that save many tensors, some of them in the block's own forward."""

    def __init__(self, inner=None):
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.inner = inner or nn.Identity()

    def forward(self, x):
        return x + self.inner(self.drop(self.second(functional.gelu(self.first(x)).sin())).exp().tanh())


class OnTheCpu(nn.Module):
    """Keeps what a layer saves by hooks of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with save_on_cpu():
            return self.layer(x).tanh()


class Checkpointed(nn.Module):
    """Is computed again in backward by PyTorch's own hooks."""

    def __init__(self):
        super().__init__()
        self.layer = Block()

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False)


class Transformed(nn.Module):
    """Scales by gradients that torch.func computes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(x) * torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x.detach())


INNER = {
    "plain": lambda: None,
    "own hooks": OnTheCpu,
    "checkpoint": Checkpointed,
    "transform": Transformed,
}


def model_of(kind):
    torch.manual_seed(0)
    if kind == "blocks":
        return nn.Sequential(*(Block() for _ in range(12)))
    return nn.Sequential(
        nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH), *(Block(INNER[kind]()) for _ in range(8))
    )


def trained(model, rows, packs=None):
    """Train for as many steps as there are numbers of rows; return losses and gradients."""
    torch.manual_seed(1)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), []
    for each in rows:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(torch.randn(each, WIDTH)), torch.arange(each) % 4)
        if packs is not None:
            packs.append(0)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [*found, *gradients_of(model)]


def peak_of(kind, rows):
    with budget("1GiB") as within:
        trained(model_of(kind), [rows])
    return within.peak_bytes


@pytest.fixture
def packs(monkeypatch):
    """How many tensors hooks saw, for each step."""
    found, pack = [0], SavedMemory.pack

    @wraps(pack)
    def counted(self, tensor):
        found[-1] += 1
        return pack(self, tensor)

    monkeypatch.setattr(SavedMemory, "pack", counted)
    return found


@pytest.mark.parametrize("kind", INNER)
def test_while_steps_need_nothing_hooks_see_few_tensors_and_another_size_shows_them_all(packs, kind):
    rows = [ROWS] * 9 + [2 * ROWS] * 6
    model = model_of(kind)
    plain = trained(copy.deepcopy(model), rows)
    limit, packs[:] = int(1.1 * peak_of(kind, 2 * ROWS)), [0]
    with budget(limit) as within:
        assert_same_bits(trained(model, rows, packs), plain)
    assert "offloaded: 0" in within.report()
    first, *_, few = packs[:9]
    assert 0 < few < first // 2
    assert packs[9] >= first
    assert 0 < packs[14] < first // 2


def test_calls_that_are_repeated_drop_what_they_save_while_hooks_see_few_tensors(packs, monkeypatch):
    monkeypatch.setattr(HostStore, "ms_per_byte", 1.0)  # copies are dear, so calls are repeated
    rows = [ROWS] * 20
    model = model_of("blocks")
    plain = trained(copy.deepcopy(model), rows)
    limit, packs[:] = int(0.8 * peak_of("blocks", ROWS)), [0]
    with budget(limit) as within:
        assert_same_bits(trained(model, rows, packs), plain)
    assert within._begun.memory.recomputed.total() > 0
    assert any(use.stays for use in within._begun.calls._uses.values())
    assert within.peak_bytes <= limit


def test_a_larger_mini_batch_keeps_the_budget_after_steps_of_which_hooks_saw_little(packs):
    rows = [ROWS] * 9 + [2 * ROWS] * 3
    model = model_of("plain")
    plain = trained(copy.deepcopy(model), rows)
    limit, packs[:] = int(0.7 * peak_of("plain", 2 * ROWS)), [0]
    with budget(limit) as within:
        assert_same_bits(trained(model, rows, packs), plain)
    assert packs[8] < packs[0] // 2
    assert packs[9] >= packs[0]
    assert within.peak_bytes <= limit
    assert within._begun.memory.offloaded.total() > 0


def test_a_module_that_no_other_one_calls_is_seen_so_that_backward_is(packs):
    model = model_of("plain")
    with budget("1GiB") as within:
        trained(model, [ROWS] * 3)
        calls = within._begun.calls
        calls.hook_few(within._begun.memory.owners(), 0)
        assert not calls._uses[model].stays
        assert all(calls._uses[each].stays for each in model)
        calls.hook_few(within._begun.memory.owners(), 2**40)  # steps save less than is to be seen
        assert not any(use.stays for use in calls._uses.values())
