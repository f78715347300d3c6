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
from tests.support.operands import operands, poison, written  # noqa: E402
from tests.support.reference import reference_convolution  # noqa: E402
from ucudnn.errors import InvalidProblemError  # noqa: E402
from ucudnn.problem import ConvolutionProblem, DataType, Layout, Operation  # noqa: E402
from ucudnn.slabs import row_count  # noqa: E402

TOLERANCES = {DataType.FLOAT32: 2e-5, DataType.FLOAT64: 1e-12}
rng = np.random.default_rng(int(sys.argv[2]))
stub.stub_refuse_gaps(int(sys.argv[3]))


def error_of(problem, handle, alpha, beta):
    """Return the error of a call on fresh numbers, relative to the largest of them."""
    arrays = operands(problem, rng)
    views = [np.moveaxis(each, -1, 1) if problem.layout.channels_last else each for each in arrays]
    exact = [np.array(each, np.float64) for each in views]
    expected = alpha * reference_convolution(problem, *exact) + beta * written(problem, *exact)
    poison(written(problem, *arrays), beta)
    # A call with another alignment would have its own plan.
    aligned = replace(problem, alignment=problem.dtype.itemsize)
    handle.convolve(aligned, *(each.ctypes.data for each in arrays), alpha=alpha, beta=beta)
    error = np.abs(written(problem, *views) - expected).max()
    return float(error / max(np.abs(expected).max(), 1e-3))


def number(low, high):
    return int(rng.integers(low, high + 1))


def drawn():
    """Return a random problem; a few have padding that no problem may have."""
    axes, groups = range(number(1, 3)), number(1, 2)
    kernel, dilation = (tuple(number(1, most) for _ in axes) for most in (3, 2))
    reach = [(taps - 1) * spread for taps, spread in zip(kernel, dilation, strict=True)]
    return ConvolutionProblem(
        operation=list(Operation)[number(0, 2)],
        batch=number(1, 2),
        channels=groups * number(1, 2),
        spatial=tuple(size + number(1, 4 if axis else 14) for axis, size in enumerate(reach)),
        filters=groups * number(1, 2),
        kernel=kernel,
        padding=tuple(number(0, size) for size in reach),
        stride=tuple(number(1, 2) for _ in axes),
        dilation=dilation,
        groups=groups,
        dtype=list(TOLERANCES)[number(0, 1)],
        layout=[each for each in Layout if each.dimensions == len(axes)][number(0, 1)],
    )


for _ in range(25):
    try:
        problem = drawn()
    except InvalidProblemError:
        continue
    stub.stub_rows(row_count(problem))
    limit = max(512, -(-problem.x_sample * problem.dtype.itemsize // number(1, 4)))
    handle = ucudnn.Handle(backend="cudnn", workspace_limit=limit, slabs=number(0, 4) > 0)
    errors = [error_of(problem, handle, alpha, beta) for alpha, beta in ((1.0, 0.0), (1.0, 1.0), (-0.5, 0.25))]
    (kernel,) = handle.report().kernels
    row = {
        "problem": str(problem),
        "error": max(errors) / TOLERANCES[problem.dtype],
        "configuration": kernel.configuration,
        "workspace": handle.workspace_bytes,
        "limit": limit,
    }
    sys.stdout.write(json.dumps(row) + "\n")
