"""Plans that choose how convolutions are computed, on a GPU: exactly that runs, within the memory that it states."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from bench.memory import models
from tests.support.plain_training import fit_plan
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.torch.convolutions.convolution_choices import ConvolutionChoices
from ucudnn.memory.torch.measuring.operation_costs import step_costs
from ucudnn.memory.torch.running.fit import fit
from ucudnn.memory.torch.subject.step_program import step_subject
from ucudnn.memory.torch.tracing.traced_program import trace_program

STEPS = 3


@pytest.fixture(autouse=True)
def without_tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def unet(*, last=False):
    """Return a U-Net with biases and its sample, whose joins give gradients that are slices."""
    torch.manual_seed(0)
    form = torch.channels_last if last else torch.contiguous_format
    model = models.UNet(2, [(16, 16), (32, 32), (32, 32)], 3, 5).cuda().to(memory_format=form)
    x = torch.randn(4, 3, 64, 64, device="cuda").contiguous(memory_format=form)
    return model, (x, torch.randint(5, (4, 64, 64), device="cuda"))


def functions(step):
    return step._run.program.functions


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("policy", ["vdnn-all-m", "vdnn-ext-all-p"])
def test_every_convolution_runs_the_configuration_of_the_plan(policy, last):
    model, sample = unet(last=last)
    precise = models.UNet(2, [(16, 16), (32, 32), (32, 32)], 3, 5).cuda().double()
    precise.load_state_dict(model.state_dict())
    expected = functional.cross_entropy(precise(sample[0].double()), sample[1])
    expected.backward()
    step = fit(model, sample, loss=functional.cross_entropy, policy=policy, convolutions="undivided", debug=True)
    for _ in range(STEPS):  # the later ones launch what the first one bound
        model.zero_grad()
        step(*sample).backward()
    scale = max(float(each.grad.abs().max()) for each in precise.parameters())
    for ours, theirs in zip(model.parameters(), precise.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-3, atol=1e-4 * scale)
    ran = functions(step)
    assert len(ran) > 20
    fronts = step.costs.configurations
    for operation, function in ran.items():
        assert function.calls == STEPS
        assert step.plan.configurations[operation] == fronts[operation][0 if policy.endswith("-m") else -1]
        assert function.kernel.problem.layout.channels_last is last
    assert any(function.kernel.bias is not None for function in ran.values())
    step.close()


def test_recomputation_runs_the_same_configuration_to_the_bit():
    model, sample = unet()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    subject = step_subject(model, sample, functional.cross_entropy, None)
    program = trace_program(subject, "unet", 4)
    choices = ConvolutionChoices.asked(program, {"policy": "powerOfTwo", "workspace_limit": "1MiB"})
    costs = choices.measured(step_costs(program.graph, program.device), None)
    chosen = {index: front[index % len(front)] for index, front in costs.configurations.items()}
    trained = []
    for policy in ("stock", "checkpoint", "vdnn-ext-all-p"):
        plan = replace(make_plan(program.graph, costs, None, policy), configurations=chosen)
        step = fit_plan(subject, choices.applied(chosen), plan, costs)
        model.load_state_dict(before)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(STEPS):
            optimizer.zero_grad()
            step(*sample).backward()
            optimizer.step()
        again = [target for kind, target in plan.actions if kind is ActionKind.RECOMPUTE]
        calls = {index: function.calls for index, function in functions(step).items()}
        assert calls == {index: STEPS * (1 + again.count(index)) for index in chosen}
        trained.append([tensor.clone() for tensor in model.state_dict().values()])
        step.close()
    for other in trained[1:]:
        assert all(torch.equal(*pair) for pair in zip(trained[0], other, strict=True))


def test_a_convolution_on_other_addresses_gives_the_same_bits():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU()).cuda()
    x = torch.randn(4, 8, 32, 32, device="cuda")
    step = fit(model, x, policy="vdnn-conv-p", convolutions="undivided")
    first = step(x).detach().clone()
    held = [torch.empty(1 << 20, device="cuda") for _ in range(3)]
    assert torch.equal(first, step(x.clone()).detach())
    assert len(held) == 3
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.synchronize()
        other = step(x).detach()
        torch.cuda.synchronize()
    assert torch.equal(first, other)
