"""One contract for all backends; a new one adds its name to COMPUTING in the package and no test here."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from ucudnn.backends import COMPUTING, open_backend
from ucudnn.backends.base import Backend, ComputeBackend
from ucudnn.backends.candidates import Candidates
from ucudnn.errors import BackendUnavailableError, ProfileError, UcudnnError
from ucudnn.networks.tables import load_network
from ucudnn.problem import ConvolutionProblem, DataType, Operation
from ucudnn.profiles.measurement import Algorithm, Effort, MeasurementStatus

EFFORT = Effort(warmup=0, repeats=2, time_limit_ms=20)


@pytest.fixture(scope="module", params=[*COMPUTING, "replay:h200"])
def backend(request):
    try:
        return open_backend(request.param, candidates=Candidates.EVERY)
    except BackendUnavailableError as error:
        pytest.skip(f"{request.param} is not here: {str(error)[:80]}")


@pytest.fixture(params=list(Operation), ids=lambda operation: operation.value)
def problem(request):
    """Return a problem that every backend knows, recorded ones included."""
    return load_network("alexnet", 4).layers[2].forward.with_operation(request.param)


def test_name_and_conditions(backend, request):
    assert backend.name.removesuffix(f":{Candidates.EVERY.value}") == request.node.callspec.params["backend"]
    assert backend.conditions()["device"]
    assert all(isinstance(value, str) for value in backend.conditions().values())


def test_each_backend_has_one_lock_which_a_thread_may_take_twice(backend):
    with backend.lock, backend.lock:
        assert not ThreadPoolExecutor(1).submit(backend.lock.acquire, blocking=False).result()
    assert open_backend("cpu").lock is not backend.lock


def test_algorithms_have_names_of_their_own_and_workspaces(backend, problem):
    algorithms = backend.algorithms(problem)
    assert algorithms
    assert max(Counter(algorithm.name for algorithm in algorithms).values()) == 1
    assert all(isinstance(each, Algorithm) and each.workspace_bytes >= 0 for each in algorithms)
    assert backend.algorithms(problem) == algorithms


def test_some_workspace_grows_with_the_micro_batch(backend, problem):
    small = {each.name: each.workspace_bytes for each in backend.algorithms(problem.with_batch(1))}
    large = {each.name: each.workspace_bytes for each in backend.algorithms(problem)}
    assert any(large[name] > small[name] for name in small.keys() & large.keys())


def test_every_algorithm_is_measured(backend, problem):
    with backend.bench(problem) as bench:
        for size in (1, 4):
            for algorithm in backend.algorithms(problem.with_batch(size)):
                measurement = bench.measure(size, algorithm, EFFORT)
                assert measurement.status is MeasurementStatus.MEASURED, measurement.reason
                assert measurement.samples or not isinstance(backend, ComputeBackend), "a profile does not keep it"
                assert measurement.time_ms > 0
                assert measurement.spread_ms >= 0
                assert measurement.algorithm == algorithm


def test_a_problem_that_it_cannot_compute_is_an_error(backend):
    if backend.name.startswith("cudnn"):
        pytest.skip("computes all types")
    unknown = ConvolutionProblem(
        operation=Operation.FORWARD,
        batch=1,
        channels=3,
        spatial=(5, 5),
        filters=2,
        kernel=(3, 3),
        dtype=DataType.BFLOAT16,
    )
    with pytest.raises(UcudnnError, match="bfloat16"):
        backend.algorithms(unknown)


def test_computing_backends_run_what_they_list(backend, problem):
    if not isinstance(backend, ComputeBackend):
        pytest.skip("plans only")
    tensors = backend.operands(problem)
    x, w, y, alignment = backend.bind(*tensors)
    assert alignment == problem.alignment
    for algorithm in backend.algorithms(problem):
        workspace = backend.allocate(algorithm.workspace_bytes)
        call = backend.prepare(problem, algorithm.name)

        def run(call=call, workspace=workspace):
            call.launch(x, w, y, workspace)

        assert backend.elapsed_ms(run) > 0
    with pytest.raises(UcudnnError, match="NO_SUCH"):
        backend.prepare(problem, "NO_SUCH")


def test_workspaces_of_computing_backends_can_follow_each_other(backend, problem):
    if not isinstance(backend, ComputeBackend):
        pytest.skip("plans only")
    assert backend.workspace_unit % 16 == 0
    for size in range(1, problem.batch + 1):
        for each in backend.algorithms(problem.with_batch(size)):
            assert each.workspace_bytes % backend.workspace_unit == 0, each


def test_names_of_no_backend_are_refused():
    assert isinstance(open_backend("auto"), Backend)
    with pytest.raises(BackendUnavailableError, match="backend 'tpu' is not known: give auto, cpu, cudnn"):
        open_backend("tpu")
    with pytest.raises(BackendUnavailableError, match="'replay:' is not"):
        open_backend("replay:")
    with pytest.raises(ProfileError, match="profile 'none' is neither"):
        open_backend("replay:none")
