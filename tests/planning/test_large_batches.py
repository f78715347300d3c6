"""Plans of mini-batches of up to 2**31 - 1 samples: nothing grows with the mini-batch but the configuration."""

import tracemalloc

import pytest

from tests.support.counting_backend import CountingBackend
from tests.support.problems import make_problem
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.recording import NO_LIMIT
from ucudnn.benchmarking.request import request_of, requests_of
from ucudnn.errors import InfeasibleError, SettingsError
from ucudnn.kernel import Kernel
from ucudnn.planning.decision import decide
from ucudnn.planning.replanning import Replanner
from ucudnn.policy import BatchSizePolicy
from ucudnn.settings import Settings
from ucudnn.solvers.sums import MOST_DENSE, MOST_PARTS
from ucudnn.workspace.spare import own_bytes, parts_in_tail

LARGE = [MOST_DENSE + 1, 2**31 - 1]
POLICIES = [each for each in BatchSizePolicy if each is not BatchSizePolicy.ALL]
MOST_BYTES = 32 << 20  # of which a few configurations of up to 65,536 parts take the most


@pytest.fixture
def memory():
    """Trace memory; the test fails if its peak is in proportion to the mini-batch."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MOST_BYTES


def settings_of(policy, divides, limit):
    key = "total_workspace_bytes" if divides else "workspace_limit_bytes"
    return Settings(policy=policy, **{key: limit})


@pytest.mark.parametrize("batch", LARGE)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("divides", [False, True])
def test_a_large_mini_batch_is_planned_in_few_steps(memory, batch, policy, divides):
    backend = CountingBackend({"A": 0, "B": 100, "BROKEN": 3})
    kernel = Kernel(layer="a", problem=make_problem(batch=batch))
    decisions = decide([kernel], Benchmark(backend), settings_of(policy, divides, 100 * batch))
    (found,) = decisions.kernels
    assert found.configuration.size == batch
    assert len(found.configuration.parts) <= MOST_PARTS
    assert len(backend.measured) <= 700


@pytest.mark.parametrize("batch", LARGE)
@pytest.mark.parametrize("policy", [BatchSizePolicy.POWER_OF_TWO, BatchSizePolicy.ADAPTIVE])
def test_a_limit_divides_a_large_mini_batch(memory, batch, policy):
    backend = CountingBackend({"A": 100})
    limit = 100 * (batch // 1000)
    (found,) = decide(
        [Kernel(layer="a", problem=make_problem(batch=batch))], Benchmark(backend), settings_of(policy, False, limit)
    ).kernels
    assert found.configuration.size == batch
    assert found.configuration.workspace_bytes <= limit
    assert len(found.configuration.parts) >= 1000


@pytest.mark.parametrize("batch", LARGE[1:])
def test_a_limit_that_needs_too_many_micro_batches_is_refused_with_the_least_that_does_not(memory, batch):
    benchmark = Benchmark(CountingBackend({"A": 100}))
    kernel = Kernel(layer="a", problem=make_problem(batch=batch))
    with pytest.raises(InfeasibleError, match="in at most 65536 micro-batches: at least") as refused:
        decide([kernel], benchmark, settings_of(BatchSizePolicy.POWER_OF_TWO, False, 100))
    limit = refused.value.required_bytes
    (found,) = decide([kernel], benchmark, settings_of(BatchSizePolicy.POWER_OF_TWO, False, limit)).kernels
    assert found.configuration.workspace_bytes == limit
    assert len(found.configuration.parts) <= MOST_PARTS


@pytest.mark.parametrize("batch", LARGE)
def test_all_is_refused_with_the_way_out(memory, batch):
    backend = CountingBackend({"A": 0})
    with pytest.raises(SettingsError, match=rf"a mini-batch of {batch} has more than 16384: choose adaptive or"):
        decide(
            [Kernel(layer="", problem=make_problem(batch=batch))],
            Benchmark(backend),
            Settings(policy=BatchSizePolicy.ALL),
        )
    assert backend.measured == []


@pytest.mark.parametrize("batch", LARGE)
def test_a_failed_algorithm_of_a_large_mini_batch_is_replaced(memory, batch):
    benchmark = Benchmark(CountingBackend({"A": 100, "B": 50}))
    settings = Settings(workspace_limit_bytes=NO_LIMIT)
    kernel = Kernel(layer="", problem=make_problem(batch=batch))
    decide([kernel], benchmark, settings)
    benchmark.discard(kernel.problem, "A")
    again = Replanner(benchmark, settings).decide(kernel, NO_LIMIT)
    assert {part.algorithm for part in again.configuration.parts} == {"B"}
    request = request_of(kernel.problem, settings, NO_LIMIT)
    known = benchmark.known_micro_configurations(request)
    assert {name for each in known for name in each.algorithms} == {"B"}
    assert {each.size for each in known} <= set(request.sizes)
    rest = Replanner(benchmark, settings).rest(kernel.problem, batch // 2, NO_LIMIT)
    assert rest is None or rest.size == batch - batch // 2


@pytest.mark.parametrize("batch", LARGE)
def test_the_tail_of_a_large_output_is_not_searched(memory, batch):
    problem = make_problem(batch=batch, groups=1)
    kernel = Kernel(layer="", problem=problem, fresh=True)
    assert len(requests_of(kernel, Settings(), 1 << 20)) == 1
    (found,) = decide([kernel], Benchmark(CountingBackend({"A": 1})), Settings(workspace_limit_bytes=batch)).kernels
    assert own_bytes(problem, found.configuration) == found.configuration.workspace_bytes
    assert len(parts_in_tail(problem, found.configuration)) == len(found.configuration.parts)
