"""fit(..., policy="hooks"): the same kind of module as a fitted step, for steps that have no plan."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.plain_training import assert_same_bits, optimizer_of, state_of, train
from ucudnn.errors import BudgetError, InvalidValueError, StepGraphError
from ucudnn.memory import fit


class Chosen(nn.Module):
    """Trains the rows that a mask chooses, whose number is not known before the step."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(5)))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        h = self.layers(x)
        return self.head(torch.cat([h[h[:, 0] > 0], h[h[:, 0] <= 0]]))


def test_a_step_without_a_plan_trains_as_the_refusal_says():
    torch.manual_seed(0)
    model = Chosen()
    plain = copy.deepcopy(model)
    x, y = torch.randn(1024, 32), torch.arange(1024) % 4
    with pytest.raises(StepGraphError) as caught:
        fit(model, (x, y), loss=functional.cross_entropy, budget="800KiB")
    assert str(caught.value).splitlines()[-1].count('fit(..., policy="hooks")') == 1
    optimizers = [optimizer_of("adam", each) for each in (model, plain)]
    step = fit(model, (x, y), functional.cross_entropy, optimizers[0], budget="800KiB", policy="hooks")
    losses = train(step, optimizers[0], (x, y))
    expected = train(lambda x, y: functional.cross_entropy(plain(x), y), optimizers[1], (x, y))
    assert_same_bits(losses, expected)
    assert_same_bits(state_of(model, optimizers[0]), state_of(plain, optimizers[1]))
    assert "offloaded of layers.1." in step.report()
    assert "5 steps on cpu by hooks" in step.report()
    step.eval()
    assert torch.equal(step(x), plain.eval()(x))
    with pytest.raises(InvalidValueError, match="copy its model"):
        copy.deepcopy(step)
    step.close()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"budget": None}, InvalidValueError, "without a budget"),
        ({"convolutions": "undivided"}, InvalidValueError, "convolutions="),
        ({"divide": True}, InvalidValueError, "divide="),
        ({"loss": 3}, InvalidValueError, "loss=3"),
        ({"model": 3}, InvalidValueError, "model=3"),
        ({"budget": "100KiB"}, BudgetError, "needs at least"),
    ],
)
def test_what_cannot_be_is_refused(arguments, error, words):
    x = torch.randn(1024, 32)
    given = {"model": Chosen(), "sample": x, "budget": "1MiB", "policy": "hooks", **arguments}
    with pytest.raises(error, match=words):
        fit(**given)(x)
