"""The kernels of a handle: shapes that change for ever are forgotten, and planned again if they recur."""

import numpy as np
import pytest

from tests.support.operands import QUICK
from ucudnn.errors import UcudnnError
from ucudnn.execution import kernel_plans
from ucudnn.handle import Handle
from ucudnn.kernel import KernelKey
from ucudnn.problem import ConvolutionProblem, Operation

COMMON = {"operation": Operation.FORWARD, "batch": 2, "channels": 3, "filters": 4, "kernel": (3, 3), "padding": (1, 1)}


def test_only_the_latest_kernels_are_kept_and_older_ones_are_planned_again(monkeypatch):
    monkeypatch.setattr(kernel_plans, "_MOST_KERNELS", 4)
    handle = Handle(backend="cpu", database="off", effort=QUICK)
    wide = Handle(backend="cpu", database="off", total_workspace="1MiB", effort=QUICK)
    rng = np.random.default_rng(0)
    for height in (4, 5, 6, 7, 8, 9, 4, 4):
        problem = ConvolutionProblem(**COMMON, spatial=(height, 6))
        x = rng.random((2, 3, height, 6), dtype=np.float32)
        w = rng.random((4, 3, 3, 3), dtype=np.float32)
        found, other = (np.full((2, 4, height, 6), np.nan, np.float32) for _ in range(2))
        handle.convolve(problem, x, w, found)
        wide.convolve(problem, x, w, other, layer="one")
        padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
        expected = np.einsum("nchwij,kcij->nkhw", windows, w.astype(np.float64))
        np.testing.assert_allclose(found, expected, rtol=1e-4)
        np.testing.assert_allclose(other, expected, rtol=1e-4)
    assert [entry.kernel.problem.spatial[0] for entry in handle.plans.entries.values()] == [7, 8, 9, 4]
    assert len(handle.plans.decisions) == 4
    assert [each.calls for each in handle.report().kernels] == [1, 1, 1, 2]
    assert handle.report().changed == 0
    assert len(wide.plans.entries) == 6, "a division has a segment for each kernel"


def test_seconds_are_those_of_decisions_only(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(kernel_plans, "perf_counter", lambda: now[0])
    decide = kernel_plans.decide

    def slow(*arguments):
        now[0] += 2.0
        return decide(*arguments)

    monkeypatch.setattr(kernel_plans, "decide", slow)
    handle = Handle(backend="cpu", database="off", effort=QUICK)
    problem = ConvolutionProblem(**COMMON, spatial=(5, 6))
    x, w = np.ones((2, 3, 5, 6), np.float32), np.ones((4, 3, 3, 3), np.float32)
    for _ in range(3):
        handle.convolve(problem, x, w, np.empty((2, 4, 5, 6), np.float32))
        now[0] += 10.0
        assert handle.plans.seconds == 2.0

    def failing(*_):
        now[0] += 1.0
        raise UcudnnError("nothing fits")

    monkeypatch.setattr(kernel_plans, "decide", failing)
    with pytest.raises(UcudnnError, match="nothing fits"):
        handle.plans.plan(KernelKey("", ConvolutionProblem(**COMMON, spatial=(7, 7)), 0, False))
    assert handle.plans.seconds == 3.0, "an error takes time, too"
