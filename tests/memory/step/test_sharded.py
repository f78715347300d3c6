"""Steps that are divided among ranks: what is smaller, what is gathered and averaged, and how long that takes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.step_graphs import StepBuilder, random_steps
from ucudnn.errors import InvalidValueError
from ucudnn.memory.plans.actions import COMPUTES
from ucudnn.memory.policies.stock import StockPolicy
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step import sharded
from ucudnn.memory.step.graph import Phase, Role
from ucudnn.memory.step.sharded import RankLink, buckets, sharded_step
from ucudnn.memory.step.shipped import open_step

LINK = RankLink(ranks=4, latency_ms=0.5, bytes_per_ms=10.0)


def layer():
    """Return a step of a layer and its update with momentum, and its costs."""
    builder = StepBuilder(default=10).storage("x", 10, Role.INPUT).storage("w", 40, Role.PARAMETER)
    builder.storage("m", 40, Role.OPTIMIZER_STATE).storage("count", 4, Role.OPTIMIZER_STATE)
    builder.storage("g", 40, Role.GRADIENT).storage("loss", 4, Role.OUTPUT).storage("t", 40)
    builder.run("mm", "x w", "y", time=3.0, module="fc").run("sum", "y", "loss", time=1.0)
    builder.backward("dx", "y w", "e", time=3.0).backward("dw", "e x", "g", time=3.0, module="fc")
    builder.run("scale", "g m", "t", phase=Phase.OPTIMIZER, time=4.0, scratch=8)
    return builder.run("add", "t w m count", "w m count", phase=Phase.OPTIMIZER, time=8.0)


def test_what_forward_and_backward_read_is_gathered_once_and_the_rest_is_a_rank_s_part():
    builder = layer()
    graph, costs = sharded_step(builder.graph(), builder.costs(), LINK)
    sizes = {each.name: size for each, size in zip(graph.storages, graph.sizes, strict=True)}
    parts = {"x": 10, "w": 10, "m": 10, "count": 4, "g": 10, "t": 10, "whole w": 40, "whole g": 40}
    assert {name: sizes[name] for name in parts} == parts
    names = [storage.name for storage in graph.storages]
    told = [
        (each.kind.removeprefix("ucudnn_ranks."), [names[at] for at in each.reads], [names[at] for at in each.writes])
        for each in graph.operations
    ]
    assert told == [
        ("all_gather", ["w"], ["whole w"]),
        ("test", ["x", "whole w"], ["y"]),
        ("test", ["y"], ["loss"]),
        ("test", ["y", "whole w"], ["e"]),
        ("test", ["x", "e"], ["whole g"]),
        ("reduce_scatter", ["whole g"], ["g"]),
        ("test", ["m", "g"], ["t"]),
        ("test", ["w", "m", "count", "t"], ["w", "m", "count"]),
    ]
    assert [each.module for each in graph.operations if each.kind != "test"] == ["fc", "fc"]
    collective = 0.5 * 3 + 3 / 4 * 40 / 10
    assert costs.time_ms == (collective, 3.0, 1.0, 3.0, 3.0, collective, 1.0, 2.0)
    assert costs.scratch_bytes == (0, 0, 0, 0, 0, 0, 2, 0)
    assert costs.where == "predicted for 4 ranks of test, not measured"


def test_gradients_that_are_kept_are_refused():
    builder = layer()
    with pytest.raises(InvalidValueError, match="hand keeps gradients"):
        sharded_step(builder.graph(gradients_kept=True), builder.costs(), LINK)


@given(random_steps(), st.sampled_from([2, 3, 64]))
def test_random_steps_stay_steps_and_hold_less(drawn, ranks):
    graph, costs = drawn
    graph = replace(graph, gradients_kept=False)
    found, made = sharded_step(graph, costs, replace(LINK, ranks=ranks))
    made.check(len(found.operations))
    kept = [each for each in found.operations if each.kind == "test"]
    assert [each.name for each in kept] == [each.name for each in graph.operations]
    for index, each in enumerate(graph.storages):
        divided = each.role in (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE)
        assert found.sizes[index] <= graph.sizes[index] if divided else True
    plan = StockPolicy().plan(found, made, None)
    assert sum(kind in COMPUTES for kind, _ in plan.actions) == len(found.operations)


def test_a_shipped_step_holds_what_its_ranks_divide():
    graph = open_step("gpt2")
    builder = StepBuilder()
    costs = replace(builder.costs(), time_ms=(1.0,) * len(graph.operations), scratch_bytes=(0,) * len(graph.operations))
    whole = simulate(StockPolicy().plan(graph, costs, None), costs)
    found, made = sharded_step(graph, costs, replace(LINK, ranks=8, bytes_per_ms=1e9))
    done = simulate(StockPolicy().plan(found, made, None), made)
    held = {
        role: sum(size for size, each in zip(graph.sizes, graph.storages, strict=True) if each.role is role)
        for role in Role
    }
    # Parameters are whole at the peak, which is in forward or backward; their parts are there, too.
    divided = sum(held[role] for role in (Role.GRADIENT, Role.OPTIMIZER_STATE))
    assert done.peak_bytes < whole.peak_bytes - divided * 0.5
    parameters = sum(each.role is Role.PARAMETER for each in graph.storages)
    assert len(found.collectives) == 2 * 50 < 2 * parameters, "GPT-2 has 49 matrices of more than 4 MiB"


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["a", "b", None]))), st.integers(0, 60))
def test_small_things_of_a_kind_are_together_in_order(drawn, most):
    things = [*enumerate(drawn)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "BUCKET_BYTES", most)
        found = buckets(things, lambda each: each[1][0], lambda each: each[1][1])
    assert sorted(each for bucket in found for each in bucket) == things
    assert found == sorted(found, key=lambda bucket: bucket[0][0]), "in the order in which they are first needed"
    most = min(most, sum(size for _, (size, _) in things) // 16)
    open_bytes = {}
    for bucket in found:
        assert bucket == sorted(bucket)
        kinds, size = {kind for _, (_, kind) in bucket}, sum(size for _, (size, _) in bucket)
        assert len(bucket) == 1 or (len(kinds) == 1 and None not in kinds and size <= most)
        if size <= most and None not in kinds:
            (kind,) = kinds
            assert kind not in open_bytes or open_bytes[kind] + bucket[0][1][0] > most, "the one before had room"
            open_bytes[kind] = size
