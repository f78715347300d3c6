"""Tests of heuristic mode: it chooses a configuration, checks it, and loses little time on a recorded GPU."""

from dataclasses import replace
from math import exp, log
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.counting_backend import CountingBackend
from tests.support.faulty_backend import FaultyBackend
from tests.support.plan_time import time_ms
from tests.support.problems import DENSE, make_problem, problems
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import request_of
from ucudnn.benchmarking.unmeasured.heuristic_mode import MOST_APART, HeuristicPlanner, NearbyPlans
from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.errors import InfeasibleError, MeasurementError
from ucudnn.kernel import Kernel
from ucudnn.planning.choices import Origin
from ucudnn.planning.decision import decide
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import MathMode, Operation
from ucudnn.settings import Settings

MIB = 1 << 20


def chosen(backend, limit, problem=None, checks=True, **settings):
    """Return what the rule takes of a backend within a limit, as text."""
    wanted = make_problem(batch=8) if problem is None else problem
    request = request_of(wanted, Settings(workspace_limit_bytes=limit, **settings), limit)
    found = HeuristicPlanner(backend, lambda _: (), checks=checks).configuration(request)
    return None if found is None else str(found)


def large(channels=256, side=256, **fields):
    sizes = {"channels": channels, "filters": channels, "spatial": (side, side), "kernel": (3, 3), "groups": 1}
    return make_problem(batch=8, **sizes, **fields)


MANY = {f"NO{index}": 99 for index in range(9)}


# Workspaces are bytes for each sample, in the order of the heuristics.
@pytest.mark.parametrize(
    ("workspaces", "limit", "batch", "expected"),
    [
        ({"FIRST": 10, "SECOND": 0}, 80, 8, "1x8 FIRST"),
        ({"FIRST": 10, "SECOND": 0}, 79, 8, "1x8 SECOND"),  # a second part costs more than a later algorithm
        ({"FIRST": 10, **MANY, "LAST": 0}, 79, 8, "1x8 LAST"),  # nor of a small kernel
        ({"FIRST": 10}, 10, 4, "4x1 FIRST"),
        ({"FIRST": 10}, 20, 7, "3x2 FIRST + 1x1 FIRST"),
        ({"FIRST": 10}, 9, 8, None),
    ],
)
def test_what_the_rule_takes(workspaces, limit, batch, expected):
    assert chosen(CountingBackend(workspaces), limit, make_problem(batch=batch)) == expected


def test_a_large_kernel_is_divided_rather_than_computed_by_a_much_later_algorithm():
    assert chosen(CountingBackend({"FIRST": 10, **MANY, "LAST": 0}), 79, large()) == "2x4 FIRST"
    assert chosen(CountingBackend({"FIRST": 10, "LAST": 0}), 79, large(math=MathMode.FMA)) == "1x8 LAST"


class TensorCores(CountingBackend):
    """Has algorithms with tensor cores, and others without."""

    fast = frozenset({"FAST"})

    def algorithms(self, problem):
        found = super().algorithms(problem)
        return tuple(replace(each, notes=("TENSOR_CORE",)) if each.name in self.fast else each for each in found)


@pytest.mark.parametrize(("channels", "expected"), [(256, "8x1 FAST"), (8, "1x8 PLAIN")])
@pytest.mark.parametrize("first", [{}, {"NO": 1000, "NEITHER": 1000}])
@pytest.mark.parametrize("checks", [False, True])
def test_tensor_cores_are_worth_micro_batches_of_large_kernels(channels, expected, first, checks):
    backend = TensorCores({**first, "PLAIN": 0, "FAST": 64})
    assert chosen(backend, 64, large(channels), checks, slabs=False) == expected


@pytest.mark.parametrize(("side", "expected"), [(256, "8x1 FIRST"), (16, "1x8 LAST")])
def test_divisions_by_the_first_algorithms_are_no_answer_where_a_plain_one_is_assumed_to_be_faster(side, expected):
    backend = TensorCores({"FIRST": 64, **dict.fromkeys(MANY, 1000), "LAST": 0})
    backend.fast = {"FIRST"}
    assert chosen(backend, 64, large(side=side), checks=False, slabs=False) == expected


@pytest.mark.parametrize(
    ("channels", "rows", "expected"),
    [
        (256, 128, "8x1 [2x127 rows FAST]"),
        (256, 64, "8x1 [3x64 rows FAST + 1x62 rows FAST]"),  # in two slabs, only PLAIN fits
        (8, 128, "1x8 PLAIN"),
    ],
)
def test_slabs_with_tensor_cores_are_taken_where_no_sample_fits(channels, rows, expected):
    class Halved(TensorCores):
        def algorithms(self, problem):
            found = super().algorithms(problem)
            return tuple(replace(each, workspace_bytes=each.workspace_bytes * problem.output[0]) for each in found)

    backend = Halved({"NO": 1000, "NEITHER": 1000, "PLAIN": 0, "FAST": 64})
    assert chosen(backend, 64 * rows, large(channels)) == expected


def test_only_what_it_takes_is_run_and_a_broken_algorithm_is_left_out():
    backend = CountingBackend({"BROKEN": 0, "RIGHT": 0, "LATER": 0})
    assert chosen(backend, 0) == "1x8 RIGHT"
    assert [name for _, name in backend.measured] == ["BROKEN", "RIGHT"]


def test_only_the_first_algorithms_are_looked_at_where_one_fits(monkeypatch):
    backend, asked = CountingBackend({"FIRST": 10, "SECOND": 9, "THIRD": 0}), []
    leading = backend.leading
    monkeypatch.setattr(backend, "leading", lambda *each: asked.append(each[1]) or leading(*each))
    rule = Benchmark(backend).rule
    request = request_of(make_problem(batch=8), Settings(), 79)
    with monkeypatch.context() as patched:
        patched.setattr(rule, "_names", None)
        assert str(rule.configuration(request)) == "1x8 SECOND"
        assert str(rule.configuration(replace(request, limit_bytes=80))) == "1x8 FIRST"
    assert asked == [2, 2]
    assert str(rule.configuration(request, failed=["SECOND"])) == "1x8 THIRD"
    assert asked[-1] == 3, "one of them has failed"


def test_the_policy_undivided_divides_nothing():
    assert chosen(CountingBackend({"FIRST": 10, "LAST": 0}), 79, policy=BatchSizePolicy.UNDIVIDED) == "1x8 LAST"
    assert chosen(CountingBackend({"FIRST": 10}), 79, policy=BatchSizePolicy.UNDIVIDED) is None


def test_too_little_memory_to_check_is_an_error_and_not_another_plan():
    backend = FaultyBackend()
    backend.unmeasurable = 8
    with pytest.raises(MeasurementError, match="too little memory to check the plan"):
        chosen(backend, MIB)


@given(problems(), st.sampled_from(BatchSizePolicy), st.integers(0, 16))
def test_choices_fit_the_limit_and_are_the_same_again(problem, policy, power):
    limit = (1 << power) - 1
    settings = Settings(policy=policy, workspace_limit_bytes=limit)
    request = request_of(replace(problem, deterministic=True), settings, limit)
    found = Benchmark(CpuBackend()).rule.configuration(request)
    assert found is not None  # IMPLICIT_GEMM needs nothing
    assert found.size == problem.batch
    assert found.workspace_bytes <= limit
    assert {part.size for part in found.parts} <= {*request.sizes}
    assert Benchmark(CpuBackend()).rule.configuration(request) == found


def test_a_plan_is_taken_without_a_measurement_and_says_so():
    backend = CountingBackend({"A": 10, "B": 5})
    problems = [make_problem(deterministic=True), make_problem()]
    settings = Settings(workspace_limit_bytes=40)
    kernels = [Kernel(layer="", problem=each) for each in problems]
    ruled, measured = decide(kernels, Benchmark(backend), settings).kernels
    assert (ruled.origin, ruled.timed, measured.origin, measured.timed) == (Origin.RULE, False, Origin.MEASURED, True)
    assert [problem.deterministic for problem, _ in backend.measured].count(True) == 1  # the check


def test_shares_of_a_total_are_equal_and_do_not_depend_on_others_times():
    kernels = [
        Kernel(layer=name, problem=make_problem(deterministic=True, operation=operation))
        for name, operation in zip("abc", Operation, strict=True)
    ]
    settings = Settings(total_workspace_bytes=239)
    decisions = decide(kernels, Benchmark(CountingBackend({"A": 10})), settings)
    assert [str(each.configuration) for each in decisions.kernels] == ["2x4 A"] * 3  # 79 bytes for each
    assert [each.workspace_bytes for each in decisions.kernels] == [40] * 3
    segments = sorted((each.segment.offset_bytes, each.segment.size_bytes) for each in decisions.kernels)
    assert segments == [(0, 40), (40, 40), (80, 40)]
    with pytest.raises(InfeasibleError):
        decide(kernels, Benchmark(CountingBackend({"A": 10})), replace(settings, total_workspace_bytes=29))


def test_a_kernel_that_needs_more_than_its_share_gets_it():
    small, large = make_problem(deterministic=True), make_problem(deterministic=True, filters=8)

    class Uneven(CountingBackend):
        def algorithms(self, problem):
            found = super().algorithms(problem)
            return tuple(replace(each, workspace_bytes=each.workspace_bytes * problem.filters) for each in found)

    kernels = [Kernel(layer=str(each.filters), problem=each) for each in (small, large)]
    settings = Settings(total_workspace_bytes=12 * 10)  # 60 for each, but the larger one needs 80
    decisions = decide(kernels, Benchmark(Uneven({"A": 10})), settings)
    assert [each.workspace_bytes for each in decisions.kernels] == [40, 80]


def recorded_problems(profile):
    """Yield the problems of a profile at their largest mini-batch, with the recording, that the graph API computes."""
    for name, recording in profile.recordings.items():
        largest = {}
        for problem, records in recording.items():
            if any(each.algorithm.api == "graph" for each in records):
                shape = problem.with_batch(1)
                largest[shape] = max(largest.get(shape, 0), problem.batch)
        yield from ((name, shape.with_batch(batch)) for shape, batch in largest.items())


@pytest.mark.parametrize(("limit", "ruled", "plain"), [(8 * MIB, 1.150, 1.324), (64 * MIB, 1.090, 1.433)])
def test_what_the_rule_costs_on_a_recorded_gpu(h200, replay, limit, ruled, plain):
    """The geometric mean of times over the best ones, by the rule and by the first algorithm that fits undivided."""
    by_rule, by_order = [], []
    for name, problem in recorded_problems(h200):
        backend, settings = replay(name), Settings(workspace_limit_bytes=limit, slabs=False)
        benchmark = Benchmark(backend)
        best = time_ms(decide([Kernel(layer="", problem=problem)], benchmark, settings))
        parts = benchmark.rule.configuration(request_of(problem, settings, limit)).parts
        times = [backend.measurement(problem.part(each.size), each.algorithm).time_ms for each in parts]
        by_rule.append(sum(times) / best)
        fitting = [each.name for each in backend.algorithms(problem) if each.workspace_bytes <= limit]
        by_order += [backend.measurement(problem, name).time_ms / best for name in fitting[:1]]
    assert len(by_rule) == len(by_order) > 50
    assert (exp(mean(map(log, by_rule))), exp(mean(map(log, by_order)))) == pytest.approx((ruled, plain), abs=0.005)


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
