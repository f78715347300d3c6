import pytest

from tests.support.counting_backend import CountingBackend
from tests.support.plan_time import time_ms
from tests.support.problems import make_problem
from ucudnn.backends.candidates import Candidates
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.errors import InfeasibleError, MeasurementError
from ucudnn.kernel import Kernel
from ucudnn.networks.tables import load_network
from ucudnn.planning.decision import Method, decide
from ucudnn.settings import Settings

MIB = 2**20


def plan(replay, network, candidates=Candidates.GRAPH, **limits):
    return decide(load_network(network).kernels(), Benchmark(replay(network, candidates)), Settings(**limits))


def undivided_ms(decisions):
    return sum(each.undivided.time_ms * each.kernel.count for each in decisions.kernels)


def workspace_bytes(decisions):
    return sum(each.workspace_bytes * each.kernel.count for each in decisions.kernels)


@pytest.mark.parametrize(
    ("network", "candidates", "limit_mib", "undivided", "micro_batched"),
    [
        ("alexnet", Candidates.GRAPH, 64, 37.08, 11.69),
        ("alexnet", Candidates.GRAPH, 16, 40.14, 17.57),
        ("resnet18", Candidates.GRAPH, 32, 46.70, 20.84),
        ("resnet50", Candidates.GRAPH, 16, 18.96, 14.52),
        ("alexnet", Candidates.LEGACY, 64, 47.91, 16.51),
        ("alexnet", Candidates.LEGACY_FMA, 64, 44.78, 31.48),
    ],
)
def test_wr_on_the_recorded_profile(replay, network, candidates, limit_mib, undivided, micro_batched):
    decisions = plan(replay, network, candidates, workspace_limit_bytes=limit_mib * MIB)
    assert decisions.method is Method.WR
    assert undivided_ms(decisions) == pytest.approx(undivided, abs=0.005)
    assert time_ms(decisions) == pytest.approx(micro_batched, abs=0.005)
    assert max(each.workspace_bytes for each in decisions.kernels) <= limit_mib * MIB


@pytest.mark.parametrize(
    ("network", "total_mib", "micro_batched_ms"),
    [
        ("alexnet", 60, 27.36),
        ("alexnet", 120, 19.14),
        ("alexnet", 960, 10.28),
        ("resnet18", 480, 29.96),
        ("resnet50", 960, 14.61),
        ("resnet50", 2544, 11.12),
    ],
)
def test_wd_on_the_recorded_profile(replay, network, total_mib, micro_batched_ms):
    decisions = plan(replay, network, total_workspace_bytes=total_mib * MIB)
    assert decisions.method is Method.WD
    assert time_ms(decisions) == pytest.approx(micro_batched_ms, abs=0.005)
    assert workspace_bytes(decisions) <= total_mib * MIB
    expected = {(kernel.layer, kernel.operation): kernel.count for kernel in load_network(network).kernels()}
    found = dict.fromkeys(expected, 0)
    for each in decisions.kernels:
        found[each.kernel.layer, each.kernel.operation] += each.kernel.count
        assert each.configuration.size == each.kernel.problem.batch
    assert found == expected


def test_wd_is_compared_with_equal_shares(replay):
    divided = plan(replay, "alexnet", total_workspace_bytes=120 * MIB)
    reused = plan(replay, "alexnet", workspace_limit_bytes=8 * MIB)
    assert undivided_ms(divided) == undivided_ms(reused)
    assert time_ms(divided) < time_ms(reused) < undivided_ms(reused)


KERNEL = Kernel(layer="conv", problem=make_problem())


def test_the_error_of_an_infeasible_limit_names_the_kernel_and_its_need():
    benchmark = Benchmark(CountingBackend({"A": 100, "B": 70}))
    with pytest.raises(InfeasibleError, match=r"conv \(Forward\): .* limit of 69 bytes.* at least 70 bytes") as caught:
        decide([KERNEL], benchmark, Settings(workspace_limit_bytes=69))
    assert caught.value.required_bytes == 70
    assert workspace_bytes(decide([KERNEL], benchmark, Settings(workspace_limit_bytes=70))) == 70


def test_the_error_of_an_infeasible_total_names_the_need_of_all_kernels():
    benchmark = Benchmark(CountingBackend({"A": 100}))
    other = Kernel(layer="other", problem=make_problem(filters=2), count=2)
    message = r"total workspace of 299 bytes.* together need at least 300 bytes.*conv \(Forward\) alone 100 bytes"
    with pytest.raises(InfeasibleError, match=message) as caught:
        decide([KERNEL, other], benchmark, Settings(total_workspace_bytes=299))
    assert caught.value.required_bytes == 300
    assert workspace_bytes(decide([KERNEL, other], benchmark, Settings(total_workspace_bytes=300))) == 300


def test_the_error_says_that_no_algorithm_could_be_measured():
    with pytest.raises(MeasurementError, match=r"conv \(Forward\): no algorithm could be measured"):
        decide([KERNEL], Benchmark(CountingBackend({"BROKEN": 0})), Settings())


def test_no_undivided_algorithm_within_the_limit():
    decisions = decide([KERNEL], Benchmark(CountingBackend({"A": 100})), Settings(workspace_limit_bytes=400))
    assert decisions.kernels[0].undivided is None
    assert str(decisions.kernels[0].configuration) == "2x4 A"
