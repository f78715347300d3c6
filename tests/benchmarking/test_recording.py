"""Recording a profile, and planning from it."""

from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.counting_backend import CountingBackend
from tests.support.operands import QUICK
from tests.support.plan_time import time_ms
from tests.support.problems import make_problem
from tests.support.saved_files import save_profile
from ucudnn.backends.bench import worthless
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.backends.replay import ReplayBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.recording import record, record_requests, unbeaten
from ucudnn.benchmarking.request import Request
from ucudnn.errors import NotRecordedError, ProfileError
from ucudnn.networks.tables import load_network
from ucudnn.networks.variants import Variant
from ucudnn.planning.decision import decide
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import DataType
from ucudnn.profiles.format import count_records, load_profile, merged
from ucudnn.profiles.measurement import Algorithm, Measurement
from ucudnn.settings import Settings
from ucudnn.solvers.desirable import desirable_set


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    path = tmp_path_factory.mktemp("network") / "small.csv"
    header = "source,W,H,C_in,N,C_out,kernel_w,kernel_h,pad_w,pad_h,stride_w,stride_h"
    path.write_text(f"{header}\nsmall,9,8,4,8,6,3,3,1,1,1,1\nsmall,5,5,6,8,4,1,1,0,0,1,1\n")
    return load_network(str(path))


def test_a_recorded_network_is_planned_from_its_profile(network, tmp_path):
    requests = record_requests(network, [Variant(), Variant(dtype=DataType.FLOAT64)], BatchSizePolicy.POWER_OF_TWO)
    assert len(requests) == 12
    benchmark = Benchmark(CpuBackend(), effort=QUICK, exhaustive=True)
    profile = record("small", requests, benchmark)
    path = tmp_path / "small.json"
    save_profile(profile, path)
    replay = ReplayBackend(load_profile(str(path)))
    settings = Settings(workspace_limit_bytes=1 << 20)
    planned = decide(network.kernels(), Benchmark(replay), settings)
    live = decide(network.kernels(), benchmark, settings)
    assert time_ms(planned) == pytest.approx(time_ms(live), rel=1e-3)
    every = record("small", requests, benchmark, every=True)
    assert count_records(every) > count_records(profile)
    again = decide(network.kernels(), Benchmark(ReplayBackend(every)), settings)
    assert time_ms(again) == pytest.approx(time_ms(live))


def test_adaptive_plans_from_a_profile_of_powers_of_two(network):
    benchmark = Benchmark(CpuBackend(), effort=QUICK, exhaustive=True)
    requests = record_requests(network, [Variant()], BatchSizePolicy.POWER_OF_TWO)
    replay = ReplayBackend(record("small", requests, benchmark))
    plans = {
        policy: time_ms(decide(network.kernels(), Benchmark(replay), Settings(policy=policy)))
        for policy in (BatchSizePolicy.ADAPTIVE, BatchSizePolicy.POWER_OF_TWO)
    }
    assert plans[BatchSizePolicy.ADAPTIVE] == pytest.approx(plans[BatchSizePolicy.POWER_OF_TWO])


records = st.lists(
    st.builds(
        Measurement,
        algorithm=st.builds(
            Algorithm,
            name=st.text("abc", min_size=1, max_size=3),
            workspace_bytes=st.integers(0, 3),
            api=st.sampled_from(["graph", "legacy"]),
            notes=st.sampled_from([(), ("TENSOR_CORE",), ("NONDETERMINISTIC",), ("TENSOR_CORE", "FFT")]),
        ),
        time_ms=st.sampled_from([1.0, 2.0, 3.0]),
    ),
    max_size=12,
    unique_by=lambda record: (record.algorithm.api, record.algorithm.name),
)


@given(records, st.integers(0, 3), st.booleans(), st.booleans(), st.sampled_from(["graph", "legacy"]))
def test_a_profile_leaves_out_nothing_that_a_plan_may_choose(given_records, limit, deterministic, fma, api):
    def best(of):
        times = [
            record.time_ms
            for record in of
            if record.algorithm.api == api
            and record.algorithm.workspace_bytes <= limit
            and not (deterministic and "NONDETERMINISTIC" in record.algorithm.notes)
            and not (fma and "TENSOR_CORE" in record.algorithm.notes)
        ]
        return min(times, default=None)

    kept = unbeaten(given_records)
    assert best(kept) == best(given_records)
    assert len(kept) <= len(given_records)


class LinearBackend(CountingBackend):
    """Algorithms whose workspace and time have a constant part and a part for each sample."""

    def __init__(self, given):
        super().__init__({}, {str(index): each[2:4] for index, each in enumerate(given)})
        self.given = given

    def algorithms(self, problem):
        return tuple(
            Algorithm(name=str(index), workspace_bytes=fixed + each * problem.batch, api="graph", notes=notes)
            for index, (fixed, each, _, _, notes) in enumerate(self.given)
            if not (problem.deterministic and "NONDETERMINISTIC" in notes)
        )

    def measure(self, size, algorithm, effort, worth_ms=float("inf"), slabs=()):
        found = super().measure(size, algorithm, effort)
        return replace(found, complete=not worthless((found.time_ms,) * 6, worth_ms))


linear = st.tuples(
    st.integers(0, 4),
    st.integers(0, 4),
    st.sampled_from([0.1, 1.0, 5.0]),
    st.floats(0.1, 2.0),
    st.sampled_from([(), ("NONDETERMINISTIC",)]),
)


@given(st.lists(linear, min_size=1, max_size=8), st.booleans())
def test_a_recorded_mini_batch_serves_smaller_ones_and_deterministic_plans(algorithms, deterministic):
    backend = LinearBackend(algorithms)
    sizes = (1, 2, 4, 8)
    wanted = Request(problem=make_problem(batch=8), sizes=sizes, limit_bytes=1 << 50, apart=True)
    with patch("ucudnn.benchmarking.benchmark.ComputeBackend", LinearBackend):  # so that bounds are used
        profile = record("one", [wanted], Benchmark(backend))
    for batch in sizes:
        problem = make_problem(batch=batch, deterministic=deterministic)
        within = tuple(size for size in sizes if size <= batch)
        asked = Request(problem=problem, sizes=within, limit_bytes=1 << 50)
        every = Benchmark(backend, exhaustive=True).micro_configurations(asked)
        try:
            replayed = Benchmark(ReplayBackend(profile)).micro_configurations(asked)
        except NotRecordedError:
            assert not every
            continue
        fronts = [
            [(each.workspace_bytes, each.time_ms) for each in desirable_set(of, batch)] for of in (every, replayed)
        ]
        assert fronts[1] == [pytest.approx(each) for each in fronts[0]]
        undivided = [min(micro.time_ms for micro in of if micro.size == batch) for of in (every, replayed)]
        assert undivided[1] == pytest.approx(undivided[0])


def test_profiles_of_one_machine_are_merged(network):
    benchmark = Benchmark(CpuBackend(), effort=QUICK, exhaustive=True)
    first, second = (
        record("small", record_requests(network, [each], BatchSizePolicy.UNDIVIDED), benchmark)
        for each in (Variant(), Variant(dtype=DataType.FLOAT64))
    )
    both = merged(first, second)
    assert count_records(both) == count_records(first) + count_records(second)
    assert count_records(merged(both, second)) == count_records(both)
    with pytest.raises(ProfileError, match="was recorded under"):
        merged(first, replace(second, conditions={"device": "another"}))
