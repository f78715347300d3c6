"""torch.compile of the whole step takes turns with the plan: each turn trains, and the faster one stays."""

import copy
from time import sleep

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name
from torch.nn.parallel import DistributedDataParallel

from tests.support.compiled_steps import SmallNet, gradients, images
from tests.support.raced_steps import Called
from ucudnn.errors import InvalidValueError
from ucudnn.memory.torch.compiling import compiled_regions, step_race
from ucudnn.memory.torch.running.fit import fit

TURNS, MOST = 12, 52


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def _eager(monkeypatch):
    """Let the whole step run as it is in the turns of torch.compile, and regions, too."""

    def no_compiler(*_):
        raise RuntimeError("there is no compiler")

    monkeypatch.setattr(step_race, "compiled_whole", lambda function: function)
    monkeypatch.setattr(compiled_regions, "compiled", no_compiler)


def raced(step):
    (line,) = [each for each in step.report().splitlines() if "torch.compile" in each]
    return line


def trained(model, call, data, steps):
    """Train a model, and return its losses, parameters and buffers."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = call(*data)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(each.detach() for each in (*model.parameters(), *model.buffers()))]


@pytest.mark.slow
def test_each_turn_is_a_step_of_the_training_and_the_faster_one_stays():
    model, data = SmallNet(), images()
    plain = copy.deepcopy(model)
    step = fit(model, data, loss=F.cross_entropy, compile=True)
    assert raced(step).endswith("take turns, and the faster one stays: 0 steps so far, of at most 52")
    ours = trained(model, step, data, TURNS)
    own = trained(plain, lambda x, y: F.cross_entropy(plain(x), y), data, TURNS)
    torch.testing.assert_close(ours, own, rtol=1e-3, atol=1e-5)
    assert step._run.forwards == 6
    trained(model, step, data, MOST - TURNS)
    before = step._run.forwards
    trained(model, step, data, 3)
    assert step._run.forwards - before == (0 if step.race.won else 3)
    assert step.race.runs_whole is bool(step.race.won) is ("torch.compile runs, and no plan" in raced(step))


@pytest.mark.slow
def test_a_turn_of_torch_compile_has_its_gradients_to_the_bit():
    model, data = SmallNet(), images()
    plain = copy.deepcopy(model)
    step = fit(model, data, loss=F.cross_entropy, compile=True)
    compiled = torch.compile(lambda x, y: F.cross_entropy(plain(x), y))
    for turn in range(4):
        ours, own = gradients(model, step, data), gradients(plain, compiled, data)
        assert step.race.runs_whole is (turn > 1)
    assert all(map(torch.equal, ours, own))


@pytest.mark.slow
def test_dropout_has_one_mask_in_forward_and_backward_of_each_turn():
    model = Called(nn.Linear(1, 64, bias=False), lambda y: F.dropout(y, 0.4)).double()
    x = torch.ones(1, 1, dtype=torch.float64)
    step, masks = fit(model, x, compile=True), []
    (weight,) = model.parameters()
    for _ in range(TURNS + 1):
        weight.grad = None
        y = step(x)
        y.sum().backward()
        kept = y != 0
        torch.testing.assert_close(weight.grad.T, kept / 0.6, check_dtype=False)
        masks.append(kept)
    assert 0.2 < torch.cat(masks).double().mean() < 0.9
    assert len({tuple(each.flatten().tolist()) for each in masks}) > TURNS // 2


@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("slow", ["plan", "whole"])
def test_the_times_of_the_loop_decide(monkeypatch, slow):
    def late(function):
        def called(*args, **kwargs):
            sleep(0.1)
            return function(*args, **kwargs)

        return called

    if slow == "whole":
        monkeypatch.setattr(step_race, "compiled_whole", late)
    model, data = SmallNet(), images()
    step = fit(model, data, loss=F.cross_entropy, compile=True)
    if slow == "plan":
        step._run.forward = late(step._run.forward)
    trained(model, step, data, TURNS)
    before = step._run.forwards
    trained(model, step, data, 4)
    assert step._run.forwards - before == (0 if slow == "plan" else 4)
    model.norm.eps = 0.5  # torch.compile compiles again
    if slow == "plan":
        step(*data).backward()
    else:
        with pytest.raises(InvalidValueError, match="fit it again"):
            step(*data)
    assert f"{'torch.compile runs' if slow == 'plan' else ': the plan runs'}" in raced(step)
    assert raced(step).endswith(("faster in 5 of 5 pairs of steps", "faster in 4 of 5 pairs of steps"))


@pytest.mark.usefixtures("_eager")
def test_a_failure_of_torch_compile_leaves_nothing_behind(monkeypatch):
    data, models = images(), [SmallNet(drop=0.3)]
    models += [copy.deepcopy(models[0]) for _ in range(2)]

    def failing(function):
        def called(*args, **kwargs):
            torch.rand(100)
            function(*args, **kwargs)
            raise RuntimeError("no kernel\nfor this")

        return called

    monkeypatch.setattr(step_race, "compiled_whole", failing)
    found = []
    for model, policy in zip(models, ("auto", "stock", "auto"), strict=True):
        torch.manual_seed(5)
        step = fit(model, data, loss=F.cross_entropy, compile=True, policy=policy)
        found.append(trained(model, step, data, 6))
        if policy == "auto":
            assert raced(step).endswith("the whole step failed: RuntimeError: no kernel")
    for one, other, again in zip(*found, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, again)


@pytest.mark.usefixtures("_eager")
def test_what_the_whole_step_is_not_tried_for():
    data, of = images(), {"loss": F.cross_entropy, "compile": True}
    assert fit(SmallNet(), data, **of, budget="1GiB").race is None
    assert fit(SmallNet(), data, **of, policy="stock").race is None
    assert fit(SmallNet(), data, **of, debug=True).race is None
    assert fit(SmallNet(), data, loss=F.cross_entropy).race is None
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert fit(DistributedDataParallel(SmallNet()), data, **of).race is None
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_eager")
def test_smaller_mini_batches_and_steps_without_backward_are_no_turns():
    model, (x, y) = SmallNet(), images()
    step = fit(model, (x, y), loss=F.cross_entropy, compile=True)
    for _ in range(2):
        step(x, y).backward()
        step(x, y)
        step(x[:3], y[:3]).backward()
    assert step._others[0].race is None
    assert "2 steps so far" in raced(step)
    step(x, y)
    assert step.race.runs_whole
    with torch.no_grad():
        model.norm.weight.mul_(2)
    model.norm.eps = 0.5
    with pytest.raises(InvalidValueError, match="fit it again"):
        step(x, y)


@pytest.mark.usefixtures("_eager")
def test_the_loop_may_compute_the_loss_and_use_some_outputs():
    model = Called(nn.Linear(6, 8), lambda y: (F.gelu(y) * 2, {"mean": torch.tanh(y).mean()}, y.exp().sum(1)))
    plain, x = copy.deepcopy(model), torch.randn(4, 6)
    step = fit(model, x, compile=True)
    for _ in range(MOST + 2):
        for each, call in ((model, step), (plain, plain)):
            each.zero_grad()
            first, second, _ = call(x)
            (first.square().sum() + second["mean"]).backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
    assert raced(step).endswith("pairs of steps")
