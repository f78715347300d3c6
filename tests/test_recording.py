"""Recording: profiles from measurements, and back to plans."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucudnn.backends.base import Effort
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.backends.replay import ReplayBackend
from ucudnn.benchmark import Benchmark
from ucudnn.decision import decide
from ucudnn.errors import ProfileError, SettingsError
from ucudnn.networks import load_network
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import DataType, Layout, MathMode
from ucudnn.profile import Record, count_records, load_profile, merged, save_profile
from ucudnn.recording import Variant, record, record_requests, unbeaten, variants
from ucudnn.settings import Settings

QUICK = Effort(warmup=0, repeats=1, time_limit_ms=1)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    path = tmp_path_factory.mktemp("network") / "small.csv"
    header = "source,W,H,C_in,N,C_out,kernel_w,kernel_h,pad_w,pad_h,stride_w,stride_h"
    path.write_text(f"{header}\nsmall,9,8,4,8,6,3,3,1,1,1,1\nsmall,5,5,6,8,4,1,1,0,0,1,1\n")
    return load_network(str(path))


def test_what_is_recorded_is_planned_from(network, tmp_path):
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
    assert planned.time_ms == pytest.approx(live.time_ms, rel=1e-3)
    every = record("small", requests, benchmark, every=True)
    assert count_records(every) > count_records(profile)
    again = decide(network.kernels(), Benchmark(ReplayBackend(every)), settings)
    assert again.time_ms == pytest.approx(live.time_ms)


def test_adaptive_plans_from_what_was_recorded(network):
    benchmark = Benchmark(CpuBackend(), effort=QUICK, exhaustive=True)
    requests = record_requests(network, [Variant()], BatchSizePolicy.POWER_OF_TWO)
    replay = ReplayBackend(record("small", requests, benchmark))
    plans = {
        policy: decide(network.kernels(), Benchmark(replay), Settings(policy=policy)).time_ms
        for policy in (BatchSizePolicy.ADAPTIVE, BatchSizePolicy.POWER_OF_TWO)
    }
    assert plans[BatchSizePolicy.ADAPTIVE] == pytest.approx(plans[BatchSizePolicy.POWER_OF_TWO])


def test_variants_are_all_that_differ():
    assert variants(None, None, None) == [Variant()]
    found = variants(["float32", "float16"], ["tf32", "fma"], ["first", "last"])
    assert len(found) == len(set(found)) == 6
    assert Variant(dtype=DataType.FLOAT16, math=MathMode.FMA) not in found
    with pytest.raises(SettingsError, match="--layout='NHWC' is not known: give first or last"):
        variants(None, None, ["NHWC"])
    with pytest.raises(SettingsError, match="--dtype"):
        variants(["int8"], None, None)


def test_a_variant_has_its_layout():
    problem = load_network("unet3d").kernels()[0].problem
    assert Variant(channels_last=True).of(problem).layout is Layout.NDHWC
    assert Variant().of(replace(problem, math=MathMode.FMA)) == problem


records = st.lists(
    st.builds(
        Record,
        api=st.sampled_from(["graph", "legacy"]),
        algorithm=st.text("abc", min_size=1, max_size=3),
        time_ms=st.sampled_from([1.0, 2.0, 3.0]),
        workspace_bytes=st.integers(0, 3),
        notes=st.sampled_from([(), ("TENSOR_CORE",), ("NONDETERMINISTIC",), ("TENSOR_CORE", "FFT")]),
    ),
    max_size=12,
    unique_by=lambda record: (record.api, record.algorithm),
)


@given(records, st.integers(0, 3), st.booleans(), st.booleans(), st.sampled_from(["graph", "legacy"]))
def test_nothing_that_a_plan_may_want_is_left_out(given_records, limit, deterministic, fma, api):
    def best(of):
        times = [
            record.time_ms
            for record in of
            if record.api == api
            and record.workspace_bytes <= limit
            and not (deterministic and "NONDETERMINISTIC" in record.notes)
            and not (fma and "TENSOR_CORE" in record.notes)
        ]
        return min(times, default=None)

    kept = unbeaten(given_records)
    assert best(kept) == best(given_records)
    assert len(kept) <= len(given_records)


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
