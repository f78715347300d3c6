"""The handle and its plans, on the CPU backend."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.faulty_backend import check
from tests.support.operands import PROBLEM, QUICK, check_run, direct, operands, poison, relative
from tests.support.problems import make_problem
from ucudnn import Handle
from ucudnn.backends import open_backend
from ucudnn.backends.base import ComputeBackend
from ucudnn.errors import BackendError, BackendUnavailableError, InfeasibleError, InvalidProblemError, SettingsError
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import Operation
from ucudnn.workspace.allocation import DividedWorkspace, SharedWorkspace


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("policy", BatchSizePolicy)
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (1.0, 1.0), (-0.75, 0.5)])
def test_equals_a_direct_convolution(operation, policy, alpha, beta):
    problem = PROBLEM.with_operation(operation)
    handle = Handle(backend="cpu", policy=policy, workspace_limit="20KiB", effort=QUICK)
    options = {"padding": 1, "alpha": alpha, "beta": beta}
    call = {
        Operation.FORWARD: lambda x, w, y: handle.forward(x, w, y, **options),
        Operation.BACKWARD_DATA: lambda x, w, y: handle.backward_data(w, y, x, **options),
        Operation.BACKWARD_FILTER: lambda x, w, y: handle.backward_filter(x, y, w, **options),
    }[operation]
    check_run(problem, call, None, alpha, beta)
    assert handle.workspace_bytes <= 20 * 1024


@given(batch=st.integers(1, 9), limit=st.integers(0, 60_000), operation=st.sampled_from(Operation))
def test_a_limit_is_a_promise(batch, limit, operation):
    problem = PROBLEM.with_operation(operation).with_batch(batch)
    handle = Handle(backend="cpu", workspace_limit=limit, effort=QUICK)
    check(handle, problem)
    assert handle.workspace_bytes <= limit
    assert handle.report().shared_workspace_bytes <= limit


def run_all(handle, seed=0):
    """Run the three operations on two layers and check them."""
    for layer in ("a", "b"):
        for operation in Operation:
            check(handle, PROBLEM.with_operation(operation), seed=seed, layer=layer)


def test_registration_needs_zero_bytes_and_measures_nothing():
    handle = Handle(backend="cpu", effort=QUICK)
    virtual = handle.get_algorithm(PROBLEM, layer="conv")
    assert (virtual.name, virtual.workspace_bytes) == ("UCUDNN", 0)
    assert handle.report().kernels == ()
    handle.optimize()
    assert [(each.layer, each.calls) for each in handle.report().kernels] == [("conv", 0)]


def test_workspace_division_knows_all_layers_and_holds_the_total():
    total = 100_000
    handle = Handle(backend="cpu", total_workspace=total, effort=QUICK)
    for layer in ("a", "b"):
        for operation in Operation:
            handle.get_algorithm(PROBLEM.with_operation(operation), layer=layer)
            handle.get_algorithm(PROBLEM.with_operation(operation), layer=layer)  # once more changes nothing
    run_all(handle)
    report = handle.report()
    assert report.method.value == "WD"
    assert len(report.kernels) == 6
    assert [kernel.calls for kernel in report.kernels] == [1] * 6
    assert handle.workspace_bytes == report.workspace_bytes <= total


def test_a_late_kernel_takes_part_in_a_new_division():
    handle = Handle(backend="cpu", total_workspace=60_000, effort=QUICK)
    check(handle, layer="a")
    run_all(handle)
    assert len(handle.report().kernels) == 6
    assert handle.workspace_bytes <= 60_000


def test_plans_are_made_once():
    handle = Handle(backend="cpu", effort=QUICK)
    run_all(handle)
    report = handle.report()
    run_all(handle, seed=1)
    again = handle.report()
    assert again.benchmark_seconds == report.benchmark_seconds
    assert [kernel.calls for kernel in again.kernels] == [2] * 6


def test_environment_and_arguments(monkeypatch):
    monkeypatch.setenv("UCUDNN_BATCH_SIZE_POLICY", "undivided")
    monkeypatch.setenv("UCUDNN_DEFAULT_WORKSPACE_LIMIT", "0")
    handle = Handle(backend="cpu", workspace_limit="1MiB", effort=QUICK)
    run_all(handle)
    assert handle.report().policy == "undivided"
    assert handle.report().limit_bytes == 2**20
    monkeypatch.setenv("UCUDNN_BACKEND", "cudnn:fastest")
    with pytest.raises(BackendUnavailableError, match="'cudnn:fastest': cudnn has candidates best, graph, legacy"):
        Handle()
    with pytest.raises(SettingsError, match="workspace_limit: size 'much' cannot be read"):
        Handle(workspace_limit="much")


def test_a_recorded_gpu_can_be_planned_for_but_cannot_run():
    handle = Handle(backend="replay:h200", workspace_limit="64MiB")
    problem = make_problem(
        batch=256, channels=64, spatial=(27, 27), filters=192, kernel=(5, 5), padding=(2, 2), groups=1
    )
    handle.get_algorithm(problem, layer="conv2")
    handle.optimize()
    (kernel,) = handle.report().kernels
    assert kernel.configuration.startswith("4x64 eng67")
    assert kernel.speedup == pytest.approx(1.45, abs=0.01)
    with pytest.raises(BackendError, match="replay:h200 plans but cannot execute"):
        handle.convolve(problem, None, None, None)


def test_arrays_that_do_not_fit_are_refused_before_the_output_changes():
    x, w, y = operands(PROBLEM)
    y[...] = 7
    with pytest.raises(InvalidProblemError, match="y has shape"):
        Handle(backend="cpu").forward(x, w, y, padding=0)
    assert (y == 7).all()


def test_threads_wait_for_each_other():
    handle = Handle(backend="cpu", workspace_limit="40KiB", effort=QUICK)

    def work(seed):
        for _ in range(5):
            run_all(handle, seed)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))  # raises what a thread raised
    assert sum(kernel.calls for kernel in handle.report().kernels) == 4 * 5 * 6


def test_segments_are_disjoint_and_the_shared_workspace_grows():
    backend = open_backend("cpu")
    assert isinstance(backend, ComputeBackend)
    divided = DividedWorkspace(backend, {"a": (0, 64), "b": (64, 128), "c": (192, 0)})
    assert not divided.grows(0, 64)
    for value, (key, size) in enumerate((("a", 64), ("b", 128), ("c", 0)), start=1):
        segment = divided.buffer(key, 0, size)
        assert segment.nbytes == size
        segment[...] = value
    assert (divided.buffer("a", 0, 64) == 1).all()
    assert (divided.buffer("b", 1, 128) == 2).all()
    assert divided.size_bytes == 192
    shared = SharedWorkspace[str](backend)
    first = shared.buffer("a", 7, 100)
    assert shared.buffer("b", 7, 50) is first
    assert not np.shares_memory(shared.buffer("b", 8, 50), first)  # another queue runs at the same time
    assert shared.grows(7, 200)
    assert not shared.grows(8, 50)
    assert shared.buffer("b", 7, 200).nbytes >= 200
    assert shared.size_bytes == 250


def layers_of(handle):
    return [(kernel.layer, kernel.operation, kernel.calls) for kernel in handle.report().kernels]


def test_layers_without_a_name_get_segments_of_their_own():
    handle = Handle(backend="cpu", total_workspace="1MiB", effort=QUICK)
    x, _, y = operands(PROBLEM)
    filters = [operands(PROBLEM)[1] for _ in range(3)]
    for _ in range(3):
        for w in filters:
            handle.convolve(PROBLEM, x, w, y)
    assert layers_of(handle) == [(f"#{number}", "Forward", 3) for number in (1, 2, 3)]
    kernels = handle.report().kernels
    assert handle.workspace_bytes == sum(kernel.workspace_bytes for kernel in kernels)


def test_shapes_of_one_layer_share_a_segment():
    handle = Handle(backend="cpu", total_workspace="1MiB", effort=QUICK)
    small = PROBLEM.with_batch(PROBLEM.batch // 2)
    for problem in (PROBLEM, small, PROBLEM, small):
        handle.convolve(problem, *operands(problem), layer="a")
    report = handle.report()
    assert [kernel.calls for kernel in report.kernels] == [2, 2]
    assert handle.workspace_bytes == max(kernel.workspace_bytes for kernel in report.kernels)


def test_only_branches_of_a_group_need_segments_of_their_own():
    names = ["a", "b1", "b2", "c", "alone"]
    groups = [["a", ["b1", "b2"], "c"]]
    handle = Handle(backend="cpu", total_workspace="1MiB", groups=groups, effort=QUICK)
    rng = np.random.default_rng()
    for name in names:
        handle.get_algorithm(PROBLEM, layer=name)
    for name in rng.permutation(names):
        check(handle, layer=str(name))
    report = handle.report()
    own = {kernel.layer: kernel.workspace_bytes for kernel in report.kernels}
    assert own["alone"] == max(own.values())
    together = own["a"] + max(own["b1"], own["b2"]) + own["c"]
    assert handle.workspace_bytes == report.arena_bytes == max(together, own["alone"]) <= 2**20
    times = {each.name: each.time_ms for each in report.alternatives}
    assert list(times) == ["WR", "WD", "WD, grouped", "shared"]
    assert times["WD"] >= times["WD, grouped"] >= times["shared"]


def test_groups_without_a_total_are_refused():
    with pytest.raises(SettingsError, match="groups say how a total is divided: give total_workspace, too"):
        Handle(backend="cpu", groups=[["a", "b"]])
    Handle(backend="cpu", groups=[[]])


def test_callers_cannot_use_made_up_names_of_layers():
    handle = Handle(backend="cpu", total_workspace="1MiB", effort=QUICK)
    with pytest.raises(SettingsError, match="layer='#1': names that begin with # are"):
        handle.convolve(PROBLEM, *operands(PROBLEM), layer="#1")
    with pytest.raises(SettingsError, match="layer='#1': names that begin with # are"):
        handle.get_algorithm(PROBLEM, layer="#1")


def test_a_layer_that_does_not_fit_the_total_shares_a_segment(hungry):
    least = min(each.workspace_bytes for each in hungry.algorithms(PROBLEM))
    total = least + least // 2
    handle = Handle(backend=hungry, total_workspace=total, policy="undivided", effort=QUICK)
    filters = [operands(PROBLEM, seed)[1] for seed in range(3)]
    x, _, y = operands(PROBLEM)
    for _ in range(2):
        for w in filters:
            poison(y, 0.0)
            handle.convolve(PROBLEM, x, w, y)
            assert relative(y, direct(PROBLEM, x, w, y, 1.0, 0.0)) < 1e-12
    assert layers_of(handle) == [("#1", "Forward", 6)]
    assert handle.workspace_bytes <= total
    with pytest.raises(InfeasibleError):  # a name that was given is a layer of its own
        handle.convolve(PROBLEM, x, filters[0], y, layer="other")
    handle.convolve(PROBLEM, x, filters[0], y)


def test_a_report_counts_the_time_of_all_divisions(hungry):
    handle = Handle(backend=hungry, total_workspace="1MiB", effort=QUICK)
    told = []
    for batch in (6, 4, 2):
        problem = PROBLEM.with_batch(batch)
        handle.convolve(problem, *operands(problem))
        report = handle.report()
        told.append((report.benchmark_seconds, report.solver_seconds))
    for earlier, later in pairwise(told):
        assert all(one < other for one, other in zip(earlier, later, strict=True))
