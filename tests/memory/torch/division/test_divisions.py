"""`fit(..., divide=True)`: steps below their floor train, and say what is divided; nothing else is."""

import copy
import json
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.divided_networks import NETWORKS, TinyGpt, classes, logits_loss, vgg
from ucudnn.errors import BudgetError, InvalidValueError
from ucudnn.memory import fit
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.torch.comparison import trial, trial_table
from ucudnn.memory.torch.device.stated_budget import StatedBudget
from ucudnn.memory.torch.division.divisions import lowest
from ucudnn.memory.torch.measuring.operation_costs import step_costs
from ucudnn.memory.torch.subject.step_program import step_subject
from ucudnn.memory.torch.tracing import real_geometry
from ucudnn.memory.torch.tracing.traced_program import trace_program

pytestmark = pytest.mark.slow


def floor_of(model, sample, loss, optimizer):
    program = trace_program(step_subject(model, sample, loss, optimizer), "net", len(sample[0]))
    return measure_liveness(program.graph, step_costs(program.graph, program.device)).floor_bytes


def gradients(model):
    return torch.cat([each.grad.double().flatten() for each in model.parameters()])


@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_below_its_floor_trains_divided(name):
    make, draw, loss = NETWORKS[name]
    torch.manual_seed(0)
    model, sample = make(), draw()
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = int(0.85 * floor_of(model, sample, loss, optimizer))
    with pytest.raises(BudgetError, match="give fit divide=True, which keeps this budget at about"):
        fit(model, sample, loss, optimizer, budget, policy="joint")
    step = fit(model, sample, loss, optimizer, budget, policy="joint", divide=True)
    assert step.simulation.peak_bytes <= budget
    lines = [line for line in step.report().splitlines() if line.startswith("divided: ")]
    assert lines
    axis = {"volume": "slabs of depth", "image": "slabs of height"}.get(name, "parts")
    assert all(f" {axis}" in line and ", because " in line for line in lines)
    for _ in range(2):  # the first step checks what operators return
        model.zero_grad()
        step(*sample).backward()
    for other in (plain, exact):
        own = tuple(each.to(next(other.parameters()).dtype) if each.is_floating_point() else each for each in sample)
        for _ in range(2):
            other.zero_grad()
            loss(other(own[0]), own[1]).backward()
    error, plain_error = ((gradients(each) - gradients(exact)).norm() for each in (model, plain))
    assert error <= 1.5 * plain_error + 1e-7 * gradients(exact).norm()  # the volume's PReLU runs in pieces
    assert ("var_mean" in step.code) is (name in ("u-net with batch norm", "image", "volume"))
    exactly = {} if "var_mean" in step.code else {"rtol": 0, "atol": 0}
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other, **exactly)


def test_nothing_is_divided_where_the_budget_allows_the_whole():
    model, sample = vgg(), (torch.randn(4, 3, 32, 32), classes(4, of=10))
    step = fit(model, sample, functional.cross_entropy, budget="1GiB", divide=True)
    assert "divided" not in step.report()


TOKEN_LOSSES = {
    "rows": logits_loss,
    "transposed": lambda x, y: functional.cross_entropy(x.mT, y),
    "shifted": lambda x, y: functional.cross_entropy(x[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
    "float32": lambda x, y: functional.cross_entropy(x.float().view(-1, x.shape[-1]), y.view(-1), ignore_index=0),
    "smoothed": lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "of each": lambda x, y: functional.cross_entropy(x.mT, y, reduction="none").mean(),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_logits_of_every_form_are_divided(name, dtype, tied):
    model = TinyGpt(words=2000)
    if not tied:
        model.head = nn.Linear(32, 2000)
    sample = classes(4, 64), classes(4, 64)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        program = trace_program(step_subject(model, sample, TOKEN_LOSSES[name], None), "net", 4)
    costs = step_costs(program.graph, program.device)
    logits = 4 * 64 * 2000 * dtype.itemsize
    whole, parts = measure_liveness(program.graph, costs).floor_bytes, lowest(program, costs).floor_bytes
    assert parts < whole - logits / 2


def test_a_step_is_divided_where_its_update_and_what_measuring_takes_exceed_the_budget_together(monkeypatch):
    """Kernels that measuring loads leave less of a budget than was known when the update was looked at."""
    torch.manual_seed(0)
    model, (_, draw, loss) = TinyGpt(width=128), NETWORKS["gpt"]
    sample = tuple(each.repeat(4, 1) for each in draw())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    program = trace_program(step_subject(model, sample, loss, optimizer), "net", 20)
    floors = measure_liveness(program.graph, step_costs(program.graph, program.device)).floors
    update = max(floors[program.graph.optimizer_begins :])
    budget = int(1.01 * update)
    assert budget < max(floors)
    taken = budget - int(0.95 * update)
    monkeypatch.setattr(StatedBudget, "with_loaded_kernels", lambda self, *_, **__: replace(self, reserve_bytes=taken))
    step = fit(model, sample, loss, optimizer, budget, policy="joint", divide=True)
    assert "divided: " in step.report()
    assert "update: some parameters at a time" in step.report()
    assert step.simulation.peak_bytes <= budget - taken


def test_a_refusal_names_what_the_divided_step_needs_and_where():
    make, draw, loss = NETWORKS["gpt"]
    model, sample = make(), draw()
    with pytest.raises(BudgetError, match=r"raise the budget to the floor; divided, .* are needed, because of") as of:
        fit(model, sample, loss, None, 1000, divide=True)
    assert of.value.required_bytes < 0.8 * floor_of(model, sample, loss, None)
    assert "divided: " in fit(model, sample, loss, None, of.value.required_bytes, divide=True).report()


def test_gradients_of_16_bits_are_added_in_float32():
    make, draw, loss = NETWORKS["gpt"]
    torch.manual_seed(0)
    model, sample = make(), draw()
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    model, plain = model.bfloat16(), plain.bfloat16()
    exact.load_state_dict(model.state_dict())
    step = fit(model, sample, loss, None, int(0.8 * floor_of(model, sample, loss, None)), policy="joint", divide=True)
    assert "divided: " in step.report()
    step(*sample).backward()
    for other in (plain, exact):
        loss(other(sample[0]), sample[1]).backward()
    error, plain_error = ((gradients(each) - gradients(exact)).norm() for each in (model, plain))
    assert error <= 1.5 * plain_error


def divided_vgg(model, *masks):
    sample = torch.randn(4, 3, 32, 32), *masks, classes(4, of=10)
    loss = functional.cross_entropy
    budget = int(0.85 * floor_of(model, sample, loss, None))
    step = fit(model, sample, loss, None, budget, policy="joint", divide=True)
    assert "divided: " in step.report()
    return step, sample


def check_steps(step, model, plain, samples):
    for sample in samples:
        results = []
        for each, own in ((step, model), (plain, plain)):
            own.zero_grad()
            loss = each(*sample) if each is step else functional.cross_entropy(each(*sample[:-1]), sample[-1])
            loss.backward()
            results.append((loss.detach(), gradients(own)))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def test_what_a_part_returns_otherwise_than_the_whole_is_planned_anew(monkeypatch):
    """A kernel that lays small results out otherwise is one that no trace of the whole mini-batch has seen."""
    monkeypatch.setattr(real_geometry, "_MET", {})
    torch.manual_seed(0)
    model = vgg()
    model[3] = nn.GELU()
    plain, whole = copy.deepcopy(model), torch.ops.aten.gelu.default

    def other(x, approximate="none"):
        y = torch.erf(x / 2**0.5).add(1).mul(x / 2)
        return y.contiguous(memory_format=torch.channels_last) if x.shape[0] < 4 else y

    step, sample = divided_vgg(model)
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl("gelu", other, "CPU")
        check_steps(step, model, plain, [sample, sample])
    finally:
        library._destroy()
    assert any(key[0] is whole for key in real_geometry._MET)
    assert "divided: " in step.report()


def test_a_branch_that_an_argument_decides_is_divided_by_a_plan_of_its_own():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = vgg()

        def forward(self, x, mask):
            return self.layers(x * 2 if mask.all() else x)

    torch.manual_seed(0)
    model = Branching()
    plain = copy.deepcopy(model)
    full, some = torch.ones(4, dtype=torch.bool), torch.arange(4) > 1
    step, (x, _, y) = divided_vgg(model, some)
    plans = []
    for mask in (some, full, some):
        check_steps(step, model, plain, [(x, mask, y)])
        assert "divided: " in step.report()
        plans.append(step.plan)
    assert plans[0] is plans[2] is not plans[1]


def test_hooks_around_a_divided_step_run_once_with_the_gradients_of_the_whole():
    torch.manual_seed(0)
    model = vgg()
    plain = copy.deepcopy(model)
    seen = {each: [] for each in (model, plain)}
    for own, calls in seen.items():
        for parameter in own.parameters():
            parameter.register_hook(lambda grad: grad * 2)
            parameter.register_post_accumulate_grad_hook(lambda each, calls=calls: calls.append(each.grad.clone()))
    step, sample = divided_vgg(model)
    outputs = []
    step.register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    check_steps(step, model, plain, [sample])
    assert len(outputs) == 1
    assert len(seen[model]) == len(seen[plain]) == len([*model.parameters()])
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(InvalidValueError, match="hook"):
        step(*sample)


def test_commands_show_and_train_a_step_with_and_without_division(call, monkeypatch):
    monkeypatch.setattr(trial_table, "compare_trials", partial(trial_table.compare_trials, run=trial.run_trial))
    step = "tests.support.training_steps:small_unet", "--shape", "3x32x32", "--batch", "8"

    def told(command, *options):
        status, out, error = call("memory", command, *step, *options, "--json")
        return json.loads(out) if status == 0 else error

    why = told("why", "--divide")
    whole, parts = why["floor"]["bytes"], why["divided"]["floor_bytes"]
    assert parts < 0.95 * whole
    assert why["divided"]["segments"]
    within = "--policy", "joint", "--budget", str((whole + parts) // 2)
    assert "is below the floor" in told("plan", *within)
    (row,) = told("plan", *within, "--divide")["policies"]
    assert row["peak_bytes"] <= (whole + parts) // 2
    front = told("plan", "--front", "--points", "2", "--policy", "joint", "--divide")["plans"]
    least = {each["policy"]: each["peak_bytes"] for each in reversed(front)}
    assert least["joint, divided"] < least["joint"]
    (row,) = told("run", *within, "--divide", "--on", "cpu", "--steps", "1")["policies"]
    assert row["policy"] == "joint"


def test_commands_show_slabs_of_an_image_that_is_alone_in_its_mini_batch(call):
    """A recorded step has no shapes of its inputs but those by which its calls read them."""
    step = "tests.support.training_steps:small_unet", "--shape", "3x64x32", "--batch", "1"
    status, out, _ = call("memory", "why", *step, "--divide", "--json")
    assert status == 0
    found = json.loads(out)
    assert found["divided"]["floor_bytes"] < 0.9 * found["floor"]["bytes"]
    assert all(" slabs of height " in each for each in found["divided"]["segments"])
