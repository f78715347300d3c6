"""What a benchmark measures and remembers, on backends whose times are known."""

import logging
from dataclasses import replace

import pytest

from tests.support.counting_backend import CountingBackend
from tests.support.problems import make_problem
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.exploration.explorer import Round
from ucudnn.benchmarking.request import Request
from ucudnn.errors import UnsupportedProblemError
from ucudnn.problem import Operation
from ucudnn.profiles.measurement import Measurement
from ucudnn.solvers.desirable import desirable_set


def request(problem, sizes, limit, **options):
    return Request(problem=problem, sizes=sizes, limit_bytes=limit, **options)


TIMES = {"SLOW": (5.0, 5.0), "FAST": (0.5, 1.0), "LARGE": (0.5, 0.2)}  # so that the bounds hold exactly
WORKSPACES = {"SLOW": 0, "FAST": 10, "LARGE": 100}


class LinearBackend(CountingBackend):
    """Algorithms whose time has a constant part and a part for each sample; some sizes are not supported."""

    def __init__(self):
        super().__init__({**WORKSPACES, "BROKEN": 1}, TIMES)
        self.unsupported = ()

    def algorithms(self, problem):
        if problem.batch in self.unsupported:
            raise UnsupportedProblemError(f"not at {problem.batch}")
        return super().algorithms(problem)


@pytest.fixture
def bounds(monkeypatch):
    """Let backends count as ones that compute, so that bounds are used."""
    monkeypatch.setattr("ucudnn.benchmarking.benchmark.ComputeBackend", CountingBackend)


@pytest.fixture
def computing(bounds):
    return LinearBackend()


@pytest.fixture
def backend():
    return CountingBackend({"SMALL": 0, "LARGE": 100, "BROKEN": 1})


def test_measures_every_size_and_algorithm_within_the_limit(backend):
    found = Benchmark(backend).micro_configurations(request(make_problem(), (1, 4, 8), 400))
    assert {(each.size, each.algorithm, each.time_ms, each.workspace_bytes) for each in found} == {
        (1, "SMALL", 2.0, 0),
        (4, "SMALL", 5.0, 0),
        (8, "SMALL", 9.0, 0),
        (1, "LARGE", 2.0, 100),
        (4, "LARGE", 5.0, 400),
    }


def test_measures_nothing_twice(backend):
    benchmark = Benchmark(backend)
    first = benchmark.micro_configurations(request(make_problem(), (1, 4, 8), 400))
    count = len(backend.measured)
    assert benchmark.micro_configurations(request(make_problem(), (1, 4, 8), 400)) == first
    assert len(backend.measured) == count
    # A larger mini-batch of the same shape shares its micro-batches; a larger limit adds what did not fit.
    benchmark.micro_configurations(request(make_problem(batch=16), (1, 4, 8), 400))
    assert len(backend.measured) == count
    benchmark.micro_configurations(request(make_problem(), (1, 4, 8), 800))
    assert backend.measured[count:] == [(make_problem(), "LARGE")]
    benchmark.micro_configurations(request(make_problem(operation=Operation.BACKWARD_DATA), (8,), 0))
    assert len(backend.measured) == count + 2


class AskingBackend(CountingBackend):
    """Asks in each measurement for the next one."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.following = None
        self.told = []

    def look_ahead(self, following):
        assert self.following is None, "it is asked once for each measurement"
        self.following = following

    def measure(self, size, algorithm, effort, worth_ms=float("inf"), slabs=()):
        found, self.following = self.following(), None
        self.told.append(found and (self.problem.with_batch(found[0]), found[1].name))
        return super().measure(size, algorithm, effort, worth_ms, slabs)


@pytest.mark.usefixtures("bounds")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("sizes", [(1, 2, 4, 8), (1, 2, 4, 5, 8), tuple(range(1, 9))])
def test_looking_ahead_changes_no_measurement_and_no_plan(sizes, whole):
    wanted = request(make_problem(batch=8), sizes, 4000, whole=whole)
    found = []
    for asks in (True, False):
        backend = AskingBackend(WORKSPACES, TIMES)
        if not asks:
            backend.look_ahead = lambda following, backend=backend: setattr(backend, "following", lambda: None)
        micros = Benchmark(backend).micro_configurations(wanted)
        found.append((backend.measured, desirable_set(micros, 8)[-1].time_ms))
        assert asks == any(each is not None for each in backend.told)
    assert whole or len(found[0][0]) < len(sizes) * 3, "bounds are used"
    assert found[0] == found[1]


def test_an_error_in_the_look_ahead_does_not_spoil_the_present_measurement():
    class Breaking(AskingBackend):
        def algorithm(self, problem, name):
            if name == "OTHER" and problem.batch == 4:
                raise RuntimeError("it cannot be asked for")
            return super().algorithm(problem, name)

    backend = Breaking({"SMALL": 0, "LARGE": 100, "OTHER": 80})
    benchmark = Benchmark(backend)
    wanted = request(make_problem(), (1, 4, 8), 1000)
    with pytest.raises(RuntimeError, match="it cannot be asked for"):
        benchmark.micro_configurations(wanted)
    assert backend.told[-1] is None
    known = {(micro.size, micro.algorithm) for micro in benchmark.known_micro_configurations(wanted)}
    assert known == {(part.batch, name) for part, name in backend.measured}
    assert known


@pytest.mark.parametrize("limit_bytes", [0, 400, 1000])
def test_the_next_measurement_is_known_in_advance(limit_bytes):
    backend = AskingBackend({"SMALL": 0, "LARGE": 100, "OTHER": 80})
    Benchmark(backend).micro_configurations(request(make_problem(), (1, 4, 8), limit_bytes))
    plain = CountingBackend({"SMALL": 0, "LARGE": 100, "OTHER": 80})
    Benchmark(plain).micro_configurations(request(make_problem(), (1, 4, 8), limit_bytes))
    assert backend.measured == plain.measured
    assert backend.told == [*backend.measured[1:], None]


class CompilingBackend(LinearBackend):
    """One of its algorithms needs a compiler."""

    def __init__(self):
        super().__init__()
        self.announced = []

    def algorithms(self, problem):
        return tuple(replace(each, compiles=each.name == "FAST") for each in super().algorithms(problem))

    def announce(self, size, algorithm):
        part = self.problem.with_batch(size)
        assert (part, algorithm.name) not in self.measured, "it comes too late"
        assert part in {each for each, _ in self.measured}, "it comes before anything is known"
        self.announced.append((part, algorithm.name))


@pytest.mark.usefixtures("bounds")
def test_a_compiler_begins_while_other_algorithms_are_measured():
    backend = CompilingBackend()
    Benchmark(backend).micro_configurations(request(make_problem(batch=16), (1, 2, 4, 8, 16), 100))
    compiled = [each for each in backend.measured if each[1] == "FAST"]
    assert {part.batch for part, _ in compiled} <= {1, 2, 4, 8}, "it does not fit at 16"
    # At the first size, it is not known yet which algorithms have to be compiled.
    assert {*compiled} - {*backend.announced} <= {compiled[0]}
    for part, name in compiled[1:]:
        at = [each for each, (other, _) in enumerate(backend.measured) if other == part]
        assert backend.measured[at[-1]] == (part, name), "it comes last"


@pytest.mark.usefixtures("bounds")
def test_a_compiler_begins_only_with_algorithms_of_the_round(monkeypatch):
    rounds = [
        Round((16, 8, 4), ("SLOW", "FAST"), True),
        Round((6,), ("SLOW",), True),
        Round((5, 3), ("SLOW", "LARGE"), True),
    ]
    monkeypatch.setattr("ucudnn.benchmarking.exploration.explorer.Schedule", lambda *_: rounds)
    backend = CompilingBackend()
    wanted = replace(request(make_problem(batch=16), (4, 8, 16), 1000), adaptive=True)
    Benchmark(backend).micro_configurations(wanted)
    assert {(part.batch, name) for part, name in backend.announced} <= {(8, "FAST"), (4, "FAST"), (16, "FAST")}
    assert backend.announced


def test_a_problem_that_waits_for_a_compiler_comes_after_the_others():
    class Waiting(CountingBackend):
        begun, checks = (), 0

        def prefetch(self, problems):
            self.begun = tuple(problems)

        def is_ready(self, problem):
            self.checks += 1
            return problem.batch != 8 or len({part.batch for part, _ in self.measured}) > 1

    backend = Waiting({"SMALL": 0})
    wanted = [request(make_problem(batch=size), (size,), 400) for size in (8, 6, 4, 2)]
    benchmark = Benchmark(backend)
    benchmark.explore(wanted)
    assert [part.batch for part, _ in backend.measured] == [6, 4, 8, 2]
    assert [each[:3] for each in backend.begun] == [(each.problem, each.sizes, 400) for each in wanted]
    never = Waiting({"SMALL": 0})
    never.is_ready = lambda problem: False
    Benchmark(never).explore(wanted)
    assert [part.batch for part, _ in never.measured] == [8, 6, 4, 2], "if all have to wait, they keep their order"


def test_a_failed_algorithm_is_logged_and_left_out(backend, caplog):
    caplog.set_level(logging.INFO)
    found = Benchmark(backend).micro_configurations(request(make_problem(), (8,), 1000))
    assert {each.algorithm for each in found} == {"SMALL", "LARGE"}
    assert "BROKEN at micro-batch 8 of Forward 8x6x9x10" in caplog.text
    assert "it is broken" in caplog.text


def test_the_listener_hears_the_progress(computing):
    told = []
    problem = make_problem()
    Benchmark(computing, listener=told.append).micro_configurations(request(problem, (4, 8), 1000))
    assert [each.done for each in told[:-1]] == sorted({each.done for each in told[:-1]})
    assert all(each.done < each.total for each in told[:-1])
    assert told[-1].done == told[-1].total
    assert {each.problem for each in told} == {problem}


def test_least_workspace_is_that_of_the_smallest_configuration():
    benchmark = Benchmark(CountingBackend({"A": 100, "B": 70}))
    problem = make_problem(batch=12)
    assert benchmark.least_workspace(request(problem, (4, 8, 12), 0)) == 280
    assert benchmark.least_workspace(request(problem, (8, 12), 0)) == 840  # eights alone do not add up to twelve
    assert benchmark.least_workspace(request(problem, (8,), 0)) is None


@pytest.mark.parametrize("sizes", [(1, 2, 4, 8), (1, 2, 4, 5, 8), tuple(range(1, 9))])
@pytest.mark.parametrize("limit", [0, 40, 400, 4000])
def test_micro_configurations_that_cannot_matter_are_not_measured(computing, sizes, limit):
    problem = make_problem(batch=8)
    whole, fastest = (Benchmark(computing), Benchmark(computing))
    every = Benchmark(LinearBackend(), exhaustive=True).micro_configurations(request(problem, sizes, limit))
    front = desirable_set(every, 8)
    assert desirable_set(whole.micro_configurations(request(problem, sizes, limit)), 8) == front
    count = len(computing.measured)
    assert count <= len(every) + len(sizes)
    computing.measured.clear()
    found = fastest.micro_configurations(request(problem, sizes, limit, whole=False))
    assert desirable_set(found, 8)[-1].time_ms == front[-1].time_ms
    assert len(computing.measured) <= count
    if limit == 4000:
        assert len(found) < len(every)
    undivided = [micro.time_ms for micro in every if micro.size == 8]
    assert min(micro.time_ms for micro in found if micro.size == 8) == min(undivided)


def test_a_size_without_algorithms_does_not_stop_the_others(computing):
    computing.unsupported = {8}
    found = Benchmark(computing).micro_configurations(request(make_problem(), (1, 2, 4, 8), 4000))
    assert {each.size for each in found} == {1, 2, 4}
    computing.unsupported = {1, 2, 4, 8}
    with pytest.raises(UnsupportedProblemError, match="not at 8"):
        Benchmark(computing).micro_configurations(request(make_problem(), (1, 2, 4, 8), 4000))


def test_discarding_an_algorithm_brings_back_those_that_it_outdid(computing):
    problem = make_problem(batch=8)
    benchmark = Benchmark(computing)
    wanted = request(problem, (1, 2, 4, 8), 4000, whole=False)
    assert desirable_set(benchmark.micro_configurations(wanted), 8)[-1].parts[0].algorithm == "LARGE"
    benchmark.discard(problem, "LARGE")
    assert desirable_set(benchmark.micro_configurations(wanted), 8)[-1].parts[0].algorithm == "FAST"
    assert "LARGE" not in {each.algorithm for each in benchmark.known_micro_configurations(wanted)}


def cut_off(backend, bound):
    """End measurements as soon as a lower bound of their time says that they do not matter."""
    measure = backend.measure

    def cut(size, algorithm, effort, worth_ms=float("inf"), slabs=()):
        found = measure(size, algorithm, effort, worth_ms)
        if not found.measured or bound(size, found) <= worth_ms:
            return found
        return Measurement.of(algorithm, (bound(size, found),), complete=False)

    backend.measure = cut


def test_an_incomplete_measurement_is_repeated_if_it_matters(computing):
    problem = make_problem(batch=8)
    benchmark = Benchmark(computing)
    cut_off(computing, lambda size, found: found.time_ms)
    benchmark.micro_configurations(request(problem, (1, 2, 4, 8), 4000, whole=False))
    before = list(computing.measured)
    narrow = benchmark.micro_configurations(request(problem, (1, 2, 4, 8), 80, whole=False))
    assert desirable_set(narrow, 8)[-1].parts[0].algorithm == "FAST"
    again = set(before) & set(computing.measured[len(before) :])
    assert all(name != "LARGE" for _, name in again)


@pytest.mark.parametrize("whole", [False, True])
def test_the_lower_bound_of_an_incomplete_measurement_is_not_its_time(computing, whole):
    computing.workspaces = {"LARGE": 100, "FAST": 10, "SLOW": 0}
    computing.times = {"SLOW": (0.0, 3.0), "FAST": (0.0, 2.0), "LARGE": (0.0, 0.2)}
    least = {"SLOW": 1.0, "FAST": 1.9}  # much of the first launch of SLOW was not measured
    problem = make_problem(batch=8)
    cut_off(computing, lambda size, found: least.get(found.algorithm.name, 0.0) * size)
    benchmark = Benchmark(computing)
    sizes = (1, 2, 4, 8)
    benchmark.micro_configurations(request(problem, sizes, 4000, whole=False))
    known = benchmark.known_micro_configurations(request(problem, sizes, 4000))
    assert {micro.algorithm for micro in known} == {"LARGE"}, "only LARGE was measured completely"
    narrow = benchmark.micro_configurations(request(problem, sizes, 80, whole=whole))
    best = desirable_set(narrow, 8)[-1]
    assert {part.algorithm for part in best.parts} == {"FAST"}
    assert best.time_ms == pytest.approx(16.0)
    known = benchmark.known_micro_configurations(request(problem, sizes, 80))
    assert {part.algorithm for part in desirable_set(known, 8)[-1].parts} == {"FAST"}


def test_adaptive_finds_the_largest_size_that_fits(computing):
    problem = make_problem(batch=100)
    first = tuple(range(1, 101))
    # LARGE needs 100 bytes for each sample, so 33 samples fit. No power of two or equal division is near that.
    benchmark = Benchmark(computing)
    sizes = (1, 2, 4, 8, 16, 32, 64, 100, 50, 34, 33, 25, 20)
    found = benchmark.micro_configurations(request(problem, tuple(sorted(sizes)), 3700, whole=False, adaptive=True))
    everything = Benchmark(LinearBackend(), exhaustive=True).micro_configurations(request(problem, first, 3700))
    best, all_best = desirable_set(found, 100)[-1], desirable_set(everything, 100)[-1]
    assert best.time_ms <= all_best.time_ms * 1.01
    assert {each.size for each in found} > {37, 34, 33}
    assert len({each.size for each in found}) < 70
