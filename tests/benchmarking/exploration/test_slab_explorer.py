"""Which slabs are measured, on a backend whose times and workspaces are known."""

import json
from contextlib import closing
from dataclasses import replace
from math import inf
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.counting_backend import CountingBackend
from tests.support.problems import divisible
from ucudnn.backends.replay import ReplayBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.recording import record
from ucudnn.benchmarking.request import MOST_ROUNDINGS, Request, slab_rows
from ucudnn.benchmarking.storage.database import Database
from ucudnn.benchmarking.storage.store import MachineStore
from ucudnn.kernel import Kernel
from ucudnn.planning.decision import decide
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem, DataType, Operation
from ucudnn.profiles.format import decode_problem, encode_problem
from ucudnn.profiles.measurement import Algorithm, Effort, Measurement
from ucudnn.settings import Settings
from ucudnn.slabs import pieces_of, row_count, row_unit, slabs_by_problem
from ucudnn.solvers.desirable import desirable_set

MIB = 2**20
CALL_MS = 0.05  # the constant part of each call
VOLUME = ConvolutionProblem(
    operation=Operation.FORWARD,
    batch=1,
    channels=32,
    spatial=(64, 32, 32),
    filters=64,
    kernel=(3, 3, 3),
    padding=(1, 1, 1),
)


@pytest.fixture(autouse=True)
def bounds(monkeypatch):
    """Let these backends count as ones that compute, so that bounds are used."""
    monkeypatch.setattr("ucudnn.benchmarking.benchmark.ComputeBackend", CountingBackend)


class Rates(CountingBackend):
    """Algorithms with a workspace for each element of x and a time for each multiplication; nothing is computed."""

    name = "rates"

    def __init__(self, rates, lacks=()):
        super().__init__({})
        self.rates = rates  # name: (workspace of an element of x in bytes, milliseconds of 10**9 multiplications)
        self.lacks = lacks  # algorithms that cannot compute unequal paddings

    def algorithms(self, problem):
        size = problem.batch * problem.channels * problem.spatial[0] * problem.spatial[1] * problem.spatial[2]
        return tuple(
            Algorithm(name=name, workspace_bytes=each * size, api="rates")
            for name, (each, _) in self.rates.items()
            if not (name in self.lacks and problem.post_padding)
        )

    def measure(self, size, algorithm, effort, worth_ms=inf, slabs=()):
        (piece, *_) = pieces_of(self.problem, size, slabs)
        self.measured.append((piece.problem, algorithm.name))
        time_ms = CALL_MS + piece.problem.multiplications / 1e9 * self.rates[algorithm.name][1]
        return Measurement.of(algorithm, (time_ms,) * 6)


RATES = {"PLAIN": (0, 10.0), "FAST": (8, 1.0), "BETTER": (16, 0.8), "WORSE": (12, 3.0)}


def request(problem, limit, policy=BatchSizePolicy.POWER_OF_TWO, **options):
    sizes = policy.sizes(problem.batch)
    return Request(problem=problem, sizes=sizes, limit_bytes=limit, rows=slab_rows(problem, policy), **options)


def best(benchmark, wanted):
    return desirable_set(benchmark.micro_configurations(wanted), wanted.problem.batch)[-1]


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("policy", [BatchSizePolicy.POWER_OF_TWO, BatchSizePolicy.ALL, BatchSizePolicy.ADAPTIVE])
def test_slabs_are_as_few_as_fit(operation, batch, policy):
    problem = replace(VOLUME, operation=operation, batch=batch)
    whole = 16 * problem.x_sample
    backend = Rates(RATES)
    benchmark = Benchmark(backend)
    adaptive = policy is BatchSizePolicy.ADAPTIVE
    configuration = best(benchmark, request(problem, whole // 3, policy, whole=False, adaptive=adaptive))
    parts = configuration.parts
    assert [part.size for part in parts] == [1] * batch
    assert all(part.algorithms == {"BETTER"} or part.algorithms == {"FAST"} for part in parts)
    heights = {slab.slab.rows for slab in parts[0].slabs[:-1]}
    assert len(heights) == 1
    assert max(heights) in slab_rows(problem, policy)
    assert configuration.workspace_bytes <= whole // 3
    own = {name for part, name in backend.measured if part.post_padding or part.x_channel_stride}
    assert "PLAIN" not in own, "slabs gain nothing for what fits undivided"


def test_nothing_more_is_measured_if_single_samples_fit():
    problem = replace(VOLUME, batch=64)
    limit = 16 * VOLUME.x_sample
    with_slabs, without = Rates(RATES), Rates(RATES)
    wanted = request(problem, limit, whole=False)
    found = best(Benchmark(with_slabs), wanted)
    plain = best(Benchmark(without), replace(wanted, rows=()))
    assert str(found) == str(plain)
    assert with_slabs.measured == without.measured


@given(
    st.dictionaries(st.sampled_from("ABCDE"), st.tuples(st.integers(1, 16), st.floats(0.5, 10.0)), min_size=1),
    st.sampled_from([0.1, 0.3, 0.6, 2.0]),
    st.integers(1, 3),
    st.sampled_from(Operation),
)
def test_the_fewest_slabs_lose_next_to_nothing(rates, share, batch, operation):
    problem = replace(VOLUME, batch=batch, operation=operation)
    rates = {"PLAIN": (0, 10.0)} | rates
    limit = int(share * 16 * VOLUME.x_sample)
    pruned, every = Rates(rates), Rates(rates)
    wanted = request(problem, limit, whole=False)
    found = best(Benchmark(pruned), wanted)
    undivided = best(Benchmark(Rates(rates)), replace(wanted, rows=()))
    optimum = best(Benchmark(every, exhaustive=True), request(problem, limit))
    assert found.workspace_bytes <= limit
    assert found.time_ms <= undivided.time_ms * (1 + 1e-9)
    assert found.time_ms <= optimum.time_ms * 1.05  # another number of rows may suit the ends better
    assert len(pruned.measured) <= len(every.measured)


def test_the_whole_front_has_slabs_of_every_height():
    front = desirable_set(Benchmark(Rates(RATES)).micro_configurations(request(VOLUME, 1 << 40)), 1)
    heights = {slab.slab.rows for each in front for part in each.parts for slab in part.slabs}
    assert {32, 16, 8} <= heights
    sizes = [each.workspace_bytes for each in front]
    assert min(size for size in sizes if size) < 16 * VOLUME.x_sample // 8


@given(
    st.dictionaries(st.sampled_from("ABCDE"), st.tuples(st.integers(4, 16), st.floats(0.5, 10.0)), min_size=1),
    st.integers(1, 3),
)
def test_the_whole_front_loses_next_to_nothing(rates, batch):
    problem = replace(VOLUME, batch=batch)
    rates = {"PLAIN": (0, 10.0)} | rates
    limit = 64 * VOLUME.x_sample
    found = desirable_set(Benchmark(Rates(rates)).micro_configurations(request(problem, limit)), batch)
    every = Benchmark(Rates(rates), exhaustive=True).micro_configurations(request(problem, limit))
    for optimum in desirable_set(every, batch):
        within = [each.time_ms for each in found if each.workspace_bytes <= optimum.workspace_bytes]
        assert min(within) <= optimum.time_ms * 1.05


def test_another_algorithm_computes_the_ends_that_one_lacks():
    backend = Rates(RATES, lacks=("BETTER", "FAST", "WORSE"))
    configuration = best(Benchmark(backend), request(VOLUME, 8 * VOLUME.x_sample // 2, whole=False))
    (part,) = configuration.parts
    assert part.algorithms == {"PLAIN", "FAST"} or part.algorithms == {"PLAIN", "BETTER"}
    assert part.slabs[0].algorithm == part.slabs[-1].algorithm == "PLAIN"


@pytest.mark.parametrize("batch", [1, 4, 40])
def test_gradients_of_16_bits_are_rounded_a_limited_number_of_times(batch):
    problem = replace(VOLUME, batch=batch, operation=Operation.BACKWARD_FILTER, dtype=DataType.FLOAT16)
    limit = 16 * VOLUME.x_sample // 40
    decisions = decide(
        [Kernel(layer="conv", problem=problem)],
        Benchmark(Rates(RATES)),
        Settings(workspace_limit_bytes=limit, policy=BatchSizePolicy.ALL),
    )
    parts = decisions.kernels[0].configuration.parts
    assert sum(len(part.slabs) or 1 for part in parts) <= MOST_ROUNDINGS
    assert row_count(problem) > MOST_ROUNDINGS


def test_slabs_can_be_turned_off():
    backend = Rates(RATES)
    kernels = [Kernel(layer="conv", problem=VOLUME)]
    given = Settings(workspace_limit_bytes=4 * MIB, slabs=False)
    assert not decide(kernels, Benchmark(backend), given).kernels[0].configuration.parts[0].slabs
    assert not any(part.x_channel_stride for part, _ in backend.measured)
    assert decide(kernels, Benchmark(backend), replace(given, slabs=True)).kernels[0].configuration.parts[0].slabs


def test_slow_algorithms_get_one_height_and_no_ends():
    backend = Rates(RATES | {f"SLOW{index}": (20, 50.0) for index in range(10)})
    Benchmark(backend, effort=Effort()).explore([request(VOLUME, 4 * MIB, whole=False)])
    slow = [part for part, name in backend.measured if name.startswith("SLOW") and part.x_channel_stride]
    assert len(slow) <= 10, "one height, and only its slabs within the volume"


class Peculiar(Rates):
    """The same with an algorithm that is absent, fails, or needs more workspace on some slabs."""

    def __init__(self, rates, *, lacks=None, fails=None, ends=1):
        super().__init__(rates)
        self.absent, self.failing, self.ends = lacks, fails, ends  # rows of y, rows of y, times the workspace

    def algorithms(self, problem):
        more = self.ends if problem.post_padding else 1
        return tuple(
            replace(each, workspace_bytes=each.workspace_bytes * (more if each.name == "FAST" else 1))
            for each in super().algorithms(problem)
            if (each.name, problem.output[0]) != ("FAST", self.absent)
        )

    def measure(self, size, algorithm, effort, worth_ms=inf, slabs=()):
        if slabs and (algorithm.name, slabs[0].rows) == ("FAST", self.failing):
            return Measurement.failed(algorithm, "not so many rows")
        return super().measure(size, algorithm, effort, worth_ms, slabs)


@pytest.mark.parametrize("options", [{"lacks": 32}, {"fails": 32}, {"ends": 2}])
def test_the_next_height_is_tried_if_one_fails(options):
    rates = {"PLAIN": (0, 10.0), "FAST": (8, 1.0)}
    configuration = best(Benchmark(Peculiar(rates, **options)), request(VOLUME, 5 * VOLUME.x_sample, whole=False))
    assert str(configuration) == "1x1 [4x16 rows FAST]"


def test_all_slabs_have_to_fit_the_limit():
    limit = int(8 * 32 * 32 * 32 * 23.5)  # slabs of 22 rows within the volume read 24 rows
    wanted = request(VOLUME, limit, BatchSizePolicy.ADAPTIVE, whole=False, adaptive=True)
    for rates in ({"PLAIN": (0, 10.0), "FAST": (8, 1.0)}, {"FAST": (8, 1.0)}):
        assert best(Benchmark(Rates(rates)), wanted).parts[0].algorithms == {"FAST"}


class Copying(Rates):
    """The same with algorithms that compute slabs from a copy, under other names."""

    def slab_names(self, name):
        return name, f"{name}+packed"

    def algorithms(self, problem):
        found = super().algorithms(problem)
        if not problem.x_channel_stride:
            return found
        return tuple(each if each.name == "PLAIN" else replace(each, name=f"{each.name}+packed") for each in found)

    def measure(self, size, algorithm, effort, worth_ms=inf, slabs=()):
        plain = replace(algorithm, name=algorithm.name.removesuffix("+packed"))
        return super().measure(size, plain, effort, worth_ms, slabs)


class Alone:
    """A single rank, which gets its own findings back."""

    collective = True

    def ready(self):
        pass

    def explore(self, requests, own):
        return [own.find(each) for each in requests]


@pytest.mark.parametrize("backend", [Rates, Copying])
def test_ranks_exchange_the_measurements_of_slabs(backend):
    wanted = request(VOLUME, 5 * VOLUME.x_sample, whole=False)
    alone = best(Benchmark(backend(RATES)), wanted)
    assert alone.parts[0].slabs
    assert str(best(Benchmark(backend(RATES), parallel=Alone()), wanted)) == str(alone)


class Choice(Rates):
    """A backend that offers some of the algorithms."""

    def __init__(self, *offered):
        super().__init__({"PLAIN": (0, 10.0), "GRAPH": (8, 1.0), "LEGACY": (8, 0.5)})
        self.offered = offered

    def algorithms(self, problem):
        return tuple(each for each in super().algorithms(problem) if each.name in self.offered)


def test_stored_algorithms_that_are_no_candidates_are_left_out(tmp_path):
    wanted = request(VOLUME, 5 * VOLUME.x_sample, whole=False)
    with closing(Database(tmp_path / "times.db")) as database:
        found = {}
        for name, backend in (("every", Choice("PLAIN", "GRAPH", "LEGACY")), ("graph", Choice("PLAIN", "GRAPH"))):
            benchmark = Benchmark(backend, storage=MachineStore(database, {}, name))
            found[name] = best(benchmark, wanted).parts[0].algorithms
    assert found == {"every": {"LEGACY"}, "graph": {"GRAPH"}}


class Kinds(Rates):
    """Algorithms whose faster ones use tensor cores, or do not repeat their results."""

    NOTES: ClassVar = {"FAST": ("TENSOR_CORE",), "BETTER": ("TENSOR_CORE", "NONDETERMINISTIC")}

    def algorithms(self, problem):
        return tuple(replace(each, notes=self.NOTES.get(each.name, ())) for each in super().algorithms(problem))


def test_profiles_hold_slabs_for_each_set_of_traits():
    rates = {"PLAIN": (0, 10.0), "WORSE": (12, 3.0), "FAST": (9, 1.0), "BETTER": (8, 0.8)}
    large = replace(VOLUME, spatial=(64, 128, 128), x_batch_stride=0, y_batch_stride=0)
    wanted = request(large, 1 << 50, apart=True)
    benchmark = Benchmark(Kinds(rates))
    names = {item[1].algorithm.name for item in benchmark.results(wanted) if item[0].x_channel_stride}
    assert {"WORSE", "FAST", "BETTER"} <= names


def test_recordings_do_not_mix():
    def recorded(name, scale, batch, **options):
        rates = {each: (size, ms * scale) for each, (size, ms) in RATES.items()}
        wanted = replace(request(replace(VOLUME, batch=batch), 1 << 50, apart=True), **options)
        return record(name, [wanted], Benchmark(Rates(rates), exhaustive=True))

    first, second = recorded("first", 1.0, 4, rows=()), recorded("second", 0.05, 2)
    both = replace(first, recordings={**first.recordings, **second.recordings})
    wanted = request(replace(VOLUME, batch=4), 5 * VOLUME.x_sample, whole=False)
    for profile in (first, both):
        assert str(best(Benchmark(ReplayBackend(profile)), wanted)) == "1x4 PLAIN"
    smaller = request(replace(VOLUME, batch=2), 5 * VOLUME.x_sample, whole=False)
    assert best(Benchmark(ReplayBackend(second)), smaller).parts[0].slabs


@given(divisible(), st.integers(1, 40))
def test_slabs_survive_a_profile(problem, rows):
    unit = row_unit(problem)
    for kind, _ in slabs_by_problem(problem.part(1), -(-rows // unit) * unit):
        assert decode_problem(json.loads(json.dumps(encode_problem(kind))), kind.batch) == kind
