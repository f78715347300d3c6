"""Updates in parts: the bits of the whole update, smaller temporaries, and optimizers as they were."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ucudnn.memory import fit
from ucudnn.memory.step.graph import Phase
from ucudnn.memory.torch.device.stated_budget import StatedBudget
from ucudnn.memory.torch.subject.update_parts import has_parts, in_parts, update_in_parts

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.1, foreach=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, centered=True, momentum=0.9, foreach=True),
    "adadelta": lambda params: torch.optim.Adadelta(params, foreach=True),
    "asgd": lambda params: torch.optim.ASGD(params, lr=1e-2, foreach=True),
}


def network(width=96, depth=10):
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def groups_of(model):
    first, *others = model
    return [
        {"params": [*first.parameters()], "lr": 3e-3},
        {"params": [each for it in others for each in it.parameters()]},
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_in_parts_has_the_bits_of_the_whole_one(name):
    models = [network(), network()]
    whole, parts = (OPTIMIZERS[name](groups_of(model)) for model in models)
    assert has_parts(parts)
    end = update_in_parts(parts)
    seen = []
    parts.register_step_pre_hook(lambda optimizer, *_: seen.append(len(optimizer.param_groups)))
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2) for each in (whole, parts)]
    for step in range(5):
        x = torch.randn(4, 96, generator=torch.Generator().manual_seed(step))
        for model, optimizer, scheduler in zip(models, (whole, parts), schedulers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if step == 2:
                model[1].bias.grad = None
            optimizer.step()
            scheduler.step()
        if step == 3:
            end()
    assert seen == [10, 10, 10, 10, 2]
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    states = [each.state_dict() for each in (whole, parts)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    torch.testing.assert_close(states[0]["state"], states[1]["state"], rtol=0, atol=0)


@pytest.mark.parametrize("first", [0, 1])
def test_an_update_that_fails_leaves_the_groups_and_the_last_one_that_ends_leaves_the_optimizer(first):
    model = network()
    optimizer = OPTIMIZERS["adamw"](groups_of(model))
    groups, plain = optimizer.param_groups, optimizer.step.__func__
    ends = [update_in_parts(optimizer), update_in_parts(optimizer)]
    model(torch.ones(1, 96)).sum().backward()

    def fails(optimizer, *_):
        assert len(optimizer.param_groups) == 10
        raise KeyboardInterrupt

    handle = optimizer.register_step_post_hook(fails)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    handle.remove()
    assert optimizer.param_groups is groups
    ends[first]()
    counted = []
    optimizer.register_step_pre_hook(lambda optimizer, *_: counted.append(len(optimizer.param_groups)))
    optimizer.step()
    assert counted == [10]
    assert copy.deepcopy(optimizer).param_groups[1]["lr"] == groups[1]["lr"]
    ends[1 - first]()
    assert optimizer.step.__func__ is plain
    assert "step" not in vars(optimizer)


def test_groups_in_parts_have_all_parameters_in_order_and_options_of_their_own():
    optimizer = OPTIMIZERS["adamw"](groups_of(network()))
    found = in_parts(optimizer.param_groups)
    for key in ("lr", "foreach", "betas"):
        assert {each[key] for each in found} == {each[key] for each in optimizer.param_groups}
    order = [[id(each) for group in groups for each in group["params"]] for groups in (found, optimizer.param_groups)]
    assert order[0] == order[1]
    sizes = [sum(each.nbytes for each in group["params"]) for group in found]
    whole = sum(each.nbytes for group in optimizer.param_groups for each in group["params"])
    assert max(sizes) <= whole / 8


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, foreach=False),
        lambda params: torch.optim.AdamW(params, fused=True),
        lambda params: torch.optim.AdamW(params),  # on a CPU it updates one at a time
        lambda params: torch.optim.LBFGS(params),
        lambda params: torch.optim.SGD([next(iter(params))], lr=0.1, foreach=True),
        lambda params: type("Own", (torch.optim.SGD,), {"__module__": "own"})(params, lr=0.1, foreach=True),
    ],
)
def test_others_have_no_parts(make):
    assert not has_parts(make(network().parameters()))


@pytest.mark.parametrize("loaded", [0, 2])  # weights' bytes of kernels that measuring loads, once the update is known
def test_a_step_whose_update_exceeds_the_budget_updates_in_parts_to_the_bits_of_the_plain_loop(loaded, monkeypatch):
    x, y = torch.randn(2, 96), torch.randn(2, 96)
    models = [network(), network()]
    optimizers = [OPTIMIZERS["adamw"](model.parameters()) for model in models]
    weights = sum(each.nbytes for each in models[0].parameters())
    taken = int(loaded * weights)
    monkeypatch.setattr(StatedBudget, "with_loaded_kernels", lambda self, *_, **__: replace(self, reserve_bytes=taken))
    # There are parameters, their gradients and two states; the whole update takes more than one of these besides.
    budget = int(4.5 * weights) + taken
    step = fit(models[1], (x, y), loss=F.mse_loss, optimizer=optimizers[1], budget=budget)
    roots = [
        each for each in step.plan.graph.operations if each.phase is Phase.OPTIMIZER and "foreach_sqrt" in each.kind
    ]
    assert len(roots) == 10
    assert step.simulation.peak_bytes <= budget - taken
    assert "update: some parameters at a time" in step.report()
    for number in range(4):
        inputs = x + number, y
        for run, optimizer in ((lambda x, y: F.mse_loss(models[0](x), y), optimizers[0]), (step, optimizers[1])):
            optimizer.zero_grad()
            loss = run(*inputs)
            loss.backward()
            optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    step.close()
    assert "step" not in vars(optimizers[1])
