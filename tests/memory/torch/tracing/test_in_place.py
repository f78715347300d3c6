"""Operators of backward that write over an operand: which do, and that the step computes the plain loop's bits."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from tests.support.in_place import KINDS, race, written_over
from tests.support.plain_training import Pair, Race
from ucudnn.errors import BudgetError
from ucudnn.memory import fit
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.torch.tracing import in_place
from ucudnn.memory.torch.tracing.traced_program import trace_program


@pytest.mark.parametrize("kind", KINDS)
def test_an_operator_writes_over_the_gradient_that_it_is_given(kind):
    found = race(KINDS[kind])
    assert kind in written_over(found.program.graph)
    found.check(found.fitted("spill"))


@pytest.mark.parametrize(
    "function",
    [
        lambda y: F.relu(y) + y,  # the gradient of the sum is read once more
        lambda y: torch.cat([F.relu(y[:, :20]), y[:, 20:]], 1),  # it is a part of its storage
    ],
)
def test_a_gradient_that_others_read_or_that_lies_otherwise_stays(function):
    found = race(lambda y: function(torch.sin(y)))
    assert "threshold_backward" not in written_over(found.program.graph)
    found.check(found.fitted("stock"))


def test_the_gradient_that_the_loop_gives_stays():
    """Without a loss the step ends with a tensor of the caller's."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    pair = Pair((model, torch.randn(3, 4), None))
    given = torch.randn(3, 4)

    def loop(_, call):
        gradient = given.clone()
        call(pair.data).backward(gradient)
        yield gradient

    pair.check(loop)


def test_an_operator_with_other_bits_in_place_stays(monkeypatch):
    """So would one that reads what it has written."""
    forms = in_place._form

    def form(func, device):
        other = torch.ops.aten.tanh_backward.grad_input
        return (other, "grad_input") if "sigmoid_backward" in str(func) else forms(func, device)

    monkeypatch.setattr(in_place, "_form", form)
    found = race(lambda y: torch.tanh(torch.sigmoid(y)))
    assert written_over(found.program.graph) >= {"tanh_backward"}
    assert "sigmoid_backward" not in written_over(found.program.graph)


class Volumes(nn.Module):
    """Volumes through layers with PReLU, of which one gradient is read again after it."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Conv3d(1, 17, 1), nn.Conv3d(17, 17, 3, padding=1), nn.Conv3d(17, 2, 1)
        self.acts = nn.ModuleList([nn.PReLU(17), nn.PReLU(17), nn.PReLU()])

    def forward(self, x):
        y = self.acts[0](self.first(x))
        return self.last(self.acts[2](y + self.acts[1](self.second(y))))


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last_3d])
def test_the_backward_of_prelu_runs_in_pieces_where_nothing_else_keeps_a_budget(form):
    torch.manual_seed(0)
    x = torch.randn(2, 1, 6, 20, 10).to(memory_format=form)
    subject = Volumes().to(memory_format=form), (x, torch.randn(2, 2, 6, 20, 10)), F.mse_loss
    found = Race(subject, steps=2)
    assert not any("prelu" in each for each in written_over(found.program.graph))
    floor = measure_liveness(found.program.graph, found.costs).floor_bytes
    found.subject = replace(found.subject, in_pieces=True)
    found.program = trace_program(found.subject, "pieces", 2)
    graph = found.program.graph
    assert "ucudnn.prelu_backward" in written_over(graph)
    lower = measure_liveness(graph, found.costs).floor_bytes
    assert lower < (0.85 if form is torch.contiguous_format else 1) * floor
    for policy in ("stock", "checkpoint", "spill", "joint", "vdnn-ext-all-p"):
        for budget in (None, (lower + 2 * floor) // 3):
            try:
                step = found.fitted(policy, budget)
            except BudgetError:
                assert budget is not None
            else:
                found.check(step)
    make = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    pair = Pair(subject, make, budget=(lower + floor) // 2, policy="spill")
    assert "ucudnn.prelu_backward" in written_over(pair.step.plan.graph)
    pair.check()
    with pytest.raises(BudgetError):
        fit(*subject, budget=lower // 4)
