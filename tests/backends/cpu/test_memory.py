"""While a call runs, nothing is allocated but its workspace, which was allocated before."""

import tracemalloc
from dataclasses import replace
from itertools import combinations, product

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


# Elements between two samples besides their own, in x and y: none, odd numbers, multiples of a row and of a channel.
GAPS = {"none": (0, 0), "odd": (13, 7), "rows": (5 * 20, 3 * 20), "channels": (440, 880)}
SCALINGS = {DataType.FLOAT32: (1.0, 0.0), DataType.FLOAT64: (0.5, 0.25)}


def problem_of(shape, operation, dtype, gap):
    dense = ConvolutionProblem(operation=operation, dtype=dtype, **SHAPES[shape])
    x_gap, y_gap = GAPS[gap]
    return replace(dense, x_batch_stride=dense.x_batch_stride + x_gap, y_batch_stride=dense.y_batch_stride + y_gap)


def pairwise(cases):
    """Yield some of the cases, in which any two values meet that meet in a case."""
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    left = set().union(*pairs.values())
    while left:
        case = max(pairs, key=lambda each: len(pairs[each] & left))
        left -= pairs[case]
        yield case


CASES = [
    (algorithm, *case)
    for case in product(SHAPES, Operation, SCALINGS, GAPS)
    for algorithm, planner in CPU_ALGORITHMS.items()
    if planner.applies(problem_of(*case))
]


@pytest.mark.parametrize(
    "case", [*pairwise(CASES)], ids=lambda case: "-".join(getattr(each, "value", each) for each in case)
)
def test_allocates_nothing_but_the_workspace_whatever_gaps_there_are(case):
    algorithm, *rest = case
    problem = problem_of(*rest)
    assert peak_bytes(problem, algorithm, *SCALINGS[problem.dtype]) <= ALLOWED_BYTES
