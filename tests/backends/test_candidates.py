"""Candidates: the API that an algorithm may come from. More candidates never make a plan slower."""

from dataclasses import replace

import pytest

from tests.support.plan_time import time_ms
from ucudnn.backends.candidates import Candidates
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.kernel import Kernel
from ucudnn.networks.tables import load_network
from ucudnn.planning.decision import decide
from ucudnn.problem import DataType, MathMode
from ucudnn.settings import Settings

KINDS = (Candidates.GRAPH, Candidates.LEGACY, Candidates.LEGACY_FMA, Candidates.BEST, Candidates.EVERY)
LACKING = {"FFT", "FFT_TILING", "WINOGRAD_NONFUSED"}
FLOATS = [(DataType.FLOAT32, math) for math in MathMode] + [
    (each, MathMode.FMA) for each in DataType if each.itemsize != 4
]


def names(backend, problem):
    return {each.name for each in backend.algorithms(problem)}


@pytest.mark.parametrize(("dtype", "math"), FLOATS)
def test_best_has_legacy_transforms_only_for_float32_without_tf32(dtype, math):
    problem = replace(load_network("alexnet").layers[1].forward, dtype=dtype, math=math)
    assert Candidates.BEST.offers("graph", problem, "eng0")
    wanted = (dtype, math) == (DataType.FLOAT32, MathMode.FMA)
    assert Candidates.BEST.offers("legacy", problem) == wanted
    assert {
        name for name in (*LACKING, "GEMM", "ALGO_0", "WINOGRAD") if Candidates.BEST.offers("legacy", problem, name)
    } == (LACKING if wanted else set())
    for each, apis in (
        (Candidates.GRAPH, {"graph"}),
        (Candidates.LEGACY, {"legacy"}),
        (Candidates.LEGACY_FMA, {"legacy"}),
    ):
        assert {api for api in ("graph", "legacy") if each.offers(api, problem)} == apis
    assert all(Candidates.EVERY.offers(api, problem, "FFT") for api in ("graph", "legacy"))


@pytest.mark.parametrize("network", ["alexnet", "resnet18", "resnet50"])
@pytest.mark.parametrize("limit", ["16MiB", "64MiB", "512MiB"])
def test_without_tf32_plans_are_no_worse_than_those_of_either_api(replay, network, limit):
    kernels = [
        Kernel(layer=each.layer, problem=replace(each.problem, math=MathMode.FMA), count=each.count)
        for each in load_network(network).kernels()
    ]
    settings = Settings.load({}, workspace_limit_bytes=limit, policy="powerOfTwo")
    times = {
        each: time_ms(decide(kernels, Benchmark(replay(network, each)), settings))
        for each in (Candidates.BEST, Candidates.GRAPH, Candidates.LEGACY, Candidates.EVERY)
    }
    either = min(times[Candidates.GRAPH], times[Candidates.LEGACY])
    assert times[Candidates.EVERY] <= times[Candidates.BEST] <= either
    assert times[Candidates.BEST] < either or limit == "16MiB", "where transforms need more than that"
    assert times[Candidates.BEST] <= 1.01 * times[Candidates.EVERY], "what else both have adds next to nothing"
