"""Steps with regions beside what else `fit` does: divided steps, random numbers, replicas, gradients in parts.

Here regions run as they are, as where there is no compiler: `test_compiled_regions` tests what Inductor makes of them.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name
from torch.nn.parallel import DistributedDataParallel

from tests.support.compiled_steps import SmallNet, compared, errors, gradients, images, in_float64, regions_of
from tests.support.divided_networks import NETWORKS
from tests.support.raced_steps import Called
from ucudnn.errors import BudgetError
from ucudnn.memory.step.graph import Phase
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.torch.compiling import compiled_regions
from ucudnn.memory.torch.measuring.operation_costs import step_costs
from ucudnn.memory.torch.running.fit import fit
from ucudnn.memory.torch.subject.step_program import step_subject
from ucudnn.memory.torch.tracing.traced_program import trace_program


def no_compiler(*_):
    raise RuntimeError("there is no compiler")


@pytest.fixture(autouse=True)
def _without_a_compiler(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(compiled_regions, "compiled", no_compiler)


DROPPED = {
    "module": lambda: SmallNet(drop=0.4),
    "between": lambda: Called(
        nn.Linear(6, 16), lambda y: F.layer_norm(F.dropout(F.gelu(y), 0.3) + F.dropout(y, 0.5), [16]), nn.Linear(16, 5)
    ),
}


@pytest.mark.parametrize("policy", ["stock", "checkpoint", "vdnn-ext-all-p"])
@pytest.mark.parametrize("name", DROPPED)
def test_forward_recomputation_and_backward_read_one_mask(name, policy):
    data = images() if name == "module" else (torch.randn(7, 6), torch.randint(5, (7,)))
    step = compared(DROPPED[name](), data, policy=policy, debug=True)
    program = step._run.program
    drawn = [each for each in program.graph.operations if each.kind.startswith("aten.bernoulli")]
    assert drawn
    assert not any(each.repeatable for each in drawn)
    assert not any(
        "bernoulli" in str(each.calls) for each in {c.func for c in program.calls if hasattr(c.func, "calls")}
    )


def floor_of(model, sample, loss):
    program = trace_program(step_subject(model, sample, loss, None), "net", len(sample[0]))
    return measure_liveness(program.graph, step_costs(program.graph, program.device)).floor_bytes


def test_a_divided_step_has_regions():
    make, draw, loss = NETWORKS["gpt"]
    model, sample = make(), draw()
    plain, exact = copy.deepcopy(model), in_float64(model, sample, loss)
    budget = int(0.7 * floor_of(model, sample, loss))
    with pytest.raises(BudgetError):
        fit(model, sample, loss, budget=budget, policy="joint", compile=True)
    step = fit(model, sample, loss, budget=budget, policy="joint", divide=True, compile=True)
    assert step.simulation.peak_bytes <= budget
    lines = step.report().splitlines()
    assert any(each.startswith("divided: ") for each in lines)
    assert any(each.startswith("compiled: ") for each in lines)
    for _ in range(2):
        ours = gradients(model, step, sample)
    own = gradients(plain, lambda x, y: loss(plain(x), y), sample)
    assert max(errors(ours, exact)) <= 1.5 * max(errors(own, exact)) + 1e-7


def test_a_tight_budget_gets_smaller_regions():
    model, sample = SmallNet(), images()
    whole = fit(copy.deepcopy(model), sample, loss=F.cross_entropy, compile=True)
    floor = measure_liveness(whole._run.program.graph, whole.costs).floor_bytes
    small = fit(copy.deepcopy(model), sample, loss=F.cross_entropy, budget=floor - 64, policy="joint", compile=True)
    assert small.simulation.peak_bytes < floor
    assert regions_of(small._run.program)


def test_replicas_average_their_gradients():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model, data = SmallNet(), images()
        plain = copy.deepcopy(model)
        parallel = DistributedDataParallel(model, bucket_cap_mb=0.0001)
        step = fit(parallel, data, loss=F.cross_entropy, compile=True)
        for _ in range(3):  # buckets are made anew after the first step
            ours = gradients(model, step, data)
        own = gradients(plain, lambda x, y: F.cross_entropy(plain(x), y), data)
    finally:
        torch.distributed.destroy_process_group()
    assert regions_of(step._run.program)
    torch.testing.assert_close(ours, own, rtol=1e-3, atol=1e-5)


def test_outputs_whose_gradients_the_loop_chooses():
    model = Called(nn.Linear(6, 8), lambda y: (F.gelu(y) * 2, torch.tanh(y).mean(), y.exp().sum(1)))
    plain, x = copy.deepcopy(model), torch.randn(4, 6)
    step = fit(model, x, compile=True)
    for used in (slice(1), slice(0, 3, 2), slice(1)):
        for each, call in ((model, step), (plain, plain)):
            each.zero_grad()
            sum(part.square().sum() for part in call(x)[used]).backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_what_backward_reads_must_not_change_and_is_checked():
    step = fit(SmallNet(), images(), loss=F.cross_entropy, compile=True)
    graph = step._run.program.graph
    read = {each for op in graph.operations if op.phase is Phase.BACKWARD for each in op.reads}
    assert {graph.storages[each].name for each in read} >= {"norm.weight", "norm.bias", "second.weight"}
    loss = step(*images())
    with torch.no_grad():
        step.model.norm.bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
