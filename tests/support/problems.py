"""Problems that tests share: one that differs from another in a field, and random ones."""

from hypothesis import assume
from hypothesis import strategies as st

from ucudnn.problem import ConvolutionProblem, DataType, Layout, MathMode, Operation
from ucudnn.slabs import is_divisible, row_count, row_unit

LAYOUTS = {1: (Layout.NCW, Layout.NWC), 2: (Layout.NCHW, Layout.NHWC), 3: (Layout.NCDHW, Layout.NDHWC)}

DENSE = {f"{tensor}_{of}_stride": 0 for tensor in "xy" for of in ("batch", "channel")}
"""Changes that leave no gaps in x and y, as where a problem gets another size."""


def make_problem(**overrides):
    values = {
        "operation": Operation.FORWARD,
        "batch": 8,
        "channels": 6,
        "spatial": (9, 10),
        "filters": 4,
        "kernel": (3, 2),
        "groups": 2,
    }
    return ConvolutionProblem(**(values | overrides))


DIFFERENT = {
    "operation": Operation.BACKWARD_DATA,
    "batch": 9,
    "channels": 8,
    "spatial": (9, 11),
    "filters": 2,
    "kernel": (3, 3),
    "padding": (1, 0),
    "post_padding": (0, 1),
    "stride": (1, 2),
    "dilation": (2, 1),
    "groups": 1,
    "dtype": DataType.FLOAT64,
    "layout": Layout.NHWC,
    "x_batch_stride": 1000,
    "y_batch_stride": 1000,
    "x_channel_stride": 100,
    "y_channel_stride": 100,
    "math": MathMode.FMA,
    "deterministic": True,
    "alignment": 8,
    "float32_sum": True,
    "biased": True,
}

BESIDE = {"float32_sum": {"operation": Operation.BACKWARD_FILTER, "dtype": DataType.FLOAT16}}
"""Fields of which a problem needs certain values if another field differs."""


@st.composite
def problems(draw):
    dimensions = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 3))
    sizes = st.tuples(*[st.integers(3, 7)] * dimensions)
    return ConvolutionProblem(
        operation=draw(st.sampled_from(Operation)),
        batch=draw(st.integers(1, 4)),
        channels=groups * draw(st.integers(1, 3)),
        spatial=draw(sizes),
        filters=groups * draw(st.integers(1, 3)),
        kernel=draw(st.tuples(*[st.integers(1, 3)] * dimensions)),
        padding=draw(st.tuples(*[st.integers(0, 2)] * dimensions)),
        stride=draw(st.tuples(*[st.integers(1, 3)] * dimensions)),
        groups=groups,
        layout=draw(st.sampled_from(LAYOUTS[dimensions])),
    )


@st.composite
def divisible(draw, dtype=DataType.FLOAT64, symmetric=False):
    """Draw a problem that slabs divide, with strides, dilation, even kernels, groups and any padding."""
    count = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 2))
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(count))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(count))
    reach = [(taps - 1) * spread for taps, spread in zip(kernel, dilation, strict=True)]
    padding = (draw(st.integers(0, reach[0])), *(draw(st.integers(0, 2)) for _ in range(count - 1)))
    after = (draw(st.integers(0, reach[0])), *(draw(st.integers(0, 2)) for _ in range(count - 1)))
    after = padding if symmetric else after
    spatial = tuple(
        draw(st.integers(max(1, needed + 1 - before - behind), needed + (9 if not axis else 3)))
        for axis, (needed, before, behind) in enumerate(zip(reach, padding, after, strict=True))
    )
    problem = ConvolutionProblem(
        operation=draw(st.sampled_from(Operation)),
        batch=draw(st.integers(1, 2)),
        channels=groups * draw(st.integers(1, 3)),
        spatial=spatial,
        filters=groups * draw(st.integers(1, 2)),
        kernel=kernel,
        padding=padding,
        post_padding=after,
        stride=tuple(draw(st.integers(1, 3)) for _ in range(count)),
        dilation=dilation,
        groups=groups,
        dtype=dtype,
        layout=draw(st.sampled_from([each for each in Layout if each.dimensions == count])),
    )
    assume(is_divisible(problem))
    return problem


@st.composite
def divided(draw, **options):
    problem = draw(divisible(**options))
    unit = row_unit(problem)
    return problem, unit * draw(st.integers(1, -(-row_count(problem) // unit)))
