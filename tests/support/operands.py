"""A small problem, its operands on the host, and what they should become."""

import numpy as np

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
    return {Operation.FORWARD: y, Operation.BACKWARD_DATA: x, Operation.BACKWARD_FILTER: w}[problem.operation]


def poison(out, beta):
    """Make sure that an output that must not be read is not read, and that all of it is written."""
    if beta == 0:
        out[...] = np.nan


def relative(found, expected):
    """Return the relative L2 distance; NaN where anything was left unwritten."""
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def direct(problem, x, w, y, alpha, beta):
    """Compute the problem tap by tap (padding 1, stride 1, one group, NCHW), in float64, written on its own."""
    n, c, h, v = problem.x_shape
    padded = np.zeros((n, c, h + 2, v + 2))
    padded[:, :, 1:-1, 1:-1] = x
    if problem.operation is Operation.FORWARD:
        out = sum(
            np.einsum("kc,nchw->nkhw", w[:, :, i, j], padded[:, :, i : i + h, j : j + v])
            for i in range(3)
            for j in range(3)
        )
        return alpha * out + (beta * y if beta else 0)
    if problem.operation is Operation.BACKWARD_DATA:
        gradient = np.zeros_like(padded)
        for i in range(3):
            for j in range(3):
                gradient[:, :, i : i + h, j : j + v] += np.einsum("kc,nkhw->nchw", w[:, :, i, j], y)
        return alpha * gradient[:, :, 1:-1, 1:-1] + (beta * x if beta else 0)
    out = np.stack(
        [
            np.stack([np.einsum("nkhw,nchw->kc", y, padded[:, :, i : i + h, j : j + v]) for j in range(3)], axis=-1)
            for i in range(3)
        ],
        axis=-2,
    )
    return alpha * out + (beta * w if beta else 0)
