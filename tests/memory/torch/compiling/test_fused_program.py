"""Regions that run their calls one after another train to the bits of the plain loop, whatever the plan does."""

import random

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from tests.support.autocast_networks import AROUND, AutocastNetwork, loss
from tests.support.compiled_steps import regions_of
from tests.support.memory_plans import random_plan_in_parts
from tests.support.plain_training import Race, race_or_none
from tests.support.random_networks import random_network
from tests.support.small_networks import NETWORKS, small_network
from tests.support.strategies import examples
from ucudnn.memory.policies.catalog import POLICIES
from ucudnn.memory.step.graph import Phase, Role
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.torch.compiling.fused_program import RegionKinds, fused_program
from ucudnn.memory.torch.measuring.operation_costs import step_costs
from ucudnn.memory.torch.sharding.agreement import structure
from ucudnn.memory.torch.subject.step_program import step_subject
from ucudnn.memory.torch.tracing.traced_program import trace_program

pytestmark = [
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
    pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*CPU autocast:UserWarning"),
]


def fuse(race, share=2.0, *, rematerializes=False):
    """Let a race's step have regions, and return the step as it was and the kinds of regions."""
    before, kinds = race.program, RegionKinds()
    race.program = fused_program(before, kinds, share, rematerializes=rematerializes)
    race.costs = step_costs(race.program.graph, torch.device("cpu"))
    return before, kinds.kinds


def check(race, seed):
    """Compare plans of fused steps with the plain loop, and return how many regions there are."""
    fuse(race)
    race.check(race.fitted(random.Random(seed).choice([*POLICIES])))
    race.check(race.fitted(random_plan_in_parts(race.program.graph, race.costs, seed)))
    return len(regions_of(race.program))


@pytest.mark.parametrize("seed", [0, 1, 2, 9, 22])
def test_a_random_network_trains_to_the_bits_of_the_plain_loop(seed):
    assert check(Race(random_network(seed), random.Random(seed).choice(["sgd", "adam"]), steps=3), seed) > 3


@pytest.mark.parametrize(("seed", "rows"), [(0, 1), (1, 2), (9, 3)])
def test_smaller_arguments_have_the_regions_of_the_sample_where_that_is_asked_for(seed, rows):
    model, inputs, loss = random_network(seed)
    smaller = tuple(each[:rows] for each in inputs)
    whole, part = (trace_program(step_subject(model, x, loss, None), "net", len(x[0])) for x in (inputs, smaller))
    kinds = RegionKinds()
    wanted = structure(fused_program(whole, kinds, seeded=True).graph)
    assert structure(fused_program(part, RegionKinds(), seeded=True).graph) != wanted
    assert structure(fused_program(part, kinds, like=kinds.chosen[structure(part.graph)]).graph) == wanted


@given(st.integers(0, 10_000))
@examples(1 / 2)
def test_random_networks_train_to_the_bits_of_the_plain_loop(seed):
    race = race_or_none(random_network(seed), steps=2)
    assume(race is not None)
    check(race, seed)


@given(st.integers(0, 10_000), st.sampled_from([*AROUND]))
@examples(1 / 3)
def test_networks_with_parts_in_other_types_do_so(seed, around):
    torch.manual_seed(seed)
    subject = AutocastNetwork(seed), (torch.randn(6, 4, 16), torch.randn(6, 4, 16)), loss
    race = race_or_none(subject, steps=2, around=AROUND[around])
    assume(race is not None)  # types may not match
    check(race, seed)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_small_network_does_so_with_fewer_operations(name):
    race = Race(small_network(name), steps=2)
    before, kinds = fuse(race)
    graph, regions = race.program.graph, regions_of(race.program)
    assert len(regions) >= 3
    ours, plain = (each.optimizer_begins for each in (graph, before.graph))
    assert ours < 0.9 * plain
    assert len(graph.storages) <= len(before.graph.storages)
    assert len(kinds) <= len(regions)
    assert {each.phase for each in regions} <= {Phase.FORWARD, Phase.BACKWARD}
    kept = [each.name for each in before.graph.storages if each.role is not Role.ACTIVATION]
    assert kept == [each.name for each in graph.storages if each.role is not Role.ACTIVATION]
    race.check(race.fitted("checkpoint"))


@pytest.mark.parametrize("rematerializes", [False, True])
@pytest.mark.parametrize("seed", [0, 22, 161])
def test_what_a_region_is_given_is_there(seed, rematerializes):
    race = Race(random_network(seed), steps=1)
    fuse(race, rematerializes=rematerializes)
    for call, operation in zip(race.program.calls, race.program.graph.operations, strict=True):
        if operation.kind == "ucudnn.region":
            assert {each.storage for each in call.inputs} <= {*operation.reads, *operation.writes}
            assert {each.storage for each in call.outputs} <= {*operation.writes}
    race.trained(race.fitted("stock"))


def test_alike_regions_are_one_kind():
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))]
    race = Race((nn.Sequential(*layers), (torch.randn(4, 8), torch.randn(4, 8)), F.mse_loss), steps=1)
    _, kinds = fuse(race)
    assert len(regions_of(race.program)) >= 12
    assert len(kinds) <= 6


def test_a_region_accesses_no_more_bytes_than_its_share_allows():
    race = Race(small_network("resnet18"), steps=1)
    floors = []
    for share in (1.0, 2.0):
        before, _ = fuse(race, share)
        floors.append(measure_liveness(race.program.graph, race.costs).floor_bytes)
        floor = measure_liveness(before.graph, step_costs(before.graph, torch.device("cpu"))).floor_bytes
        assert floors[-1] <= share * floor
        race.program = before
    assert floors[0] <= floor


def test_a_region_that_runs_again_leaves_statistics_alone():
    race = Race(small_network("resnet18"), steps=2)
    fuse(race)
    step = race.fitted("checkpoint")
    again = {target for kind, target in step.plan.actions if kind.value == "recompute"}
    graph = race.program.graph
    written = {each for index in again for each in graph.operations[index].writes}
    assert any(graph.storages[each].name.endswith("running_mean") for each in written)
    race.check(step)
