"""The benchmark's bookkeeping, on a backend whose answers are known; what backends measure is tested with them."""

import logging
from contextlib import contextmanager

import pytest

from tests.test_problem import make_problem
from ucudnn.backends.base import Algorithm, Backend, Bench, Measurement, MeasurementStatus
from ucudnn.benchmark import Benchmark
from ucudnn.problem import Operation


class CountingBackend(Backend, Bench):
    """Counts what is measured; BROKEN fails, the others take size + index milliseconds."""

    name = "counting"

    def __init__(self, workspaces):
        self.workspaces = workspaces
        self.measured = []
        self.problem = None

    def conditions(self):
        return {"device": "none"}

    def algorithms(self, problem):
        return tuple(
            Algorithm(name=name, workspace_bytes=size * problem.batch) for name, size in self.workspaces.items()
        )

    @contextmanager
    def bench(self, problem):
        self.problem = problem
        yield self

    def measure(self, size, algorithm, effort):
        self.measured.append((self.problem.with_batch(size), algorithm.name))
        if algorithm.name == "BROKEN":
            return Measurement(status=MeasurementStatus.FAILED, reason="it is broken")
        return Measurement(status=MeasurementStatus.MEASURED, samples_ms=(1.0, size + 1.0, 1e9))


@pytest.fixture
def backend():
    return CountingBackend({"SMALL": 0, "LARGE": 100, "BROKEN": 1})


def test_measures_every_size_and_algorithm_within_the_limit(backend):
    found = Benchmark(backend).micro_configurations(make_problem(), (1, 4, 8), 400)
    assert {(each.size, each.algorithm, each.time_ms, each.workspace_bytes) for each in found} == {
        (1, "SMALL", 2.0, 0),
        (4, "SMALL", 5.0, 0),
        (8, "SMALL", 9.0, 0),
        (1, "LARGE", 2.0, 100),
        (4, "LARGE", 5.0, 400),
    }


def test_measures_nothing_twice(backend):
    benchmark = Benchmark(backend)
    first = benchmark.micro_configurations(make_problem(), (1, 4, 8), 400)
    count = len(backend.measured)
    assert benchmark.micro_configurations(make_problem(), (1, 4, 8), 400) == first
    assert len(backend.measured) == count
    # A larger mini-batch of the same shape shares its micro-batches; a larger limit adds what did not fit.
    benchmark.micro_configurations(make_problem(batch=16), (1, 4, 8), 400)
    assert len(backend.measured) == count
    benchmark.micro_configurations(make_problem(), (1, 4, 8), 800)
    assert backend.measured[count:] == [(make_problem(), "LARGE")]
    benchmark.micro_configurations(make_problem(operation=Operation.BACKWARD_DATA), (8,), 0)
    assert len(backend.measured) == count + 2


def test_a_failed_algorithm_is_logged_and_left_out(backend, caplog):
    caplog.set_level(logging.INFO)
    found = Benchmark(backend).micro_configurations(make_problem(), (8,), 1000)
    assert {each.algorithm for each in found} == {"SMALL", "LARGE"}
    assert "BROKEN at micro-batch 8 of Forward 8x6x9x10" in caplog.text
    assert "it is broken" in caplog.text


def test_tells_how_far_it_is(backend):
    told = []
    Benchmark(backend, listener=told.append).micro_configurations(make_problem(), (4, 8), 1000)
    assert [each.done for each in told] == list(range(7))
    assert {each.total for each in told} == {6}


def test_least_workspace_is_that_of_the_smallest_configuration():
    benchmark = Benchmark(CountingBackend({"A": 100, "B": 70}))
    assert benchmark.least_workspace(make_problem(batch=12), (4, 8, 12)) == 280
    assert benchmark.least_workspace(make_problem(batch=12), (8, 12)) == 840  # eights alone do not make twelve
    assert benchmark.least_workspace(make_problem(batch=12), (8,)) is None
