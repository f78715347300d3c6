"""Fitted steps run exactly the configurations of their plans, the same ones where they compute again."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import ucudnn.memory
from tests.support.live_bytes import LiveBytes
from tests.support.operands import QUICK
from tests.support.plain_training import Race, fit_plan, state_of, train
from tests.support.small_networks import small_network
from tests.support.torch_cases import modules
from ucudnn.errors import InvalidValueError, SettingsError, StepError
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.step.graph import Phase
from ucudnn.memory.torch.convolutions.convolution_choices import ConvolutionChoices

pytestmark = pytest.mark.usefixtures("one_thread")
UNDIVIDED = {"policy": "undivided", "effort": QUICK, "database": "off", "slabs": False}
DIVIDED = UNDIVIDED | {"policy": "powerOfTwo"}


@pytest.fixture
def poisoned_memory():
    """Let new tensors hold NaN until they are written."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


class Chosen:
    """The race of a small network, and what its convolutions can choose from."""

    def __init__(self, name, options, **race):
        torch.manual_seed(0)
        self.race = Race(small_network(name), **race)
        self.choices = ConvolutionChoices(self.race.program, options)
        self.costs = self.choices.measured(self.race.costs, None)

    def fitted(self, policy, budget=None, *, debug=True):
        race = self.race
        graph = race.program.graph
        plan = policy if hasattr(policy, "actions") else make_plan(graph, self.costs, budget, policy)
        return fit_plan(race.subject, self.choices.applied(plan.configurations), plan, self.costs, debug=debug)


def functions(step):
    return step._run.program.functions


def precise_gradients(model, inputs, loss):
    """Return the loss and the gradients of all parameters in float64."""
    precise = copy.deepcopy(model).double()
    target = inputs[-1].double() if inputs[-1].is_floating_point() else inputs[-1]
    value = loss(precise(*(each.double() for each in inputs[:-1])), target)
    value.backward()
    return value.detach(), [parameter.grad for parameter in precise.parameters()]


def check_precise(step, model, inputs, loss):
    """Take a step, and compare the loss and all gradients with float64."""
    expected, gradients = precise_gradients(model, inputs, loss)
    value = step(*inputs)
    value.backward()
    torch.testing.assert_close(value.detach().double(), expected, rtol=1e-5, atol=1e-5)
    scale = max(float(gradient.abs().max()) for gradient in gradients)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad.double(), gradient, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("name", ["inplace", "unet", "unet3d"])
@pytest.mark.parametrize("policy", ["vdnn-all-m", "vdnn-ext-conv-p"])
def test_every_convolution_runs_the_configuration_of_the_plan(name, policy, poisoned_memory):
    chosen = Chosen(name, UNDIVIDED, kind=None, steps=1)
    step = chosen.fitted(policy)
    race = chosen.race
    race.model.load_state_dict(race.before)
    race.model.zero_grad()
    check_precise(step, race.model, race.inputs, race.loss)
    operations = step.plan.graph.operations
    assert {*functions(step)} == {index for index, each in enumerate(operations) if each.problem is not None}
    assert chosen.choices.left == {}
    copied = {index for index, each in functions(step).items() if each.kernel.copied}
    assert (len(copied) > 0) == name.startswith("unet")  # gradients of what was joined are slices
    front = 0 if policy.endswith("-m") else -1
    for operation, function in functions(step).items():
        assert function.calls == 1
        wanted = chosen.costs.configurations[operation][front]
        assert str(function.plan.configuration) == str(wanted)
        assert function.plan.workspace_bytes + function.kernel.copied_bytes(1) == wanted.workspace_bytes
        assert function.plan.problem.batch == len(race.inputs[0])
    if policy.endswith("-m"):
        assert {function.plan.workspace_bytes for function in functions(step).values()} == {0}
    else:
        assert any(function.plan.workspace_bytes for function in functions(step).values())


def test_a_small_workspace_divides_mini_batches(poisoned_memory):
    torch.manual_seed(0)
    within = 2**18
    layers = (
        nn.Conv2d(3, 16, 5, padding=2),
        nn.Tanh(),
        nn.Conv2d(16, 16, 5, padding=2),
        nn.Flatten(),
        nn.Linear(4096, 5),
    )
    model, inputs = nn.Sequential(*layers), (torch.randn(8, 3, 16, 16), torch.randint(5, (8,)))
    options, told = {**DIVIDED, "workspace_limit": within}, []
    loss = functional.cross_entropy
    step = ucudnn.memory.fit(
        model, inputs, loss=loss, policy="vdnn-conv-p", convolutions=options, debug=True, progress=told.append
    )
    assert "measuring the algorithms of 5 kernels of convolutions" in told
    check_precise(step, model, inputs, loss)
    plans = [function.plan for function in functions(step).values()]
    assert max(plan.workspace_bytes for plan in plans) <= within
    divided = [plan for plan in plans if len(plan.steps) > 1]
    assert len(divided) > 0
    assert f"convolutions: 5 of 5 kernels as the plan chose, {len(divided)} of them divided" in step.report()
    assert all(sum(part.size for part in plan.configuration.parts) == 8 for plan in plans)
    assert all(function.calls == 1 for function in functions(step).values())


@pytest.mark.parametrize(("name", "options"), [("unet", UNDIVIDED), ("inplace", DIVIDED)])
def test_recomputation_runs_the_same_configuration_to_the_bit(name, options):
    chosen = Chosen(name, options)
    race = chosen.race
    configurations = {
        operation: front[operation % len(front)] for operation, front in chosen.costs.configurations.items()
    }
    trained = []
    for policy in ("stock", "checkpoint", "vdnn-ext-all-p"):
        plan = replace(make_plan(race.program.graph, race.costs, None, policy), configurations=configurations)
        step = chosen.fitted(plan)
        race.model.load_state_dict(race.before)
        race.model.zero_grad()
        losses = train(step, torch.optim.SGD(race.model.parameters(), lr=0.01), race.inputs)
        trained.append([*losses, *state_of(race.model, None)])
        again = [target for kind, target in plan.actions if kind is ActionKind.RECOMPUTE]
        assert {index: each.calls for index, each in functions(step).items()} == {
            index: 5 * (1 + again.count(index)) for index in configurations
        }
        assert (policy == "checkpoint") == any(index in configurations for index in again)
    for other in trained[1:]:
        assert all(torch.equal(*pair) for pair in zip(trained[0], other, strict=True))
    assert not all(torch.equal(*pair) for pair in zip(trained[0], race.losses, strict=False))


@pytest.mark.parametrize("policy", ["vdnn-all-p", "dymem", "stock"])
def test_workspaces_are_counted_in_the_peak(policy):
    chosen = Chosen("unet", UNDIVIDED, kind=None)
    race = chosen.race
    configurations = chosen.costs.fastest
    plan = replace(make_plan(race.program.graph, chosen.costs, None, policy), configurations=configurations)
    step = chosen.fitted(plan, debug=False)
    train(step, None, race.inputs, steps=1)
    race.model.zero_grad()
    present = [*race.model.state_dict(keep_vars=True).values(), *race.inputs]
    with LiveBytes(present) as live:
        step(*race.inputs).backward()
    assert live.peak == pytest.approx(step.simulation.peak_bytes, rel=0.02)
    without = fit_plan(race.subject, race.program, replace(plan, configurations={}), race.costs).simulation
    assert live.peak > 1.05 * without.peak_bytes


def test_dymem_gives_each_layer_what_the_pool_has_left():
    chosen = Chosen("inception", UNDIVIDED, kind=None, steps=1)
    free = chosen.fitted("dymem")
    budget = int(free.simulation.peak_bytes * 0.9)
    step = chosen.fitted("dymem", budget)
    assert step.simulation.peak_bytes <= budget
    fronts = chosen.costs.configurations
    assert any(each != fronts[operation][0] for operation, each in step.plan.configurations.items())
    assert any(each != fronts[operation][-1] for operation, each in step.plan.configurations.items())
    step(*chosen.race.inputs).backward()
    assert all(function.calls == 1 for function in functions(step).values())


@pytest.mark.parametrize("policy", ["stock", "checkpoint", "swap"])
def test_policies_that_choose_nothing_leave_convolutions_to_pytorch_to_the_bit(policy):
    chosen = Chosen("inplace", UNDIVIDED)
    step = chosen.fitted(policy)
    race = chosen.race
    without = ucudnn.memory.fit(race.model, race.inputs, loss=race.loss, policy="vdnn-all-p")
    assert without.costs.configurations == step.plan.configurations == functions(step) == functions(without) == {}
    race.check(step)


@pytest.mark.parametrize(("module", "shape"), modules())
def test_all_kinds_of_convolution_have_the_values_of_float64(module, shape, poisoned_memory):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), module, nn.Tanh())
    inputs = torch.randn(shape), torch.tensor(0.0)

    def loss(out, target):
        return (out - target).square().sum()

    step = ucudnn.memory.fit(model, inputs, loss=loss, policy="vdnn-all-m", convolutions=UNDIVIDED, debug=True)
    check_precise(step, model, inputs, loss)
    phases = [step.plan.graph.operations[index].phase for index in functions(step)]
    assert sorted(map(phases.count, Phase)) == [0, 1, 1]  # the input needs no gradient


def test_a_configuration_that_cannot_run_is_refused_before_the_step():
    chosen = Chosen("inplace", UNDIVIDED, kind=None, steps=1)
    plan = make_plan(chosen.race.program.graph, chosen.costs, None, "vdnn-all-m")
    operation, configuration = next(iter(plan.configurations.items()))
    unknown = replace(configuration, parts=(replace(configuration.parts[0], algorithm="none such"),))
    with pytest.raises(StepError, match="none such"):
        chosen.fitted(replace(plan, configurations={operation: unknown}))
    other = next(index for index in range(len(plan.graph.operations)) if index not in plan.configurations)
    with pytest.raises(InvalidValueError, match="has a configuration, and ucudnn cannot run it: it is no convolution"):
        chosen.fitted(replace(plan, configurations={other: configuration}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("none", "policy='none'"),
        *((each, r"unknown settings \[") for each in ({"color": "red"}, {1: 2}, {"names": 3}, {"environment": 3})),
        ({"effort": 3}, r"effort=3 is no ucudnn\.Effort"),
    ],
)
def test_options_that_are_not_known_are_refused(options, message):
    model, inputs, loss = small_network("inplace")
    with pytest.raises(SettingsError, match=message):
        ucudnn.memory.fit(model, inputs, loss=loss, convolutions=options)
