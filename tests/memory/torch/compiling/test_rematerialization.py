"""Regions of backward that compute again what forward made: forward saves less, and gradients are the same."""

import random

import networkx
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from tests.support.memory_plans import random_plan_in_parts
from tests.support.plain_training import Race, race_or_none
from tests.support.raced_steps import Called
from tests.support.random_networks import random_network
from tests.support.small_networks import small_network
from tests.support.strategies import examples
from ucudnn.memory.policies.catalog import POLICIES
from ucudnn.memory.step.graph import Phase
from ucudnn.memory.torch.compiling.fused_program import RegionKinds, fused_program
from ucudnn.memory.torch.compiling.norms import is_norm, norm_output
from ucudnn.memory.torch.measuring.operation_costs import step_costs
from ucudnn.memory.torch.subject.step_program import step_subject
from ucudnn.memory.torch.subject.traced_values import TracedTensor, mapped
from ucudnn.memory.torch.tracing.traced_program import trace_program

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")


def saved_bytes(program):
    return sum(program.graph.sizes[each] for each in program.graph.saved)


def rematerialized(race):
    """Let a race's step compute again, and return the bytes that forward saves without that and with it."""
    without = fused_program(race.program, RegionKinds(), rematerializes=False)
    race.program = fused_program(race.program, RegionKinds())
    race.costs = step_costs(race.program.graph, torch.device("cpu"))
    return saved_bytes(without), saved_bytes(race.program)


def again(program):
    """Return by region of backward what it computes of forward, by the names of operators."""
    found = [
        call.func.calls for call in program.calls if getattr(call.func, "calls", ()) and call.phase is Phase.BACKWARD
    ]
    return [[each.func._opname for each in calls if each.phase is Phase.FORWARD] for calls in found]


def check_nearly(race, step):
    """Compare a fitted step with the plain loop but for rounding."""
    losses, after = race.trained(step)
    for one, other in zip([*losses, *after], [*race.losses, *race.after], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-4, equal_nan=True)


def test_of_several_least_cuts_that_nearest_to_the_sink_is_taken():
    network = networkx.DiGraph()
    for begin, end, capacity in ("sa1", "ab1", "bt1", "sc1", "ct2"):
        network.add_edge(begin, end, capacity=int(capacity))
    assert networkx.minimum_cut(network, "s", "t") == (2, ({"s", "a", "b"}, {"c", "t"}))


def test_a_chain_of_cheap_operations_saves_its_beginning_alone_to_the_same_bits():
    chain = Called(nn.Linear(6, 40), lambda y: F.gelu(torch.tanh(F.silu(y * 2)) * y), nn.Linear(40, 6))
    race = Race((chain, (torch.randn(8, 6), torch.randn(8, 6)), F.mse_loss), steps=3)
    before, after = rematerialized(race)
    size = 8 * 40 * 4
    assert before - after >= 3 * size
    race.check(race.fitted("stock"))
    race.check(race.fitted("checkpoint"))


def test_a_norm_is_computed_from_its_statistics_which_are_updated_once():
    race = Race(small_network("resnet18"), steps=3)
    rematerialized(race)
    found = again(race.program)
    assert sum("batch_norm_output" in each for each in found) > 5
    assert not any("native_batch_norm" in each for each in found)
    check_nearly(race, race.fitted("stock"))
    check_nearly(race, race.fitted("checkpoint"))


def test_what_is_read_anyway_is_not_computed_from_more():
    race = Race(small_network("resnet18"), steps=1)
    graph = fused_program(race.program, RegionKinds(), rematerializes=False).graph
    rematerialized(race)
    assert len(race.program.graph.operations) == len(graph.operations)
    for one, other in zip(race.program.graph.operations, graph.operations, strict=True):
        read, before = (
            sum(of.sizes[each] for each in op.reads) for op, of in ((one, race.program.graph), (other, graph))
        )
        assert read <= before + 256  # a norm's weight and bias


@given(st.integers(0, 10_000))
@example(854)  # some of its regions compute again, and others have no room to
@examples(1 / 4)
def test_random_networks_train_as_the_plain_loop_does(seed):
    race = race_or_none(random_network(seed), steps=2)
    assume(race is not None)
    assume(max(race.losses) < 100)  # one that diverges makes any rounding large
    before, after = rematerialized(race)
    assert after <= before
    check_nearly(race, race.fitted(random.Random(seed).choice([*POLICIES])))
    check_nearly(race, race.fitted(random_plan_in_parts(race.program.graph, race.costs, seed)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 8), (3, 8, 5), (2, 8, 3, 4)])
def test_the_output_of_each_norm_follows_from_its_statistics(shape, dtype):
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(8) if len(shape) < 4 else nn.BatchNorm2d(8), nn.LayerNorm(shape[1:]), nn.GroupNorm(2, 8)]
    norms += [nn.LayerNorm(shape[-1:], elementwise_affine=False), nn.GroupNorm(4, 8, affine=False)]
    for norm in norms:
        for each in norm.parameters():
            nn.init.normal_(each)
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        subject = step_subject(norm.to(dtype), (x, torch.zeros(())), lambda y, _: y.square().sum(), None)
        calls = trace_program(subject, "norm", 1).calls
        named = [each for each in calls if each.func._opname.startswith("native") and each.phase is Phase.FORWARD]
        (call,) = named
        assert is_norm(call) is (call.results[1].dtype.itemsize > 2)
        if not is_norm(call):
            continue
        made = {}

        def of(tensor, made=made):
            return made.setdefault(
                tensor, torch.randn(tensor.shape).to(tensor.dtype).as_strided(tensor.shape, tensor.stride)
            )

        args = mapped(call.args, TracedTensor, of)
        results = call.func(*args)
        made.update(zip(call.results, results, strict=True))
        other = norm_output(call)
        found = other.func(*mapped(other.args, TracedTensor, made.__getitem__))
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(found, results[0], **tolerance)
