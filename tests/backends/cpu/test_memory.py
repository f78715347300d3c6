"""While a call runs, nothing is allocated but its workspace, which was allocated before."""

import tracemalloc
from dataclasses import replace
from itertools import cycle, islice, product

import pytest

from ucudnn.backends.base import Scaling
from ucudnn.backends.cpu.backend import CPU_ALGORITHMS, CpuBackend
from ucudnn.problem import ConvolutionProblem, DataType, Layout, Operation

ALLOWED_BYTES = 64 * 1024
BACKEND = CpuBackend()

# A sample and the filters have more bytes than are allowed where possible, so that a copy of any of them shows.
SHAPES = {
    "dense": {"batch": 3, "channels": 48, "spatial": (22, 20), "filters": 48, "kernel": (3, 3), "padding": (1, 1)},
    "grouped": {
        "batch": 3, "channels": 128, "spatial": (20, 20), "filters": 128, "kernel": (3, 3), "padding": (1, 1),
        "groups": 2, "layout": Layout.NHWC,
    },
    "depthwise": {
        "batch": 4, "channels": 128, "spatial": (20, 16), "filters": 128, "kernel": (3, 3), "padding": (1, 1),
        "groups": 128,
    },
    "one sample": {
        "batch": 1, "channels": 64, "spatial": (60, 40), "filters": 64, "kernel": (3, 3), "padding": (2, 0),
    },
    "volume": {
        "batch": 2, "channels": 16, "spatial": (16, 14, 14), "filters": 24, "kernel": (3, 2, 3), "padding": (1, 1, 0),
    },
    "line": {"batch": 3, "channels": 8, "spatial": (9001,), "filters": 8, "kernel": (9,), "padding": (4,)},
    "strided": {
        "batch": 3, "channels": 24, "spatial": (61, 63), "filters": 64, "kernel": (5, 3), "padding": (2, 0),
        "stride": (2, 1), "dilation": (1, 2), "layout": Layout.NHWC,
    },
    "first layer": {
        "batch": 3, "channels": 3, "spatial": (112, 112), "filters": 16, "kernel": (7, 7), "stride": (2, 2),
    },
    "pointwise": {"batch": 5, "channels": 64, "spatial": (20, 21), "filters": 48, "kernel": (1, 1)},
}  # fmt: skip


def peak_bytes(problem, algorithm, alpha, beta):
    call = BACKEND.prepare(problem, algorithm)
    workspace = BACKEND.allocate(call.workspace_bytes)
    x, w, y = BACKEND.operands(problem)
    scaling = Scaling(alpha, beta)
    BACKEND.prepare(problem.with_batch(1), algorithm).launch(
        x, w, y, workspace, scaling=scaling
    )  # allocates what is allocated once for each thread and each code object of Python

    def traced():
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            call.launch(x, w, y, workspace, scaling=scaling)
            return tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()

    peak = traced()
    for _ in range(2):  # another thread, such as one of pytest-xdist, may have allocated meanwhile
        peak = peak if peak <= ALLOWED_BYTES else min(peak, traced())
    return peak


def pairs_of(shape):
    """Return algorithms that apply to a shape, each with an operation; together with all operations."""
    plain = ConvolutionProblem(operation=Operation.FORWARD, dtype=DataType.FLOAT32, **SHAPES[shape])
    names = [name for name, algorithm in CPU_ALGORITHMS.items() if algorithm.applies(plain)]
    if len(names) < len(Operation):
        return [(name, operation) for name in names for operation in Operation]
    turned = [*Operation, *Operation][[*SHAPES].index(shape) % 3 :]  # so that each algorithm gets all operations
    return [(name, turned[number % 3]) for number, name in enumerate(names)]


@pytest.mark.parametrize("shape", SHAPES)
def test_allocates_nothing_but_the_workspace(shape):
    for algorithm, operation in pairs_of(shape):
        for dtype, alpha, beta in ((DataType.FLOAT32, 1.0, 0.0), (DataType.FLOAT64, 0.5, 0.25)):
            problem = ConvolutionProblem(operation=operation, dtype=dtype, **SHAPES[shape])
            if CPU_ALGORITHMS[algorithm].applies(problem):
                assert peak_bytes(problem, algorithm, alpha, beta) <= ALLOWED_BYTES, (algorithm, operation, dtype)


def test_each_algorithm_and_each_shape_meets_each_operation():
    found = {(shape, *pair) for shape in SHAPES for pair in pairs_of(shape)}
    assert {(shape, operation) for shape, _, operation in found} == {*product(SHAPES, Operation)}
    assert {each[1:] for each in found} == {*product(CPU_ALGORITHMS, Operation)}


# Elements between two samples besides their own, in x and y: odd numbers, and multiples of a row and of a channel.
GAPS = {"odd": (13, 7), "rows": (5 * 20, 3 * 20), "channels": (440, 880)}


@pytest.mark.parametrize(("turn", "shape"), [*enumerate(["dense", "strided", "pointwise"])])
@pytest.mark.parametrize("operation", [Operation.FORWARD, Operation.BACKWARD_DATA], ids=lambda each: each.value)
def test_gaps_between_samples_cost_no_memory(operation, turn, shape):
    dense = ConvolutionProblem(operation=operation, dtype=DataType.FLOAT64, **SHAPES[shape])
    for algorithm, (x_gap, y_gap) in zip(CPU_ALGORITHMS, islice(cycle(GAPS.values()), turn, None), strict=False):
        strides = {"x_batch_stride": dense.x_batch_stride + x_gap, "y_batch_stride": dense.y_batch_stride + y_gap}
        problem = replace(dense, **strides)
        if CPU_ALGORITHMS[algorithm].applies(problem):
            assert peak_bytes(problem, algorithm, 0.5, 0.25) <= ALLOWED_BYTES, algorithm
