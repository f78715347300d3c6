import re
from dataclasses import replace

import pytest

from ucudnn.backends.candidates import Candidates
from ucudnn.backends.replay import ReplayBackend
from ucudnn.errors import NotRecordedError
from ucudnn.networks.tables import load_network
from ucudnn.problem import DataType, Layout, MathMode, Operation
from ucudnn.profiles.format import load_profile
from ucudnn.profiles.measurement import Effort


def conv2(operation=Operation.FORWARD, batch=256):
    return load_network("alexnet", batch).layers[1].forward.with_operation(operation)


def names(backend, problem):
    return {algorithm.name for algorithm in backend.algorithms(problem)}


def test_times_and_workspaces_are_those_recorded(h200, replay):
    backend = replay("alexnet", Candidates.EVERY)
    problem = conv2()
    records = h200.recordings["alexnet"][problem]
    assert {(each.name, each.workspace_bytes) for each in backend.algorithms(problem)} == {
        (record.algorithm.name, record.algorithm.workspace_bytes) for record in records
    }
    with backend.bench(problem) as bench:
        for algorithm in backend.algorithms(problem.with_batch(32)):
            (expected,) = (
                record
                for record in h200.recordings["alexnet"][problem.with_batch(32)]
                if record.algorithm.name == algorithm.name
            )
            assert bench.measure(32, algorithm, Effort()) == expected


def test_without_tf32_other_times_and_no_tensor_cores(h200, replay):
    problem = conv2()
    fma = replace(problem, math=MathMode.FMA)
    tensor_cores = {r.algorithm.name for r in h200.recordings["alexnet"][problem] if "TENSOR_CORE" in r.algorithm.notes}
    assert tensor_cores
    assert not names(replay("alexnet", Candidates.GRAPH), fma) & tensor_cores
    assert names(replay("alexnet", Candidates.EVERY), fma) >= names(replay("alexnet", Candidates.LEGACY), problem)
    legacy = replay("alexnet", Candidates.LEGACY)
    restricted = replay("alexnet", Candidates.LEGACY_FMA)
    assert legacy.measurement(fma, "FFT") == restricted.measurement(problem, "FFT")
    without, with_tf32 = (legacy.measurement(each, "IMPLICIT_PRECOMP_GEMM") for each in (fma, problem))
    assert without.time_ms != with_tf32.time_ms


def test_determinism_leaves_out_algorithms_that_do_not_repeat(replay):
    problem = conv2(Operation.BACKWARD_FILTER)
    backend = replay("alexnet", Candidates.EVERY)
    left = names(backend, problem) - names(backend, replace(problem, deterministic=True))
    assert {"ALGO_0", "ALGO_3", "eng20"} <= left
    assert "ALGO_1" not in left


def test_recordings_do_not_mix(h200):
    # ResNet-18 and ResNet-50 share shapes that were recorded twice.
    shared = set(h200.recordings["resnet18"]) & set(h200.recordings["resnet50"])
    assert shared
    for network in ("resnet18", "resnet50"):
        backend = ReplayBackend(h200, network=network)
        for problem in shared:
            if problem.math is MathMode.TF32:
                for record in h200.recordings[network][problem]:
                    assert backend.measurement(problem, record.algorithm.name) == record


def test_a_missing_record_is_an_error_that_says_what_there_is(replay):
    backend = replay("alexnet")
    with pytest.raises(NotRecordedError, match="at mini-batches of 1, 2, 4, 8, 16, 32, 64, 128, 256, and not of 100"):
        backend.algorithms(conv2(batch=100))
    with pytest.raises(NotRecordedError, match=r"h200 has no Forward .* recorded were the layers of alexnet"):
        backend.algorithms(load_network("vgg16").layers[1].forward)
    with pytest.raises(NotRecordedError, match="has no FFT for"):
        backend.measurement(conv2(), "FFT")


def test_a_missing_type_names_those_that_were_recorded_of_the_same_shapes():
    shipped = load_profile("h200")
    with pytest.raises(NotRecordedError) as caught:
        ReplayBackend(shipped).algorithms(replace(conv2(), dtype=DataType.FLOAT64))
    assert str(caught.value) == (
        f"h200 has no {conv2()}: these shapes were recorded as float32 NCHW, float32 NCHW without TF32, float32 NHWC,"
        " float32 NHWC without TF32, float16 NCHW, float16 NHWC: choose one of these (--dtype, --math, --layout)"
    ).replace("float32 NCHW:", "float64 NCHW:", 1)
    last = replace(shipped, recordings={"3d": shipped.recordings["unet3d"]})
    problem = next(each for each in last.recordings["3d"] if each.layout is Layout.NDHWC and each.math is MathMode.TF32)
    missing = replace(problem, dtype=DataType.BFLOAT16, batch=3)
    with pytest.raises(NotRecordedError, match=r"recorded as .*float32 NDHWC, .*float16 NDHWC: choose one of these"):
        ReplayBackend(last).algorithms(missing)


def test_missing_candidates_name_those_that_were_recorded():
    shipped = load_profile("h200")
    problem = replace(conv2(), dtype=DataType.FLOAT16)
    for candidates in (Candidates.LEGACY, Candidates.LEGACY_FMA):
        message = rf"h200 has no {candidates.value} candidates for {re.escape(str(problem))}: choose (.*)$"
        with pytest.raises(NotRecordedError, match=message) as caught:
            ReplayBackend(shipped, candidates=candidates).algorithms(problem)
        named = {Candidates(each) for each in re.search(message, str(caught.value))[1].split(", ")}
        assert named == {*Candidates} - {Candidates.LEGACY, Candidates.LEGACY_FMA}
        for each in named:
            assert ReplayBackend(shipped, candidates=each).algorithms(problem)
