"""The state of an exploration: what is looked up once, what fits, and what is measured with it."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.counting_backend import CountingBackend
from tests.support.operands import QUICK
from tests.support.problems import make_problem
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.exploration.state import FAR, CompileFilter, State
from ucudnn.benchmarking.findings import Findings
from ucudnn.benchmarking.request import Request
from ucudnn.problem import DataType, Layout, MathMode, Operation
from ucudnn.profiles.measurement import Algorithm, Measurement, MeasurementStatus

PROBLEM = make_problem(batch=8)


class Stored:
    """Keeps measurements, and remembers what it was asked for."""

    def __init__(self, *items):
        self.items, self.asked, self.saved = items, [], []

    def load(self, parts):
        self.asked += parts
        return [item for item in self.items if item[0] in parts]

    def save(self, items):
        self.saved += items


class Backend(CountingBackend):
    """Counts the look-ups and the benches."""

    def __init__(self, workspaces):
        super().__init__(workspaces)
        self.looked_up, self.benches = [], 0

    def algorithm(self, problem, name):
        self.looked_up.append((problem.batch, name))
        return super().algorithm(problem, name)

    def bench(self, problem):
        self.benches += 1
        return super().bench(problem)


def explored(workspaces, storage=None):
    """Return the state of an exploration that has not begun."""
    return State(
        request=Request(problem=PROBLEM, sizes=(1, 2, 4, 8), limit_bytes=100),
        names=tuple(workspaces),
        offered=None,
        findings=Findings(Backend(workspaces), storage),
        effort=QUICK,
        compile_filter=CompileFilter(),
        exhaustive=False,
        progress=lambda done, total: None,
    )


def measure(state, size, name):
    return state.measure(size, state.algorithm(PROBLEM.part(size), name), QUICK, float("inf"))


def measured(name, workspace_bytes=0, time_ms=1.0):
    return Measurement.of(Algorithm(name=name, workspace_bytes=workspace_bytes, api="counting"), [time_ms])


def test_an_algorithm_is_looked_up_once_and_not_at_all_if_it_was_measured():
    state = explored({"SMALL": 1})
    for _ in range(2):
        assert state.algorithm(PROBLEM.part(2), "SMALL").workspace_bytes == 2
    state.findings.results.put(PROBLEM.part(4), measured("SMALL", 5))
    assert state.algorithm(PROBLEM.part(4), "SMALL").workspace_bytes == 5
    assert state.findings.backend.looked_up == [(2, "SMALL")]
    assert {name: each.workspace_bytes for name, each in state.known_algorithms(PROBLEM.part(2)).items()} == {
        "SMALL": 2
    }


def test_what_exceeds_the_limit_by_far_is_not_looked_up_at_larger_sizes():
    state = explored({"SMALL": 1, "LARGE": 60})
    assert [state.fitting(size, "SMALL") is not None for size in (1, 2, 4, 8)] == [True] * 4
    assert [state.fitting(size, "LARGE") is not None for size in (1, 2, 4, 8)] == [True, False, False, False]
    assert [size for size, name in state.findings.backend.looked_up if name == "LARGE"] == [1, 2]
    assert not state.fits(8, "LARGE")
    assert (8, "LARGE") in state.findings.backend.looked_up, "fits() asks whatever other sizes say"


def test_only_measurements_within_the_limit_are_micro_configurations():
    state = explored({"SMALL": 1, "LARGE": 60})
    state.add(4, measured("SMALL", 4, 2.0))
    state.add(4, measured("LARGE", 240, 1.0))
    assert list(state.micros) == [(4, "SMALL")]
    assert state.pruning.worth_ms(4, 4, True) == 2.0
    assert state.has_uncompiled()


def test_stored_measurements_are_asked_for_once_and_only_where_none_is_known():
    one, two, four = (PROBLEM.part(size) for size in (1, 2, 4))
    storage = Stored((one, measured("SMALL")))
    state = explored({"SMALL": 1}, storage=storage)
    state.findings.results.put(four, measured("SMALL"))
    for _ in range(2):
        state.load([one, two, four])
    assert storage.asked == [one, two]
    assert set(state.findings.results.of(one)) == {"SMALL"}


def test_a_bench_is_opened_by_the_first_measurement_and_saves_at_its_end_even_if_a_later_one_fails():
    storage = Stored()
    state = explored({"SMALL": 1, "BROKEN": 1}, storage=storage)
    with state:
        assert state.findings.backend.benches == 0
        for name in state.names:
            measure(state, 4, name)
        assert storage.saved == []
        state.findings.backend.measure = None
        with pytest.raises(TypeError):
            measure(state, 2, "SMALL")
    assert state.findings.backend.benches == 1
    assert state.measured == 2
    assert [(part, each.algorithm.name, each.measured) for part, each in storage.saved] == [
        (PROBLEM.part(4), "SMALL", True),
        (PROBLEM.part(4), "BROKEN", False),
    ]
    assert {*state.findings.results.of(PROBLEM.part(4))} == {"SMALL", "BROKEN"}


@pytest.mark.parametrize(("reason", "too_large"), [("MemoryError: no room", 40), ("CudnnError: 5000", float("inf"))])
def test_a_hindered_measurement_is_not_saved_and_memory_sets_the_room(reason, too_large):
    storage = Stored()
    state = explored({"SMALL": 10}, storage=storage)
    state.findings.backend.measure = lambda size, algorithm, *rest: Measurement.failed(
        algorithm, reason, MeasurementStatus.HINDERED
    )
    with state:
        measure(state, 4, "SMALL")
    assert storage.saved == []
    assert state.hindered
    assert state.too_large_bytes == too_large


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
