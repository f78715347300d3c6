"""What takes a compiler's time and was far behind elsewhere is left out, and nothing besides."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_benchmark import CountingBackend
from tests.test_problem import make_problem
from ucudnn.backends.base import Algorithm, Measurement, MeasurementStatus
from ucudnn.benchmark import Benchmark
from ucudnn.problem import DataType, Operation
from ucudnn.prospects import FAR, Prospects
from ucudnn.requests import Request

LIMIT = 1000


def wanted(channels=3, limit=LIMIT, whole=False, **options):
    problem = make_problem(batch=8, channels=channels, **{"groups": 1, **options})
    return Request(problem=problem, sizes=(1, 2, 4, 8), limit_bytes=limit, whole=whole)


def known_of(*ratios, limit=LIMIT, name="eng19_k2=1"):
    """Return what is known once an engine took so much in so many problems."""
    prospects = Prospects()
    for channels, ratio in enumerate(ratios, 1):
        prospects.add(wanted(channels, limit), name, ratio)
    return prospects


def test_two_problems_tell():
    assert Prospects().promises(wanted(), "eng19")
    assert known_of(90.0).promises(wanted(), "eng19")
    for name in ("eng19_k2=1", "eng19_k2=7_k3=0", "eng19+packed"):
        assert not known_of(90.0, FAR).promises(wanted(), name)
    for name in ("eng16", "eng1", "eng190"):
        assert known_of(90.0, FAR).promises(wanted(), name)
    assert known_of(90.0, FAR, FAR - 0.1).promises(wanted(), "eng19"), "it was near once"


def test_one_problem_counts_once_and_by_its_best_size():
    prospects = Prospects()
    for ratio in (90.0, 50.0, 4.0):
        prospects.add(wanted(), "eng19", ratio)
        assert prospects.promises(wanted(5), "eng19")
    prospects.add(wanted(4), "eng19", 9.0)
    assert not prospects.promises(wanted(5), "eng19")
    prospects.add(wanted(), "eng19", 2.0)
    assert prospects.promises(wanted(5), "eng19")


@given(st.floats(0.1, 200), st.floats(0.1, 200), st.integers(0, 2000), st.integers(0, 2000))
def test_what_is_far_behind_within_a_limit_may_be_needed_within_a_smaller_one(one, other, limit, asked):
    promises = known_of(one, other, limit=limit).promises(wanted(limit=asked), "eng19")
    assert promises == (asked < limit or min(one, other) < FAR)


@pytest.mark.parametrize(
    "options",
    [{"operation": Operation.BACKWARD_DATA}, {"dtype": DataType.FLOAT64}, {"dilation": (2, 2)}, {"whole": True}],
)
def test_other_kinds_are_tried_for_themselves(options):
    prospects = known_of(90.0, 90.0)
    assert not prospects.promises(wanted(), "eng19")
    assert prospects.promises(wanted(**options), "eng19")


def test_of_whole_desirable_sets_nothing_is_learned():
    prospects = Prospects()
    for channels in range(1, 5):
        prospects.add(wanted(channels, whole=True), "eng19", 90.0)
        prospects.add(replace(wanted(channels), apart=True), "eng19", 90.0)
    assert prospects.promises(wanted(), "eng19")


class Compiling(CountingBackend):
    """eng19 needs a compiler, and takes `slow` times as long as eng1 does."""

    def __init__(self, slow):
        super().__init__({})
        self.slow = slow
        self.ahead = []

    def prefetch(self, problems):
        self.ahead += problems

    def algorithms(self, problem):
        return (
            Algorithm(name="eng1", workspace_bytes=0, api="graph"),
            Algorithm(name="eng19_k2=1", workspace_bytes=0, api="graph", compiles=True),
        )

    def measure(self, size, algorithm, effort, worth_ms=inf, slabs=()):
        self.measured.append((self.problem, algorithm.name))
        time_ms = size * (self.slow(self.problem) if algorithm.compiles else 1.0)
        return Measurement(status=MeasurementStatus.MEASURED, samples_ms=(time_ms,) * 6)


@pytest.mark.parametrize(("slow", "exhaustive", "count"), [(9.0, False, 2), (9.0, True, 6), (1.5, False, 6)])
def test_what_is_hopeless_is_not_compiled_any_more(monkeypatch, slow, exhaustive, count):
    monkeypatch.setattr("ucudnn.benchmark.ComputeBackend", Compiling)
    backend = Compiling(lambda problem: slow)
    benchmark = Benchmark(backend, exhaustive=exhaustive)
    requests = [wanted(channels) for channels in range(1, 7)]
    benchmark.explore(requests)
    compiled = {problem for problem, name in backend.measured if name.startswith("eng19")}
    assert compiled == {each.problem for each in requests[:count]}
    assert {problem for problem, name in backend.measured if name == "eng1"} == {each.problem for each in requests}
    for each, ahead in zip(requests, backend.ahead, strict=True):
        assert (ahead.problem, ahead.sizes, ahead.limit_bytes) == (each.problem, each.sizes, LIMIT)
        assert ahead.promises("eng1_k2=1")
        assert ahead.promises("eng19_k2=1") == (count == 6), "threads are told what is known by then"


def test_what_alone_computes_a_problem_is_compiled(monkeypatch):
    monkeypatch.setattr("ucudnn.benchmark.ComputeBackend", Compiling)
    backend = Compiling(lambda problem: 9.0)
    benchmark = Benchmark(backend)
    benchmark.explore([wanted(channels) for channels in range(1, 4)])
    monkeypatch.setattr(Compiling, "algorithms", lambda self, problem: CompilingOnly)
    benchmark.explore([wanted(9)])
    assert (wanted(9).problem, "eng19_k2=1") in backend.measured


CompilingOnly = (Algorithm(name="eng19_k2=1", workspace_bytes=0, api="graph", compiles=True),)
