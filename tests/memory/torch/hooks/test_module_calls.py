"""Which of the tensors that modules save are seen by hooks: all, or few while steps need nothing."""

import copy
from functools import wraps

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tests.support.plain_training import assert_same_bits, gradients_of
from ucudnn.memory import budget
from ucudnn.memory.torch.hooks import module_calls
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
        nn.Linear(WIDTH, 40 * WIDTH), nn.GELU(), nn.Linear(40 * WIDTH, WIDTH), *(Block(INNER[kind]()) for _ in range(8))
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


def unseen_of(within):
    """Return the modules in which no call is followed; all in them stay, and none is repeated."""
    uses = within._begun.calls._uses
    found = [module for module, use in uses.items() if use.unseen]
    assert all(sum(not each._modules for each in module.modules()) <= 16 for module in found)
    for each in [inner for module in found for inner in module.modules() if inner in uses]:
        assert uses[each].stays
        assert not uses[each].repeated
    return found


def test_what_is_unseen_in_steps_of_one_size_may_be_seen_in_those_of_another():
    model = model_of("blocks")
    with budget(int(1.1 * peak_of("blocks", 2 * ROWS))) as within:
        trained(model, [ROWS] * 9)
        assert unseen_of(within)
        for use in within._begun.calls._uses.values():
            use.unseen = 1
        trained(model, [2 * ROWS] * 6)
        assert unseen_of(within)


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
    assert 0 < few < 0.8 * first
    assert packs[9] >= first
    assert 0 < packs[14] < 0.8 * first
    assert unseen_of(within)


def test_nobody_makes_room_within_a_module_whose_tensors_stay(packs, monkeypatch):
    class Noted(nn.Tanh):
        def forward(self, x):
            owned.extend(each.memory.owner is self for each in steps)
            return super().forward(x)

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), Noted()) for _ in range(20)))
            self.last = nn.Linear(WIDTH, 40 * WIDTH)

        def forward(self, x):
            return self.last(self.layers(x)).exp().sin().tanh()

    owned, steps, hooked = [], [], module_calls.ModuleCalls._hooked
    rooms, asked, relieve, model = [0], [0], SavedMemory.relieve, Deep()
    with budget("1GiB") as measured:
        trained(model, [ROWS])
    monkeypatch.setattr(SavedMemory, "relieve", lambda self: rooms.append(rooms.pop() + 1) or relieve(self))
    monkeypatch.setattr(module_calls.ModuleCalls, "_hooked", lambda self: asked.append(asked.pop() + 1) or hooked(self))
    with budget(int(1.3 * measured.peak_bytes)) as within:
        steps.append(within._begun)
        for _ in range(9):
            rooms.append(0)
            asked.append(0)
            trained(model, [ROWS], packs)
        uses = within._begun.calls._uses
        assert uses[model.layers].stays
        assert uses[model.layers[3]].stays
        assert not uses[model].stays
        assert {model.layers[3], model.layers[7][1]} <= {*unseen_of(within)}
    assert rooms[2] > 40
    assert 5 <= rooms[-1] <= 8  # 41 calls without others inside
    assert asked[2] > 60
    assert 20 < asked[-1] <= 1 + 1 + 20 + 2 * 2  # within each of the 20 nobody asks
    assert len(owned) == 180
    assert all(owned)  # errors name who runs


def test_calls_that_are_repeated_drop_what_they_save_while_hooks_see_few_tensors(packs, monkeypatch):
    monkeypatch.setattr(HostStore, "ms_per_byte", 1.0)  # copies are dear, so calls are repeated
    rows = [ROWS] * 20
    model = nn.Sequential(*(nn.Sequential(nn.Tanh(), each) for each in model_of("blocks")))
    plain = trained(copy.deepcopy(model), rows)
    limit, packs[:] = int(0.8 * peak_of("blocks", ROWS)), [0]
    with budget(limit) as within:
        assert_same_bits(trained(model, rows, packs), plain)
    assert within._begun.memory.recomputed.total() > 0
    assert unseen_of(within)
    assert within.peak_bytes <= limit


def test_a_module_that_is_hidden_in_an_unseen_one_is_repeated(monkeypatch):
    class Thin(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.hidden = [block]

        def forward(self, x):
            return self.hidden[0](x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = model_of("blocks")
            self.thin = nn.Sequential(*(Thin(each) for each in self.blocks))

        def forward(self, x):
            return self.thin(x)

    monkeypatch.setattr(HostStore, "ms_per_byte", 1.0)  # copies are dear, so calls are repeated
    monkeypatch.setattr(module_calls, "may_be_repeated", lambda module: type(module) is Block)
    model, shares = Net(), []
    with budget(int(0.8 * peak_of("blocks", ROWS))) as within:
        for _ in range(20):
            before = within._begun.memory.recomputed.total()
            trained(model, [ROWS])
            shares.append(within._begun.memory.recomputed.total() - before)
        assert {*model.thin} & {*unseen_of(within)}
        assert any(within._begun.calls._uses[each].repeated for each in model.blocks)
    assert {*shares[-8:]} == {shares[-1]} != {0}


def test_modules_that_are_called_often_in_an_unseen_one_stay_unseen(packs):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

        def forward(self, x):
            for _ in range(10):
                x = self.cell(x)
            return x

    torch.manual_seed(0)
    body = (nn.Sequential(Recurrent()) for _ in range(8))
    model = nn.Sequential(*body, nn.Linear(WIDTH, 60 * WIDTH), nn.Tanh())
    with budget("1GiB") as measured:
        trained(copy.deepcopy(model), [ROWS])
    packs[:] = [0]
    with budget(int(1.1 * measured.peak_bytes)) as within:
        trained(model, [ROWS] * 16, packs)
        assert unseen_of(within)
    assert {*packs[9:16]} == {packs[9]}
    assert packs[9] < packs[1] / 4


def test_a_far_larger_mini_batch_keeps_the_budget_where_small_calls_were_repeated(monkeypatch):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = torch.tanh(torch.sigmoid(self.first(x)) * 1.5)
            return x + self.last(torch.tanh(torch.sigmoid(y + 1)))

    monkeypatch.setattr(HostStore, "ms_per_byte", 1.0)  # copies are dear, so calls are repeated
    monkeypatch.setattr(module_calls, "may_be_repeated", lambda module: type(module) is Residual)
    torch.manual_seed(0)
    model, limit = nn.Sequential(*(Residual() for _ in range(12))), 9 * 2**20
    with budget(limit) as within:
        for rows in [1024] * 7 + [5000] * 2:
            model.zero_grad()
            model(torch.randn(rows, WIDTH)).square().mean().backward()
    assert within._begun.memory.recomputed.total() > 0
    assert within.peak_bytes <= limit


def test_a_larger_mini_batch_keeps_the_budget_after_steps_of_which_hooks_saw_little(packs):
    rows = [ROWS] * 9 + [2 * ROWS] * 3
    model = model_of("blocks")
    plain = trained(copy.deepcopy(model), rows)
    limit, packs[:] = int(0.75 * peak_of("blocks", 2 * ROWS)), [0]
    with budget(limit) as within:
        assert_same_bits(trained(model, rows, packs), plain)
    assert packs[8] < 0.8 * packs[0]
    assert packs[9] >= packs[0]
    assert within.peak_bytes <= limit
    assert within._begun.memory.offloaded.total() > 0


@pytest.mark.parametrize("change", ["inside", "type", "outside"])
def test_a_step_that_takes_more_than_before_is_seen_though_its_arguments_are_as_before(packs, change):
    class Batch:
        rows, times = ROWS, 1

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model_of("blocks")

        def forward(self, batch):
            with torch.autocast("cpu", torch.bfloat16, enabled=change == "type" and batch.rows == ROWS):
                return self.inner(torch.randn(batch.rows, WIDTH)).float()

    def run(model, steps, within=None):
        torch.manual_seed(1)
        batch, losses = Batch(), []
        for number in range(steps):
            if number == 12:
                batch.rows = ROWS + 1 if change == "type" else int(1.6 * ROWS) if change == "inside" else ROWS
                batch.times = 12 if change == "outside" else 1
            x = model(batch)
            for _ in range(batch.times):
                x = x.sin().exp()
            packs.append(0)
            loss = x.square().mean()
            loss.backward()
            losses.append(loss.detach())
        return [*losses, *gradients_of(model)]

    model = Outer()
    plain = run(copy.deepcopy(model), 15)
    with budget("1GiB") as all_of_it:
        run(copy.deepcopy(model), 12)
    packs[:] = [0]
    limit = int(1.25 * all_of_it.peak_bytes)
    with budget(limit) as within:
        assert_same_bits(run(model, 15), plain)
    assert 0 < packs[11] < 0.8 * packs[0]
    assert packs[13] > 1.2 * packs[11]
    assert within.peak_bytes <= limit


@pytest.mark.parametrize("order", ["inside out", "as begun"])
def test_no_hook_stays_behind_blocks_that_end_in_another_order_than_they_began(order):
    first, second = budget("1GiB"), budget("1GiB")
    first.__enter__()
    second.__enter__()
    for each in (second, first) if order == "inside out" else (first, second):
        each.__exit__(None, None, None)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert not _get_current_dispatch_mode_stack()
    model = nn.Linear(2, 2)
    with budget("1GiB") as third:
        model(torch.ones(1, 2)).sum().backward()
    assert [each._begun._steps for each in (first, second, third)] == [0, 0, 1]


def test_hooks_of_the_program_that_end_outside_of_the_call_they_began_in_leave_the_blocks_as_they_are(packs):
    own = saved_tensors_hooks(lambda x: x, lambda x: x)

    class Begins(nn.Module):
        on = False

        def forward(self, x):
            if self.on:
                own.__enter__()
            return x.sin()

    model = nn.Sequential(model_of("blocks"), Begins())
    with budget(int(1.3 * peak_of("blocks", ROWS))) as within:
        trained(model, [ROWS] * 9, packs)
        assert within._begun.calls._uses[model[1]].stays
        model[1].on = True
        x = model(torch.randn(ROWS, WIDTH))
        own.__exit__()
        model[1].on = False
        x.sum().backward()
        trained(model, [ROWS], packs)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_hooks_around_the_block_never_see_what_it_saves(packs):
    seen = []
    model = model_of("blocks")
    limit = int(1.3 * peak_of("blocks", ROWS))
    with saved_tensors_hooks(lambda x: seen.append(1) or x, lambda x: x), budget(limit):
        trained(model, [ROWS] * 14, packs)
    assert not seen


def test_more_calls_than_ever_before_are_looked_at():
    class Repeats(nn.Module):
        times = 1

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            for _ in range(self.times):
                x = self.layer(x).sin()
            return x

    model = Repeats()
    with budget("1GiB"):
        for model.times in (*[1] * 8, 30, 30):
            model(torch.ones(ROWS, WIDTH)).sum().backward()


def test_a_backward_within_a_call_that_is_recorded_ends_a_step():
    class Penalty(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            inner = x.detach().requires_grad_()
            [slope] = torch.autograd.grad(self.layer(inner).tanh().sum(), inner)
            return self.layer(x) + slope

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Penalty(), Penalty())
    plain = trained(copy.deepcopy(model), [ROWS] * 6)
    with budget("1GiB") as within:
        assert_same_bits(trained(model, [ROWS] * 6), plain)
    assert within._begun._steps > 6
