"""Spare memory of the caller serves as workspace, if it is larger than the limit."""

from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tests.support.faulty_backend import FaultyBackend
from tests.support.operands import PROBLEM, QUICK, check_run, operands
from ucudnn import Handle
from ucudnn.backends.base import Spare
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.errors import BackendError
from ucudnn.problem import Operation

pytestmark = pytest.mark.usefixtures("hungry")  # every algorithm needs workspace

GRADIENT = replace(PROBLEM, operation=Operation.BACKWARD_FILTER)
LIMIT = "20KiB"


def memory(size_bytes=400_000, offset=3):
    """Return an array of NaN that is not aligned as workspaces are."""
    whole = np.full(size_bytes // 8 + offset, np.nan)
    return whole[offset:]


def check(handle, problem, array, alpha=1.0, beta=0.0):
    """Compute once with an array as spare memory, compare the output, and return the spare memory."""
    spare = handle.backend.spare(array, array.nbytes)
    run = partial(handle.convolve, problem, alpha=alpha, beta=beta, spare=spare)
    check_run(problem, run, 1, alpha=alpha, beta=beta)
    return spare


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (0.5, 1.0)])
def test_spare_memory_beyond_the_limit_is_the_workspace(operation, alpha, beta):
    problem = replace(PROBLEM, operation=operation)
    backend = FaultyBackend()
    handle = Handle(backend=backend, workspace_limit=LIMIT, effort=QUICK)
    array = memory()
    backend.memory = 0
    for _ in range(2):
        spare = check(handle, problem, array, alpha, beta)
    assert not backend.held, "nothing was allocated"
    assert handle.workspace_bytes == 0
    assert not np.isnan(array).all(), "it was used"
    (kernel,) = handle.report().kernels
    assert kernel.workspace_bytes == 0
    assert 0 < kernel.spare_bytes <= spare.size_bytes
    assert f"spare {kernel.spare_bytes / 1024:.1f}"[:8] in str(handle.report())


@pytest.mark.parametrize("options", [{"workspace_limit": "1MiB"}, {"total_workspace": "1MiB"}], ids=["enough", "WD"])
def test_spare_memory_is_not_touched_within_the_limit_or_under_wd(options):
    handle = Handle(backend="cpu", effort=QUICK, **options)
    array = memory()
    check(handle, GRADIENT, array)
    assert np.isnan(array).all()
    assert handle.workspace_bytes > 0
    assert all(kernel.spare_bytes == 0 for kernel in handle.report().kernels)


def test_calls_with_and_without_spare_memory_are_different_kernels():
    handle = Handle(backend="cpu", workspace_limit=LIMIT, effort=QUICK)
    for _ in range(2):
        check(handle, GRADIENT, memory())
        check_run(GRADIENT, partial(handle.convolve, GRADIENT))
    with_spare, without = handle.report().kernels
    assert (with_spare.calls, without.calls) == (2, 2)
    assert with_spare.workspace_bytes == 0
    assert 0 < without.workspace_bytes <= 20 * 1024
    assert handle.workspace_bytes == without.workspace_bytes


def test_the_rest_of_a_failed_plan_uses_the_spare_memory():
    backend = FaultyBackend()
    handle = Handle(backend=backend, workspace_limit=LIMIT, effort=QUICK)
    array = memory()
    check(handle, GRADIENT, array)
    (entry,) = handle._entries.values()
    backend.broken = {entry.decision.configuration.parts[-1].algorithm}
    backend.memory = 0
    for _ in range(2):
        check(handle, GRADIENT, array)
    assert not backend.held


def test_similar_sizes_of_spare_memory_share_a_plan():
    handle = Handle(backend="cpu", workspace_limit=LIMIT, effort=QUICK)
    sizes = {handle.plans.spare_workspace_bytes(size) for size in range(200_000, 400_000, 997)}
    assert len(sizes) <= 10
    assert all(
        size <= 200_000 + 997 * index and size > 0.87 * (200_000 + 997 * index)
        for index, size in enumerate(handle.plans.spare_workspace_bytes(200_000 + 997 * each) for each in range(200))
    )
    for more in range(5):
        check(handle, GRADIENT, memory(400_000 + 8 * more))
    assert len(handle._entries) == 1


def given(handle, size_bytes):
    """Return newly allocated spare memory."""
    return Spare(handle.backend.allocate(size_bytes), size_bytes)


def test_a_launcher_says_how_much_spare_memory_it_needs():
    backend = FaultyBackend()
    handle = Handle(backend=backend, workspace_limit=LIMIT, effort=QUICK)
    room = handle.plans.spare_workspace_bytes(400_000)
    launch = handle.plans.launcher(GRADIENT, "", room, plan=True)
    needs = launch.needs()
    assert 20 * 1024 < needs <= room
    for _ in range(2):
        check_run(GRADIENT, lambda x, w, y: launch(x, w, y, given(handle, needs)), 6)
    with pytest.raises(BackendError, match=r"it needs spare memory of .* but has"):
        launch(*operands(GRADIENT), given(handle, needs - 256))
    assert handle.workspace_bytes == 0
    assert (
        Handle(backend="cpu", total_workspace="1MiB", effort=QUICK).plans.launcher(GRADIENT, "", 0, plan=True) is None
    )


def test_the_rest_of_a_failed_plan_uses_no_more_than_was_given():
    backend = FaultyBackend()
    handle = Handle(backend=backend, workspace_limit=LIMIT, effort=QUICK)
    launch = handle.plans.launcher(GRADIENT, "", handle.plans.spare_workspace_bytes(400_000), plan=True)
    (entry,) = handle._entries.values()
    for _ in range(3):  # one algorithm after another
        spare = given(handle, launch.needs())
        backend.broken = {*backend.broken, entry.decision.configuration.parts[-1].algorithm}
        with suppress(BackendError):  # the rest needs more than was given
            check_run(GRADIENT, lambda x, w, y, spare=spare: launch(x, w, y, spare), 7)
    check_run(GRADIENT, lambda x, w, y: launch(x, w, y, given(handle, launch.needs())), 7)


@pytest.mark.parametrize("collective", [False, True])
def test_a_launcher_takes_less_if_it_cannot_allocate_spare_memory(monkeypatch, collective):
    backend = FaultyBackend()
    handle = Handle(backend=backend, workspace_limit=LIMIT, effort=QUICK)
    if collective:  # what fits into less was measured before, because the fastest may already be small
        handle.plans.launcher(GRADIENT, "", handle.plans.spare_workspace_bytes(15_500), plan=True)
    launch = handle.plans.launcher(GRADIENT, "", handle.plans.spare_workspace_bytes(400_000), plan=True)
    needs, measured = launch.needs(), handle._benchmark.measured
    if collective:  # a rank that measured alone would wait for the others
        monkeypatch.setattr(Benchmark, "collective", True)
        monkeypatch.setattr(Benchmark, "explore", None)
    for _ in range(1 if collective else 2):
        backend.memory = launch.needs() - 1
        check_run(GRADIENT, launch, 8)
    assert launch.needs() <= needs // (2 if collective else 4)
    assert not collective or handle._benchmark.measured == measured
