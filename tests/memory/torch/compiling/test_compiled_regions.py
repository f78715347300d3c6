"""Steps whose regions Inductor compiles, with its compiler of C++."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.fx_passes import pad_mm
from torch.nn import functional as F  # noqa: N812  # its usual name

from tests.support.compiled_steps import SmallNet, compared, gradients, images, regions_of
from tests.support.raced_steps import Called
from ucudnn.errors import InvalidValueError, StepGraphError
from ucudnn.memory.step.graph import Phase
from ucudnn.memory.torch.compiling import compiled_regions, fusible_calls
from ucudnn.memory.torch.compiling.region import FusedRegion
from ucudnn.memory.torch.running.fit import fit

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*CPU autocast:UserWarning")]
LAST = torch.channels_last


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def compiled_lines(step):
    return [each for each in step.report().splitlines() if "compiled: " in each]


def test_a_step_is_compiled_and_computes_what_eager_pytorch_does():
    step = compared(SmallNet(), images(), debug=True)
    (line,) = compiled_lines(step)
    count = len(regions_of(step._run.program))
    assert count >= 5
    assert line.startswith(f"compiled: {count} of {count} regions")
    assert step.code.count("_compiled(") == count


def test_inductor_keeps_what_it_has_compiled():
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))
    data = torch.randn(3, 6), torch.randint(5, (3,))
    step = fit(copy.deepcopy(model), data, loss=F.cross_entropy, compile=True)
    counters["inductor"].clear()
    fit(copy.deepcopy(model), data, loss=F.cross_entropy, compile=True)
    kinds = {each.func for each in step.program.calls if isinstance(each.func, FusedRegion)}
    assert counters["inductor"]["fxgraph_cache_hit"] == len(kinds) > 0


def test_pools_lie_in_regions_with_what_is_beside_them():
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 3)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 6 * 6, 10))
    step = compared(model, (torch.randn(4, 3, 30, 30), torch.randint(10, (4,))))
    made = [each.func for each in step._run.program.calls]
    inside = [each.func._opname for region in made if isinstance(region, FusedRegion) for each in region.calls]
    assert inside.count("max_pool2d_with_indices") == inside.count("max_pool2d_with_indices_backward") == 2


def test_it_keeps_a_budget_and_offloads():
    step = compared(SmallNet(), images(), policy="vdnn-ext-all-p", debug=True)
    assert step.simulation.offloaded_bytes > 0
    budget = step.simulation.peak_bytes
    step = compared(SmallNet(), images(), budget=budget)
    assert step.simulation.peak_bytes <= budget


def test_it_recomputes_regions_and_updates_statistics_once():
    step = compared(SmallNet(), images(), policy="checkpoint", debug=True)
    assert any(each.kind.value == "recompute" for each in step.plan.actions)


def test_channels_last_and_autocast():
    x, y = images()
    model = SmallNet().to(memory_format=LAST)
    compared(model, (x.contiguous(memory_format=LAST), y), around=lambda: torch.autocast("cpu", torch.bfloat16))


def test_a_smaller_last_mini_batch_and_a_scaler():
    model = SmallNet()
    plain, (x, y) = copy.deepcopy(model), images()
    step = fit(model, (x, y), loss=F.cross_entropy, compile=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for rows in (4, 3):
        losses = []
        for call, optimizer in zip((step, lambda x, y: F.cross_entropy(plain(x), y)), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(call(x[:rows], y[:rows]))
            scaler.scale(losses[-1]).backward()
            scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close(*losses)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_region_that_does_not_compile_runs_as_it_is_and_is_told(monkeypatch):
    compiled = compiled_regions.compiled

    def failing(graph, *args):
        if any("batch_norm" in str(node.target) for node in graph.graph.nodes):
            raise RuntimeError("no kernel\nfor this")
        return compiled(graph, *args)

    monkeypatch.setattr(compiled_regions, "compiled", failing)
    step = compared(SmallNet(), images(), debug=True)
    told = compiled_lines(step)
    assert told[0].startswith("compiled: 2 of ")
    assert any("native_batch_norm" in each and each.endswith("RuntimeError: no kernel") for each in told[1:])


def test_code_that_returns_another_layout_is_not_used(monkeypatch):
    def turned(graph, arguments, results, device):
        def run(*args):
            return [each.clone().t().contiguous().t() if each.dim() == 2 else each for each in graph(*args)]

        return run

    monkeypatch.setattr(compiled_regions, "compiled", turned)
    step = compared(
        nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.LayerNorm(5), nn.Linear(5, 4)),
        (torch.randn(3, 6), torch.randint(4, (3,))),
    )
    assert any("a result of shape" in each for each in compiled_lines(step))


def test_scratch_inside_a_region_is_counted(monkeypatch):
    def failing(*_):
        raise RuntimeError("not now")

    monkeypatch.setattr(compiled_regions, "compiled", failing)
    model = Called(nn.Linear(6, 50), lambda y: (y * 2 + y * 3) * 0.5, nn.Linear(50, 4))
    step = fit(model, (torch.randn(3, 6), torch.randint(4, (3,))), loss=F.cross_entropy, compile=True)
    operations = zip(step.plan.graph.operations, step.costs.scratch_bytes, strict=True)
    assert {each.name: size for each, size in operations if each.phase is Phase.FORWARD}["mul..mul_2"] == 2 * 3 * 50 * 4


def test_alike_layers_are_compiled_once(monkeypatch):
    counted = []
    monkeypatch.setattr(compiled_regions, "compiled", lambda graph, *_: counted.append(graph) or graph.forward)
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))]
    step = fit(nn.Sequential(*layers), (torch.randn(4, 8), torch.randn(4, 8)), loss=F.mse_loss, compile=True)
    assert len(regions_of(step._run.program)) >= 12
    assert len(counted) <= 6


def test_what_hooks_must_train_is_refused_with_the_way_out():
    with pytest.raises(InvalidValueError, match="leave compile= out"):
        fit(nn.Linear(3, 3), torch.randn(2, 3), policy="hooks", compile=True)

    class Chosen(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y[y > 0]

    with pytest.raises(StepGraphError, match=r"hooks.*without compile=True"):
        fit(Chosen(3, 3), torch.randn(2, 3), compile=True)


def test_gradients_that_are_kept_are_added_to():
    model = SmallNet()
    plain, data = copy.deepcopy(model), images()
    step = fit(model, data, loss=F.cross_entropy, keep_gradients=True, compile=True)
    once = gradients(plain, lambda x, y: F.cross_entropy(plain(x), y), data)[1:]
    for _ in range(2):
        step(*data).backward()
    for one, other in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(one.grad, 2 * other, rtol=1e-4, atol=1e-5)


class Head(nn.Module):
    """Words of an odd number, as GPT-2 has them."""

    def __init__(self):
        super().__init__()
        self.words, self.hidden = nn.Embedding(123, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 1003, bias=False)

    def forward(self, x):
        return self.head(F.gelu(self.hidden(self.words(x)))).flatten(0, 1)


@pytest.mark.parametrize("gains", [True, False])
def test_large_products_of_odd_sides_are_padded_where_inductor_gains_by_it(gains, monkeypatch):
    # Inductor pads on GPUs alone, where it times both ways, so a test on a CPU decides in its place, by PyTorch's names
    # since 2.12 or before.
    for names, answer in ((("can_pad", "should_pad_common"), True), (("_should_pad", "should_pad_bench"), gains)):
        for name in names:
            monkeypatch.setattr(pad_mm, name, lambda *_, answer=answer, **__: answer, raising=False)
    monkeypatch.setattr(fusible_calls, "_LARGE_PRODUCT", 2**20)
    data = torch.randint(123, (4, 32)), torch.randint(1003, (128,))
    step = compared(Head(), data)
    products = [each.func for each in step.program.calls if ".mm" in str(each.func)]
    alone = [
        each.func for each in step.program.calls if isinstance(each.func, FusedRegion) and len(each.func.calls) == 1
    ]
    padded = [each for each in alone if each.calls[0].func is torch.ops.aten.mm.default]
    assert len(padded) == (3 if gains else 0), "forward, and both gradients"
    assert all(each.is_compiled for each in padded)
    assert len(products) == (2 if gains else 5), "the products of the hidden layer have even sides"
    flops = {each.flops.at(4) for each in regions_of(step.program)}
    assert (2 * 128 * 64 * 1003 in flops) is gains
