"""Engines that were far behind in other problems are not compiled, and all others are."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.counting_backend import CountingBackend
from tests.support.problems import make_problem
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.exploration.state import FAR, CompileFilter
from ucudnn.benchmarking.request import Request
from ucudnn.problem import DataType, Layout, MathMode, Operation
from ucudnn.profiles.measurement import Algorithm, Measurement

LIMIT = 1000


def wanted(channels=3, limit=LIMIT, whole=False, **options):
    problem = make_problem(batch=8, channels=channels, **{"groups": 1, **options})
    return Request(problem=problem, sizes=(1, 2, 4, 8), limit_bytes=limit, whole=whole)


def known_of(*ratios, limit=LIMIT, name="eng19_k2=1"):
    """Return a filter that learned these ratios of an engine, each from another problem."""
    known = CompileFilter()
    for channels, ratio in enumerate(ratios, 1):
        known.add(wanted(channels, limit), name, ratio)
    return known


def test_two_problems_are_enough_to_leave_out_an_engine():
    assert CompileFilter().admits(wanted(), "eng19")
    assert known_of(90.0).admits(wanted(), "eng19")
    for name in ("eng19_k2=1", "eng19_k2=7_k3=0", "eng19+packed"):
        assert not known_of(90.0, FAR).admits(wanted(), name)
    for name in ("eng16", "eng1", "eng190"):
        assert known_of(90.0, FAR).admits(wanted(), name)
    assert known_of(90.0, FAR, FAR - 0.1).admits(wanted(), "eng19"), "it was near once"


def test_each_problem_counts_once_with_its_best_size():
    known = CompileFilter()
    for ratio in (90.0, 50.0, 4.0):
        known.add(wanted(), "eng19", ratio)
        assert known.admits(wanted(5), "eng19")
    known.add(wanted(4), "eng19", 9.0)
    assert not known.admits(wanted(5), "eng19")
    known.add(wanted(), "eng19", 2.0)
    assert known.admits(wanted(5), "eng19")


@given(st.floats(0.1, 200), st.floats(0.1, 200), st.integers(0, 2000), st.integers(0, 2000))
def test_an_engine_that_is_far_behind_may_be_needed_within_a_smaller_limit(one, other, limit, asked):
    admits = known_of(one, other, limit=limit).admits(wanted(limit=asked), "eng19")
    assert admits == (asked < limit or min(one, other) < FAR)


OTHERS = [
    {"operation": Operation.BACKWARD_DATA},
    {"dtype": DataType.FLOAT64},
    {"math": MathMode.FMA},
    {"layout": Layout.NHWC},
    {"deterministic": True},
    {"alignment": 4},
    {"spatial": (9,), "kernel": (3,)},
    {"channels": 8, "groups": 2},
    {"channels": 8, "filters": 8, "groups": 8},
    {"dilation": (2, 2)},
    {"padding": (0, 0), "post_padding": (1, 0)},
    {"x_channel_stride": 100},
    {"y_channel_stride": 100},
    {"whole": True},
]


@pytest.mark.parametrize("options", OTHERS, ids=lambda each: "-".join(each))
def test_other_kinds_of_problems_have_to_learn_by_themselves(options):
    known = known_of(90.0, 90.0)
    assert not known.admits(wanted(7), "eng19")
    assert known.admits(wanted(**options), "eng19")


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        ({"operation": Operation.BACKWARD_FILTER, "dtype": DataType.FLOAT16}, {"float32_sum": True}),
        ({"groups": 2, "filters": 8}, {"channels": 8, "groups": 8}),
    ],
    ids=["float32 sum", "depthwise"],
)
def test_a_kind_within_a_kind_learns_by_itself(kind, other):
    known = CompileFilter()
    for channels in (4, 8):
        known.add(wanted(channels, **kind), "eng19", 90.0)
    assert not known.admits(wanted(6, **kind), "eng19")
    assert known.admits(wanted(**{"channels": 6, **kind, **other}), "eng19+float32")


def test_whole_desirable_sets_teach_nothing():
    known = CompileFilter()
    for channels in range(1, 5):
        known.add(wanted(channels, whole=True), "eng19", 90.0)
        known.add(replace(wanted(channels), apart=True), "eng19", 90.0)
    assert known.admits(wanted(), "eng19")


class Compiling(CountingBackend):
    """eng19 has to be compiled. `rates` and `needs` give the time and the workspace of a sample for each problem."""

    def __init__(self):
        super().__init__({})
        self.rates = {"eng1": lambda problem: 1.0, SLOW: lambda problem: 9.0}
        self.needs = dict.fromkeys(self.rates, lambda problem: 0)
        self.compiled = {SLOW}
        self.ahead = []

    def prefetch(self, problems):
        self.ahead += problems

    def algorithms(self, problem):
        return tuple(
            Algorithm(
                name=name,
                workspace_bytes=need(problem) * problem.batch,
                api="graph",
                compiles=name in self.compiled,
            )
            for name, need in self.needs.items()
        )

    def measure(self, size, algorithm, effort, worth_ms=inf, slabs=()):
        self.measured.append((self.problem, algorithm.name))
        time_ms = size * self.rates[algorithm.name](self.problem)
        return Measurement.of(algorithm, (time_ms,) * 6)

    def tried(self, name):
        """Return the channels of the problems in which an algorithm was measured."""
        return {problem.channels for problem, each in self.measured if each == name}


SLOW = "eng19_k2=1"


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setattr("ucudnn.benchmarking.benchmark.ComputeBackend", Compiling)
    return Compiling()


@pytest.mark.parametrize(
    ("slow", "exhaustive", "compiles", "count"),
    [(9.0, False, True, 2), (9.0, True, True, 6), (1.5, False, True, 6), (9.0, False, False, 6)],
)
def test_a_hopeless_engine_is_no_longer_compiled(backend, slow, exhaustive, compiles, count):
    backend.rates[SLOW] = lambda problem: slow
    backend.compiled = {SLOW} if compiles else set()
    benchmark = Benchmark(backend, exhaustive=exhaustive)
    requests = [wanted(channels) for channels in range(1, 7)]
    benchmark.explore(requests)
    assert backend.tried(SLOW) == {*range(1, count + 1)}
    assert backend.tried("eng1") == {*range(1, 7)}
    for each, ahead in zip(requests, backend.ahead, strict=True):
        assert (ahead.problem, ahead.sizes, ahead.limit_bytes) == (each.problem, each.sizes, LIMIT)
        assert ahead.promises("eng1_k2=1")
        assert ahead.promises(SLOW) == (count == 6), "threads ask when they are about to compile"


def test_the_first_measurement_is_compared_with_nothing(backend):
    backend.needs["eng1"] = lambda problem: 0 if problem.channels > 1 else 2 * LIMIT
    benchmark = Benchmark(backend)
    benchmark.explore([wanted(channels) for channels in range(1, 7)])
    assert backend.tried(SLOW) == {1, 2, 3}


@pytest.mark.parametrize("failing", [False, True])
def test_an_engine_is_compiled_if_nothing_else_computes_the_problem(backend, failing):
    last = wanted(9).problem
    if failing:
        measure = backend.measure

        def broken(size, algorithm, *rest, **options):
            if backend.problem == last and algorithm.name == "eng1":
                return Measurement.failed(algorithm, "it is off")
            return measure(size, algorithm, *rest, **options)

        backend.measure = broken
    else:
        backend.needs["eng1"] = lambda problem: 2 * LIMIT if problem.channels == 9 else 0
    benchmark = Benchmark(backend)
    benchmark.explore([wanted(channels) for channels in (1, 2, 3)])
    assert backend.tried(SLOW) == {1, 2}
    found = benchmark.micro_configurations(wanted(9))
    assert {(each.algorithm, each.size) for each in found if each.algorithm == SLOW} >= {(SLOW, 8)}


def test_a_known_measurement_counts_even_if_the_engine_would_not_be_compiled(backend):
    backend.rates[SLOW] = lambda problem: 9.0 if problem.channels < 9 else 0.5
    benchmark = Benchmark(backend)
    benchmark.explore([wanted(9, whole=True), *(wanted(channels) for channels in (1, 2, 3))])
    assert backend.tried(SLOW) == {1, 2, 9}
    assert (SLOW, 4.0) in {(each.algorithm, each.time_ms) for each in benchmark.micro_configurations(wanted(9))}


def test_an_engine_that_the_limit_holds_back_is_not_hopeless(backend):
    backend.needs[SLOW] = lambda problem: LIMIT  # it fits at one sample only
    Benchmark(backend).explore([wanted(channels) for channels in range(1, 5)])
    assert backend.tried(SLOW) == {1, 2, 3, 4}
    backend.measured.clear()
    Benchmark(backend).explore([wanted(channels, limit=8 * LIMIT) for channels in range(1, 5)])
    assert backend.tried(SLOW) == {1, 2}
