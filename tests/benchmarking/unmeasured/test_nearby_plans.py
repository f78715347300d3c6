"""Plans of nearby sizes: which one serves, and that heuristic plans ask no heuristics where one does."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.counting_backend import CountingBackend
from tests.support.problems import DENSE, make_problem, problems
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import request_of
from ucudnn.benchmarking.unmeasured.heuristic_mode import MOST_APART, NearbyPlans
from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.policy import BatchSizePolicy
from ucudnn.settings import Settings


def plan(name, *sizes):
    parts = (MicroConfiguration(size=size, algorithm=name, time_ms=1.0, workspace_bytes=0) for size in sizes)
    return Configuration(parts=tuple(parts))


def sized(side, **changes):
    return make_problem(batch=8, spatial=(side, side), groups=1, **changes)


def quick(backend):
    """Return a benchmark that plans at once."""
    benchmark = Benchmark(backend)
    benchmark.plan_at_once()
    return benchmark


def asked(problem, limit, policy=BatchSizePolicy.POWER_OF_TWO):
    return request_of(problem, Settings(policy=policy, workspace_limit_bytes=limit), limit)


def test_the_nearest_size_within_a_limit_serves():
    plans = NearbyPlans()
    for side in (16, 24, 40):
        plans.learn(sized(side), 99, plan(f"AT_{side}", 8))
    plans.learn(sized(26), 99, plan("AT_24", 8))
    assert [*map(str, plans.nearest(sized(22), 99))] == ["1x8 AT_24", "1x8 AT_16"]
    assert [*map(str, plans.nearest(sized(20), 99))] == ["1x8 AT_24", "1x8 AT_16"]
    assert [*map(str, plans.nearest(sized(34), 99))] == ["1x8 AT_40", "1x8 AT_24"]
    assert plans.nearest(sized(38, channels=12), 99) == []
    assert plans.nearest(sized(int(40 * MOST_APART**0.5) + 1), 99) == []
    assert plans.nearest(sized(int(40 * MOST_APART**0.5)), 99) != []


@pytest.mark.parametrize(
    ("side", "limit", "serves"),
    [
        (16, 1000, True),
        (16, 1, True),  # who asks looks whether it fits
        (16, 1300, False),  # memory was short when the plan was made
        (20, 1563, True),  # as much for each point
        (20, 1900, True),  # spare memory is rounded
        (20, 2100, False),
        (12, 562, True),
        (12, 1000, True),  # the stated limit
        (12, 1001, False),
    ],
)
def test_limits_that_grow_with_the_images_are_alike(side, limit, serves):
    plans = NearbyPlans()
    plans.learn(sized(16), 1000, plan("A", 8))
    assert bool(plans.nearest(sized(side), limit)) == serves


def test_a_size_that_was_planned_within_two_limits_serves_with_either():
    plans = NearbyPlans()
    plans.learn(sized(16), 1000, plan("SMALL", 8))
    plans.learn(sized(16), 4000, plan("LARGE", 8))
    assert {*map(str, plans.nearest(sized(17), 4000))} == {"1x8 LARGE"}
    assert {*map(str, plans.nearest(sized(17), 1000))} == {"1x8 SMALL", "1x8 LARGE"}


def test_a_new_size_asks_nothing_where_a_nearby_plan_fits(monkeypatch):
    backend = CountingBackend({"FIRST": 10, "SECOND": 9})
    rule = quick(backend).rule
    assert str(rule.configuration(asked(sized(16), 39))) == "2x4 SECOND"
    monkeypatch.setattr(backend, "names", None)
    assert str(rule.configuration(asked(sized(18), 39))) == "2x4 SECOND"
    assert str(rule.configuration(asked(sized(17), 38))) == "2x4 SECOND", "it has less, and that is enough"
    for limit in (35, 72):  # it does not fit, or was made while memory was short
        with pytest.raises(TypeError):
            rule.configuration(asked(sized(18), limit))
    with pytest.raises(TypeError):
        rule.configuration(asked(replace(sized(18), deterministic=True), 39))


def test_a_nearby_plan_that_does_not_fit_or_has_failed_does_not_serve():
    backend = CountingBackend({"FIRST": 10, "SECOND": 9})
    benchmark = quick(backend)
    rule = benchmark.rule
    rule.learn(sized(16), 39, plan("FIRST", 4, 4))
    assert str(rule.configuration(asked(sized(18), 39))) == "2x4 SECOND", "40 bytes are too many"
    rule.learn(sized(16), 72, plan("SECOND", 4, 4))
    assert str(rule.configuration(asked(sized(17), 72))) == "2x4 SECOND"
    assert str(rule.configuration(asked(sized(17), 72, BatchSizePolicy.UNDIVIDED))) == "1x8 SECOND"
    assert rule.configuration(asked(sized(17), 72), failed=["FIRST", "SECOND"]) is None
    benchmark.discard(sized(18), "SECOND")
    assert str(rule.configuration(asked(sized(18), 72))) == "2x4 FIRST"


@given(problems(), st.integers(1, 6), st.sampled_from(BatchSizePolicy), st.integers(0, 16))
def test_what_serves_computes_the_other_size_within_the_limit(problem, more, policy, power):
    other = replace(problem, spatial=tuple(each + more for each in problem.spatial), **DENSE)
    benchmark, limit = quick(CpuBackend()), (1 << power) - 1
    for each in (problem, other):
        request = asked(each, limit, policy)
        found = benchmark.rule.configuration(request)
        assert found is not None  # IMPLICIT_GEMM needs nothing
        assert found.size == each.batch
        assert {part.size for part in found.parts} <= {*request.sizes}
        for part in found.parts:
            algorithm = benchmark.backend.algorithm(each.part(part.size), part.algorithm)
            assert algorithm.workspace_bytes == part.workspace_bytes <= limit
