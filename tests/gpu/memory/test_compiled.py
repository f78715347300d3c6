"""Compiled steps on a GPU: products that Inductor pads, and tensors that lie where a plan has put them."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from bench.memory.record_steps import RECIPES
from tests.gpu.memory.trials import trial
from tests.support.compiled_steps import errors, gradients, in_float64
from ucudnn.memory import fit
from ucudnn.memory.torch.comparison.trial_result import PYTORCH
from ucudnn.problem import DataType


class Head(nn.Module):
    """GPT-2's words."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(123, 256), nn.Linear(256, 50257, bias=False)

    def forward(self, x):
        return self.head(F.gelu(self.words(x))).flatten(0, 1).float()


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_products_of_odd_sides_are_padded_and_their_gradients_are_as_near_as_those_of_torch_compile(device):
    torch.manual_seed(0)
    model = Head().to(device)
    data = torch.randint(123, (8, 512), device=device), torch.randint(50257, (4096,), device=device)
    exact = in_float64(model, data, F.cross_entropy)

    def around():
        return torch.autocast("cuda", torch.bfloat16)

    whole = torch.compile(lambda x, y: F.cross_entropy(model(x), y))
    peer = errors(gradients(model, whole, data, around), exact)
    with around():
        step = fit(
            model, data, loss=F.cross_entropy, compile=True, budget=torch.cuda.get_device_properties(0).total_memory
        )
    alone = [each.func for each in step.program.calls if len(getattr(each.func, "calls", ())) == 1]
    assert [each.calls[0].func for each in alone].count(torch.ops.aten.mm.default) == 3
    for _ in range(2):
        torch.empty(2**28, device=device).fill_(torch.nan)
        mine = errors(gradients(model, step, data, around), exact)
        assert max(mine) <= 1.5 * max(peer)
    assert max(peer) < 0.1
    step.close()


@pytest.mark.alone
@pytest.mark.parametrize("share", [0.8, 0.65])
def test_tensors_of_a_compiled_step_lie_where_its_plan_has_put_them(share):
    recipe = replace(RECIPES["gpt2"], batch=4, autocast=DataType.BFLOAT16)
    stock = trial(PYTORCH, recipe=recipe, steps=3, warmup=1)
    budget = int(share * stock.allocated) + stock.outside
    figures = trial("auto", budget, recipe, steps=3, warmup=1, capped=True, compile=True)
    assert figures.predicted_returned == 0
    assert figures.retries == 0
    assert figures.reserved + figures.outside <= budget
    assert figures.reserved <= 1.05 * figures.allocated
