from dataclasses import replace

import pytest

from ucudnn.backends.candidates import Candidates
from ucudnn.backends.replay import ReplayBackend
from ucudnn.errors import NotRecordedError
from ucudnn.networks.tables import load_network
from ucudnn.problem import MathMode, Operation
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


def test_candidates_restrict(replay):
    problem = conv2()
    graph = names(replay("alexnet", Candidates.GRAPH), problem)
    legacy = names(replay("alexnet", Candidates.LEGACY), problem)
    assert all(name.startswith("eng") for name in graph)
    assert legacy == names(replay("alexnet", Candidates.LEGACY_FMA), problem)
    assert "IMPLICIT_GEMM" in legacy
    assert names(replay("alexnet", Candidates.EVERY), problem) == graph | legacy


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
