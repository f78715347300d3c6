"""Steps in which calls share bytes in unusual ways: their graphs say so, and plans compute what the plain loop does."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.plain_training import Race, assert_trained_alike
from ucudnn.memory import fit
from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.policies.catalog import POLICIES


class AddsARow(torch.autograd.Function):
    """Its backward adds a view of the gradient to the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + grad[:, :1]


class Symmetric(nn.Module):
    """Has sums of tensors with views of themselves, forward and backward."""

    def __init__(self):
        super().__init__()
        self.a, self.inner, self.last = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 36), nn.Linear(36, 6)

    def forward(self, x):
        y = self.inner(torch.tanh(x @ (self.a + self.a.T))).view(-1, 6, 6)
        return self.last(torch.tanh(y + y.transpose(1, 2)).flatten(1))


class WithRow(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.last(torch.tanh(AddsARow.apply(torch.sin(self.first(x)))))


class Windows(nn.Module):
    """Writes windows that overlap, which have more elements than the storage, and leave some of it alone."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 6)

    def forward(self, x):
        y = torch.tanh(self.first(x)).reshape(-1) * 2
        y.unfold(0, 8, 1)[:20].zero_()
        y = y.view(len(x), -1)
        return self.last(y * torch.tanh(y))


@pytest.mark.parametrize("policy", ["stock", "checkpoint", "spill"])
@pytest.mark.parametrize("kind", [Symmetric, WithRow, Windows])
def test_bytes_that_several_tensors_show_have_what_the_plain_loop_has(kind, policy):
    torch.manual_seed(0)
    race = Race((kind(), (torch.randn(6, 8), torch.randint(6, (6,))), functional.cross_entropy))
    race.check(race.fitted(policy))


@torch.library.custom_op("ucudnn_tests::centered", mutates_args=("running",))
def centered(x: torch.Tensor, running: torch.Tensor) -> torch.Tensor:
    running.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return x - running


@centered.register_fake
def _(x, running):
    return torch.empty_like(x)


class Center(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, running):
        return centered(x.detach(), running)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Counting(nn.Module):
    """Has an operator that updates a buffer and returns what depends on it."""

    def __init__(self):
        super().__init__()
        self.layers, self.last = nn.ModuleList(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 6)
        self.register_buffer("running", torch.zeros(8))

    def forward(self, x):
        for layer in self.layers:
            x = torch.sin(Center.apply(torch.tanh(layer(x)), self.running))
        return self.last(x)


def test_a_result_that_depends_on_a_buffer_that_the_call_updates_is_not_computed_again():
    torch.manual_seed(0)
    data = torch.randn(6, 8), torch.randint(6, (6,))
    model = Counting()
    plain = copy.deepcopy(model)
    step = fit(model, data, loss=functional.cross_entropy, policy="checkpoint", debug=True)
    kinds = Race((copy.deepcopy(model), data, functional.cross_entropy)).program.graph.operations
    assert [each.repeatable for each in kinds if "centered" in each.name] == [False] * 5
    assert_trained_alike(plain, model, step, data, functional.cross_entropy)


def test_batch_normalization_is_computed_again_because_its_results_do_not_depend_on_what_it_updates():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(6)))
    race = Race((model, (torch.randn(6, 8), torch.randint(8, (6,))), functional.cross_entropy))
    plan = POLICIES["checkpoint"].plan(race.program.graph, race.costs, None)
    again = [race.program.graph.operations[at].name for kind, at in plan.actions if kind is ActionKind.RECOMPUTE]
    assert any("batch_norm" in name for name in again)
    race.check(race.fitted(plan))
