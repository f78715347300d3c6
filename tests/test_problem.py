import pickle
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.problems import BESIDE, DIFFERENT, divisible, make_problem
from ucudnn.errors import InvalidProblemError
from ucudnn.problem import ConvolutionProblem, DataType, Layout, Operation


def test_every_field_is_covered():
    assert set(DIFFERENT) == {field.name for field in fields(ConvolutionProblem) if field.init}


@pytest.mark.parametrize("field", DIFFERENT)
def test_problems_differ_in_every_field(field):
    beside = BESIDE.get(field, {})
    plain, other = make_problem(**beside), make_problem(**beside, **{field: DIFFERENT[field]})
    assert plain != other
    assert len({plain, other}) == 2


def test_a_float32_sum_has_filters_of_4_bytes_beside_tensors_of_2():
    rounded = make_problem(operation=Operation.BACKWARD_FILTER, dtype=DataType.BFLOAT16)
    problem = replace(rounded, float32_sum=True)
    assert (problem.w_bytes, problem.x_bytes, problem.y_bytes) == (72 * 4, rounded.x_bytes, rounded.y_bytes)
    assert (problem.w_dtype, problem.dtype) == (DataType.FLOAT32, DataType.BFLOAT16)
    assert str(problem) == f"{rounded} to float32"
    assert problem.part(4).float32_sum


@pytest.mark.parametrize("fields", [{"operation": Operation.FORWARD}, {"dtype": DataType.FLOAT32}])
def test_only_filter_gradients_of_16_bits_have_a_float32_sum(fields):
    given = {"operation": Operation.BACKWARD_FILTER, "dtype": DataType.FLOAT16} | fields
    with pytest.raises(InvalidProblemError, match="only filter gradients of 16 bits have float32_sum"):
        make_problem(**given, float32_sum=True)


def test_only_forward_adds_a_bias():
    problem = make_problem(biased=True)
    assert str(problem) == f"{make_problem()} with bias"
    assert problem.part(4).biased
    for operation in (Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER):
        assert problem.with_operation(operation) == make_problem(operation=operation)
        with pytest.raises(InvalidProblemError, match=f"only Forward adds a bias, not {operation.value}"):
            make_problem(operation=operation, biased=True)


def test_explicit_defaults_make_the_same_problem():
    tuples = {"padding": (0, 0), "post_padding": (0, 0), "stride": (1, 1), "dilation": (1, 1)}
    strides = {"x_batch_stride": 6 * 90, "y_batch_stride": 4 * 63, "x_channel_stride": 90, "y_channel_stride": 63}
    written = make_problem(**tuples, **strides, layout=Layout.NCHW)
    assert written == make_problem()
    assert hash(written) == hash(make_problem())


def test_shapes_and_bytes():
    problem = make_problem(padding=(1, 0), stride=(2, 1), dilation=(1, 3), x_batch_stride=600)
    assert problem.output == (5, 7)
    assert problem.x_shape == (8, 6, 9, 10)
    assert problem.w_shape == (4, 3, 3, 2)
    assert problem.y_shape == (8, 4, 5, 7)
    assert problem.x_bytes == (7 * 600 + 540) * 4
    assert problem.w_bytes == 72 * 4
    assert problem.y_bytes == 8 * 140 * 4
    assert problem.multiplications == 8 * 4 * 35 * 3 * 6
    last = replace(problem, layout=Layout.NHWC)
    assert (last.x_shape, last.w_shape, last.y_shape) == ((8, 9, 10, 6), (4, 3, 2, 3), (8, 5, 7, 4))


def test_padding_after_and_gaps_between_channels():
    problem = make_problem(padding=(1, 0), post_padding=(0, 2), x_channel_stride=95, y_channel_stride=90)
    assert problem.paddings == ((1, 0), (0, 2))
    assert problem.output == (8, 11)
    assert (problem.x_sample, problem.y_sample) == (5 * 95 + 90, 3 * 90 + 88)
    assert (problem.x_batch_stride, problem.y_batch_stride) == (565, 358)
    assert problem.x_bytes == 8 * 565 * 4
    assert problem.multiplications == 8 * 4 * 88 * 3 * 6
    assert "padding 1x0 before and 0x2 after" in str(problem)
    assert make_problem(padding=(1, 0), post_padding=(1, 0)).paddings == ((1, 1), (0, 0))


@given(st.integers(1, 20), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3), st.integers(1, 3))
def test_output_counts_the_places_where_the_filter_fits(size, taps, padding, stride, dilation):
    places = [
        start for start in range(0, size + 2 * padding, stride) if start + (taps - 1) * dilation < size + 2 * padding
    ]
    make = dict(spatial=(size,), kernel=(taps,), padding=(padding,), stride=(stride,), dilation=(dilation,))
    if places:
        assert make_problem(**make).output == (len(places),)
    else:
        with pytest.raises(InvalidProblemError, match="does not fit"):
            make_problem(**make)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"batch": 0}, "batch 0 must be 1 or more"),
        ({"channels": -6}, "channels -6 must be"),
        ({"filters": 2.0}, "filters 2.0 must be"),
        ({"spatial": (9, 0)}, r"spatial \(9, 0\) must be"),
        ({"padding": (0, -1)}, r"padding \(0, -1\) must be 0 or more"),
        ({"stride": (0, 1)}, r"stride \(0, 1\) must be"),
        ({"dilation": (1,)}, r"dilation \(1,\) has not one entry for each of \(9, 10\)"),
        ({"groups": 4}, "channels 6 cannot be divided into 4 groups"),
        ({"alignment": 3}, "alignment 3 is no power of two up to 16"),
        ({"groups": 3}, "filters 4 cannot be divided into 3 groups"),
        ({"kernel": (10, 2)}, r"kernel \(10, 2\) .* does not fit"),
        ({"spatial": (), "kernel": ()}, "0 spatial dimensions"),
        ({"spatial": (2, 2, 2, 2), "kernel": (1, 1, 1, 1)}, "4 spatial dimensions"),
        ({"layout": Layout.NCW}, "layout NCW does not fit"),
        ({"x_batch_stride": 539}, "x_batch_stride 539 is below the 540 elements"),
        ({"y_batch_stride": -1}, "y_batch_stride -1 is below"),
        ({"x_channel_stride": 89}, "x_channel_stride 89 is below the 90 elements of one channel"),
        (
            {"y_channel_stride": 100, "layout": Layout.NHWC},
            "y_channel_stride 100: in layout NHWC channels have no gaps",
        ),
        ({"post_padding": (1,)}, r"post_padding \(1,\) has not one entry"),
        ({"post_padding": (0, -1)}, r"post_padding \(0, -1\) must be 0 or more"),
        ({"batch": True}, "batch True must be"),
    ],
)
def test_the_error_names_the_offending_value(overrides, message):
    with pytest.raises(InvalidProblemError, match=message):
        make_problem(**overrides)


def test_the_text_has_the_fields_that_are_no_defaults():
    assert str(make_problem(groups=1)) == "Forward 8x6x9x10 * 4x6x3x2 float32 NCHW"
    assert "padding 1x0 stride 1x2 dilation 2x1 groups 2" in str(
        make_problem(padding=(1, 0), stride=(1, 2), dilation=(2, 1))
    )


@given(size=st.integers(1, 64), more=st.lists(st.integers(1, 64), max_size=6), gap=st.integers(0, 3))
def test_a_part_is_aligned_wherever_it_may_begin(size, more, gap):
    sizes = sorted([size, *more], key=lambda each: -(each & -each))
    problem = make_problem(batch=sum(sizes), dtype=DataType.FLOAT16, x_batch_stride=540 + gap, y_batch_stride=252 + gap)
    start = 0
    for each in sizes:
        part = problem.part(each)
        assert all(start * step % part.alignment == 0 for step in problem.steps)
        start += each
    assert problem.part(problem.batch) is problem


def test_a_pickled_problem_is_equal_in_another_process():
    code = "import pickle, sys; sys.stdout.buffer.write(pickle.dumps(pickle.loads(sys.stdin.buffer.read())))"
    command = [sys.executable, "-c", code]
    back = subprocess.run(command, input=pickle.dumps(make_problem()), capture_output=True, check=True).stdout
    assert {make_problem(): "found"}[pickle.loads(back)] == "found"


@given(divisible(), st.integers(1, 300), st.integers(0, 5))
def test_a_problem_of_another_size_equals_a_new_one(problem, size, gap):
    problem = replace(problem, x_batch_stride=problem.x_sample + gap)
    for made in (problem.with_batch(size), problem.part(size)):
        anew = replace(made)
        assert made == anew
        assert hash(made) == hash(anew)
        assert replace(made, batch=problem.batch, alignment=problem.alignment) == problem
        assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize("field", ["batch", "channels", "filters", "groups"])
@pytest.mark.parametrize("size", [2**31, 10**30, pytest.param(10**5000, id="digits")])
def test_sizes_that_cudnn_cannot_count_are_refused(field, size):
    with pytest.raises(InvalidProblemError, match=rf"^{field} .* is more than the 2147483647 that cuDNN can count$"):
        make_problem(**{field: size})


@pytest.mark.parametrize("size", [0, -1, True, 2.0, 2**31])
def test_sizes_that_make_no_sense_are_refused_after_what_equals_them_too(size):
    problem = make_problem(batch=8)
    assert [problem.part(each).batch for each in (1, 2)] == [1, 2]
    for changed in (problem.with_batch, problem.part):
        with pytest.raises(InvalidProblemError, match=r"^batch "):
            changed(size)


@pytest.mark.parametrize("name", ["operation", "dtype", "layout", "math"])
def test_enumerations_must_be_members(name):
    with pytest.raises(InvalidProblemError, match=rf"^{name} 'Forward' is no "):
        make_problem(**{name: "Forward"})


@pytest.mark.parametrize("value", [4, "44", (4.0, 4), None])
def test_spatial_sizes_must_be_whole_numbers(value):
    with pytest.raises(InvalidProblemError, match=r"^spatial "):
        make_problem(spatial=value)


def test_lists_and_numpys_numbers_make_the_same_problem():
    np = pytest.importorskip("numpy")
    given = make_problem()
    made = make_problem(batch=np.int64(given.batch), spatial=list(given.spatial), kernel=np.array(given.kernel))
    assert made == given
    assert hash(made) == hash(given)
    assert type(made.batch) is type(made.kernel[0]) is int
