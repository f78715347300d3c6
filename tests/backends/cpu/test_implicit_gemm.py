"""IMPLICIT_GEMM multiplies several taps at a time where there are few channels, and each product fits the tiles."""

from math import prod

import numpy as np
import pytest

from tests.support.operands import operands
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.backends.cpu.implicit_gemm import TILE_BYTES
from ucudnn.problem import ConvolutionProblem, Operation

CPU = CpuBackend()
BASE = {"batch": 2, "spatial": (19, 19), "filters": 5, "kernel": (4, 4), "stride": (3, 3)}


def products(monkeypatch, problem):
    """Return the shapes of both operands of all products that compute a problem."""
    found = []

    def noted(a, b, out):
        found.append((a.shape, b.shape))
        assert a.nbytes + b.nbytes + out.nbytes <= TILE_BYTES
        return multiply(a, b, out=out)

    multiply = np.matmul
    monkeypatch.setattr(np, "matmul", noted)
    x, w, y = operands(problem)
    call = CPU.prepare(problem, "IMPLICIT_GEMM")
    call.launch(x, w, y, CPU.allocate(call.workspace_bytes))
    return found


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize(("channels", "together"), [(1, 16), (2, 16), (3, 10), (16, 2), (32, 1), (200, 1)])
def test_taps_that_meet_the_same_outputs_are_multiplied_together(monkeypatch, operation, channels, together):
    problem = ConvolutionProblem(operation=operation, channels=channels, **BASE)
    found = products(monkeypatch, problem)
    taps, blocks = prod(problem.kernel), -(-channels // 64)
    positions = problem.batch * prod(problem.output)
    assert sum(prod(a) * b[1] for a, b in found) == problem.multiplications
    assert len(found) <= -(-taps // together) * blocks * -(-positions // 50)


def test_padding_takes_outputs_from_some_taps_which_are_multiplied_apart(monkeypatch):
    problem = ConvolutionProblem(operation=Operation.FORWARD, channels=3, padding=(1, 1), **BASE)
    depths = {a[1] for a, _ in products(monkeypatch, problem)}
    assert {3 * 1, 3 * 3, 3 * 9} == depths
