"""A small problem, its operands on the host, and what they should become."""

import numpy as np

from tests.support.reference import WRITTEN, scaled_reference
from ucudnn.problem import ConvolutionProblem, DataType, Operation
from ucudnn.profiles.measurement import Effort

QUICK = Effort(warmup=0, repeats=1, time_limit_ms=1)


PROBLEM = ConvolutionProblem(
    operation=Operation.FORWARD,
    batch=6,
    channels=4,
    spatial=(9, 8),
    filters=6,
    kernel=(3, 3),
    padding=(1, 1),
    dtype=DataType.FLOAT64,
)


def operands(problem, seed=0):
    """Return random x, w and y of a problem; `seed` may be a generator."""
    random = np.random.default_rng(seed)
    dtype = np.dtype(problem.dtype.value)
    return [
        random.uniform(-0.5, 0.5, shape).astype(dtype) for shape in (problem.x_shape, problem.w_shape, problem.y_shape)
    ]


def written(problem, x, w, y):
    """Return which operand the operation writes."""
    return {"x": x, "w": w, "y": y}[WRITTEN[problem.operation]]


def poison(out, beta):
    """Make sure that an output that must not be read is not read, and that all of it is written."""
    if beta == 0:
        out[...] = np.nan


def relative(found, expected):
    """Return the relative L2 distance; NaN where anything was left unwritten."""
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def check_run(problem, run, seed=0, alpha=1.0, beta=0.0):
    """Run something on x, w and y, and compare what it writes with a reference."""
    x, w, y = operands(problem, seed)
    out = written(problem, x, w, y)
    expected = direct(problem, x, w, y, alpha, beta)
    poison(out, beta)
    run(x, w, y)
    assert relative(out, expected) <= 1e-12


def direct(problem, x, w, y, alpha, beta):
    """Return what the problem's output should become, in float64."""
    return scaled_reference(problem, x, w, y, alpha, beta)
