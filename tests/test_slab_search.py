"""Slab search: what is measured, on a backend whose times and workspaces are known."""

from contextlib import contextmanager
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucudnn.backends.base import Algorithm, ComputeBackend, Effort, Measurement, MeasurementStatus, pieces_of
from ucudnn.benchmark import Benchmark
from ucudnn.decision import MOST_ROUNDINGS, decide
from ucudnn.exploration import Request
from ucudnn.kernel import Kernel
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem, DataType, Operation
from ucudnn.settings import Settings
from ucudnn.slab_search import rows_tried
from ucudnn.slabs import row_count
from ucudnn.solvers.desirable import desirable_set

MIB = 2**20
CALL_MS = 0.05  # of each call, what it computes aside
VOLUME = ConvolutionProblem(
    operation=Operation.FORWARD,
    batch=1,
    channels=32,
    spatial=(64, 32, 32),
    filters=64,
    kernel=(3, 3, 3),
    padding=(1, 1, 1),
)


class Rates(ComputeBackend):
    """Algorithms with a workspace for each element of x, and a time for each multiplication, and no convolutions."""

    name = "rates"

    def __init__(self, rates, lacks=()):
        self.rates = rates  # name: (workspace of an element of x in bytes, milliseconds of 10**9 multiplications)
        self.lacks = lacks  # algorithms that know one padding only
        self.measured = []
        self.asked = 0

    def conditions(self):
        return {"device": "none"}

    def algorithms(self, problem):
        self.asked += 1
        size = problem.batch * problem.channels * problem.spatial[0] * problem.spatial[1] * problem.spatial[2]
        return tuple(
            Algorithm(name=name, workspace_bytes=each * size, api="rates")
            for name, (each, _) in self.rates.items()
            if not (name in self.lacks and problem.post_padding)
        )

    @contextmanager
    def bench(self, problem):
        yield self.Bench(self, problem)

    class Bench:
        def __init__(self, backend, problem):
            self.backend, self.problem = backend, problem

        def measure(self, size, algorithm, effort, worth_ms=inf, slabs=()):
            (piece, *_) = pieces_of(self.problem, size, slabs)
            self.backend.measured.append((piece.problem, algorithm.name))
            time_ms = CALL_MS + piece.problem.multiplications / 1e9 * self.backend.rates[algorithm.name][1]
            return Measurement(status=MeasurementStatus.MEASURED, samples_ms=(time_ms,) * 6)

    prepare = allocate = operands = elapsed_ms = segment = None


RATES = {"PLAIN": (0, 10.0), "FAST": (8, 1.0), "BETTER": (16, 0.8), "WORSE": (12, 3.0)}


def request(problem, limit, policy=BatchSizePolicy.POWER_OF_TWO, **options):
    sizes = policy.sizes(problem.batch)
    return Request(problem=problem, sizes=sizes, limit_bytes=limit, rows=rows_tried(problem, policy), **options)


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
    assert max(heights) in rows_tried(problem, policy)
    assert configuration.workspace_bytes <= whole // 3
    own = {name for part, name in backend.measured if part.post_padding or part.x_channel_stride}
    assert "PLAIN" not in own, "what fits undivided gains nothing by slabs"


def test_where_single_samples_fit_nothing_more_is_measured():
    problem = replace(VOLUME, batch=64)
    limit = 16 * VOLUME.x_sample
    with_slabs, without = Rates(RATES), Rates(RATES)
    wanted = request(problem, limit, whole=False)
    found = best(Benchmark(with_slabs), wanted)
    plain = best(Benchmark(without), replace(wanted, rows=()))
    assert str(found) == str(plain)
    assert with_slabs.measured == without.measured


@given(
    st.dictionaries(
        st.sampled_from("ABCDE"),
        st.tuples(st.integers(1, 16), st.floats(0.5, 10.0)),
        min_size=1,
    ),
    st.sampled_from([0.1, 0.3, 0.6, 2.0]),
    st.integers(1, 3),
    st.sampled_from(Operation),
)
def test_the_fewest_slabs_lose_next_to_nothing(rates, share, batch, operation):
    problem = replace(VOLUME, batch=batch, operation=operation)
    rates = {"PLAIN": (0, 10.0)} | rates
    limit = int(share * 16 * VOLUME.x_sample)
    pruned, every = Rates(rates), Rates(rates)
    found = best(Benchmark(pruned), request(problem, limit, whole=False))
    optimum = best(Benchmark(every, exhaustive=True), request(problem, limit))
    assert found.workspace_bytes <= limit
    assert found.time_ms <= optimum.time_ms * 1.05  # slabs at the ends may go with another number of rows
    assert len(pruned.measured) <= len(every.measured)


def test_slabs_never_make_a_plan_worse():
    for limit in range(0, 40 * MIB, 3 * MIB):
        problem = replace(VOLUME, batch=2)
        wanted = request(problem, limit, whole=False)
        slow = best(Benchmark(Rates(RATES)), replace(wanted, rows=()))
        assert best(Benchmark(Rates(RATES)), wanted).time_ms <= slow.time_ms * (1 + 1e-9)


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


def test_ends_that_an_algorithm_lacks_are_computed_by_another():
    backend = Rates(RATES, lacks=("BETTER", "FAST", "WORSE"))
    configuration = best(Benchmark(backend), request(VOLUME, 8 * VOLUME.x_sample // 2, whole=False))
    (part,) = configuration.parts
    assert part.algorithms == {"PLAIN", "FAST"} or part.algorithms == {"PLAIN", "BETTER"}
    assert part.slabs[0].algorithm == part.slabs[-1].algorithm == "PLAIN"


@pytest.mark.parametrize("batch", [1, 4, 40])
def test_gradients_of_16_bits_are_rounded_so_often_at_most(batch):
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


def test_effort_is_spent_on_what_matters():
    backend = Rates(RATES | {f"SLOW{index}": (20, 50.0) for index in range(10)})
    Benchmark(backend, effort=Effort()).explore([request(VOLUME, 4 * MIB, whole=False)])
    slow = [part for part, name in backend.measured if name.startswith("SLOW") and part.x_channel_stride]
    assert len(slow) <= 10, "one height, and of it the slabs within the volume only"
