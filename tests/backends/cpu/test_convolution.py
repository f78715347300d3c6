"""Every algorithm compared with the reference, in poisoned memory with guard bytes."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucudnn.backends.cpu.backend import CPU_ALGORITHMS, CpuBackend
from ucudnn.problem import ConvolutionProblem, DataType, Layout, Operation
from ucudnn.slabs import is_divisible, piece_of, row_count, row_unit, slabs_of

EXAMPLES = 40
PLAIN = {"FFT", "FFT_TILING", "WINOGRAD_2X2", "WINOGRAD_4X4"}
TOLERANCE = {DataType.FLOAT32: 1e-5, DataType.FLOAT64: 1e-12}
LAYOUTS = {1: (Layout.NCW, Layout.NWC), 2: (Layout.NCHW, Layout.NHWC), 3: (Layout.NCDHW, Layout.NDHWC)}
factors = st.sampled_from([0.0, 0.5, 1.0, -1.25]) | st.floats(-2, 2, width=16)


def tolerance(algorithm, dtype):
    return 1e-4 if (algorithm, dtype) == ("WINOGRAD_4X4", DataType.FLOAT32) else TOLERANCE[dtype]


@st.composite
def geometries(draw, algorithm):
    """Draw spatial sizes, kernel, padding, stride and dilation that the algorithm applies to."""
    winograd, plain = algorithm.startswith("WINOGRAD"), algorithm in PLAIN
    dimensions = 2 if winograd else draw(st.integers(1, 3))
    taps = 3 if dimensions == 3 else 5
    kernel = tuple(3 if winograd else draw(st.integers(1, taps)) for _ in range(dimensions))
    if algorithm == "FFT_TILING" and dimensions == 1:
        kernel = (draw(st.integers(1, 16)),)
    padding = tuple(draw(st.integers(0, taps + 2)) if draw(st.booleans()) else taps // 2 for taps in kernel)
    stride, dilation = (
        (1,) * dimensions if plain else tuple(draw(st.integers(1, 3)) for _ in range(dimensions)) for _ in range(2)
    )
    spatial = []
    for axis in range(dimensions):
        least = (kernel[axis] - 1) * dilation[axis] + 1 - 2 * padding[axis]
        # Large enough for a second tile in FFT_TILING, with its large FFT size too.
        beyond = 32 if max(kernel) > 8 else 20
        extra = beyond + 2 * padding[axis] if algorithm == "FFT_TILING" and axis == 0 else 0
        spatial.append(max(1, least) + extra + draw(st.integers(0, 9 if dimensions < 3 else 4)))
    return {"spatial": tuple(spatial), "kernel": kernel, "padding": padding, "stride": stride, "dilation": dilation}


@st.composite
def problems(draw, algorithm):
    """Draw problems of any operation, layout and grouping."""
    geometry = draw(geometries(algorithm))
    groups, channels, filters = draw(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)))
    if draw(st.booleans()):
        groups, channels, filters = channels, 1, draw(st.integers(1, 2))  # depthwise
    problem = ConvolutionProblem(
        operation=draw(st.sampled_from(Operation)),
        batch=draw(st.integers(1, 5)),
        channels=groups * channels,
        filters=groups * filters,
        groups=groups,
        dtype=draw(st.sampled_from([DataType.FLOAT32, DataType.FLOAT64])),
        layout=draw(st.sampled_from(LAYOUTS[len(geometry["spatial"])])),
        **geometry,
    )
    gaps = st.integers(0, 5)
    return dataclasses.replace(
        problem, x_batch_stride=problem.x_sample + draw(gaps), y_batch_stride=problem.y_sample + draw(gaps)
    )


def assert_near_the_reference(guarded, algorithm, data, problem, **slab):
    """Compute some of the samples of a larger mini-batch with any alpha and beta."""
    start, after = data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    error = guarded(
        problem,
        algorithm,
        total=start + problem.batch + after,
        start=start,
        alpha=data.draw(factors),
        beta=data.draw(factors),
        seed=data.draw(st.integers(0, 2**32 - 1)),
        **slab,
    )
    assert error <= tolerance(algorithm, problem.dtype)


@pytest.mark.parametrize("algorithm", CPU_ALGORITHMS)
@given(data=st.data())
def test_equals_the_reference(guarded, algorithm, data):
    assert_near_the_reference(guarded, algorithm, data, data.draw(problems(algorithm)))


def slabs_for(problem, algorithm):
    """Return the slabs of all heights that an algorithm computes, and at least the whole."""
    backend, unit = CpuBackend(), row_unit(problem)
    slabs = {slab for rows in range(unit, row_count(problem) + unit, unit) for slab in slabs_of(problem, rows)}
    names = {slab: {each.name for each in backend.algorithms(piece_of(problem, slab).problem)} for slab in slabs}
    return sorted((slab for slab in slabs if algorithm in names[slab]), key=lambda slab: (slab.first, slab.rows))


@pytest.mark.parametrize("algorithm", CPU_ALGORITHMS)
@given(data=st.data())
def test_slabs_equal_the_reference(guarded, algorithm, data):
    problem = data.draw(problems(algorithm).filter(is_divisible))
    slab = data.draw(st.sampled_from(slabs_for(problem, algorithm)))
    assert_near_the_reference(guarded, algorithm, data, problem, slab=slab)


CHANNELS = {"batch": 3, "channels": 140, "spatial": (18, 9), "filters": 70, "kernel": (3, 3), "padding": (1, 1)}
LARGE = [CHANNELS | {"groups": groups, "dtype": dtype} for groups in (1, 2) for dtype in TOLERANCE]
LARGE += [
    {"batch": 2, "channels": 3, "spatial": (9, 2500), "filters": 5, "kernel": (2, 7), "padding": (3, 1),
     "stride": (2, 3), "dilation": (3, 2), "layout": layout}
    for layout in LAYOUTS[2]
]  # fmt: skip


@pytest.mark.parametrize("operation", Operation, ids=lambda operation: operation.value)
@pytest.mark.parametrize("fields", LARGE)
def test_equals_the_reference_if_channels_or_rows_exceed_a_block(guarded, operation, fields):
    problem = ConvolutionProblem(operation=operation, **fields)
    for each in CpuBackend().algorithms(problem):
        error = guarded(problem, each.name, total=4, start=1, alpha=0.75, beta=0.5, seed=7)
        assert error <= tolerance(each.name, problem.dtype)
