"""A process whose cuDNN and CuPy are stand-ins: the cuDNN backend, its checks and its slabs, on host memory.

Arguments: the stand-in for cuDNN, a seed, and whether its fast engine refuses gaps between channels.
"""

import ctypes
import json
import sys
from dataclasses import replace

import numpy as np

stub = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # the stand-in for CuPy takes its clock

import ucudnn  # noqa: E402
from tests.support.reference import WRITTEN, reference_convolution  # noqa: E402
from ucudnn.errors import InvalidProblemError  # noqa: E402
from ucudnn.problem import ConvolutionProblem, DataType, Layout, Operation  # noqa: E402
from ucudnn.slabs import is_divisible, row_count  # noqa: E402

rng = np.random.default_rng(int(sys.argv[2]))
stub.stub_refuse_gaps(int(sys.argv[3]))


def number(low, high):
    return int(rng.integers(low, high + 1))


def drawn():
    """Return a random problem."""
    dimensions, groups = number(1, 3), number(1, 2)
    kernel = tuple(number(1, 3) for _ in range(dimensions))
    dilation = tuple(number(1, 2) for _ in range(dimensions))
    reach = [(taps - 1) * spread for taps, spread in zip(kernel, dilation, strict=True)]
    layouts = [each for each in Layout if each.dimensions == dimensions]
    return ConvolutionProblem(
        operation=list(Operation)[number(0, 2)],
        batch=number(1, 2),
        channels=groups * number(1, 2),
        spatial=tuple(size + number(1, 14 if axis == 0 else 4) for axis, size in enumerate(reach)),
        filters=groups * number(1, 2),
        kernel=kernel,
        padding=tuple(number(0, size) for size in reach),
        stride=tuple(number(1, 2) for _ in range(dimensions)),
        dilation=dilation,
        groups=groups,
        dtype=(DataType.FLOAT32, DataType.FLOAT64)[number(0, 1)],
        layout=layouts[number(0, 1)],
    )


def error_of(problem, handle, alpha, beta):
    """Return the error of a call on fresh numbers."""
    shapes = {"x": problem.x_shape, "w": problem.w_shape, "y": problem.y_shape}
    values = {name: rng.uniform(-1, 1, shape).astype(problem.dtype.value) for name, shape in shapes.items()}
    first = {
        name: np.moveaxis(value, -1, 1) if problem.layout.channels_last else value for name, value in values.items()
    }
    exact = {name: np.array(value, np.float64) for name, value in first.items()}
    written = WRITTEN[problem.operation]
    expected = alpha * reference_convolution(problem, *(exact[name] for name in "xwy"))
    if beta:
        expected += beta * exact[written]
    else:
        values[written].fill(np.nan)
    # A call with another alignment would have its own plan.
    handle.convolve(
        replace(problem, alignment=problem.dtype.itemsize),
        *(values[name].ctypes.data for name in "xwy"),
        alpha=alpha,
        beta=beta,
    )
    size = max(float(np.abs(expected).max()), 1e-3)
    return float(np.abs(first[written] - expected).max()) / size


for _ in range(25):
    try:
        problem = drawn()
    except InvalidProblemError:
        continue
    stub.stub_rows(row_count(problem))
    sample = problem.channels * int(np.prod(problem.spatial)) * problem.dtype.itemsize
    limit = max(512, -(-sample // number(1, 4)))
    handle = ucudnn.Handle(backend="cudnn", workspace_limit=limit, slabs=number(0, 4) > 0)
    errors = [error_of(problem, handle, alpha, beta) for alpha, beta in ((1.0, 0.0), (1.0, 1.0), (-0.5, 0.25))]
    (kernel,) = handle.report().kernels
    sys.stdout.write(
        json.dumps(
            {
                "problem": str(problem),
                "errors": errors,
                "tolerance": 1e-12 if problem.dtype is DataType.FLOAT64 else 2e-5,
                "configuration": kernel.configuration,
                "workspace": handle.workspace_bytes,
                "limit": limit,
                "divisible": is_divisible(problem),
            }
        )
        + "\n"
    )
