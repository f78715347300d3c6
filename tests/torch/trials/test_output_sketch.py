"""Sketches tell how far apart two tensors are, whatever the difference is, in the memory that they say."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.live_bytes import LiveBytes
from tests.support.problems import make_problem
from ucudnn.problem import DataType, Layout
from ucudnn.torch.calls.problem import OutputForm
from ucudnn.torch.tuning.candidate_check import distance_of, sketch, sketch_sizes

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def relative(found, expected):
    """Return the relative distance in float64."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("elements", [1 << 20, (3 << 20) + 517])
def test_the_distance_of_sketches_is_that_of_the_tensors(dtype, elements):
    seed = np.random.SeedSequence().generate_state(1)[0]
    random = torch.Generator().manual_seed(int(seed))
    expected = torch.randn(elements, generator=random, dtype=torch.float64).to(dtype)
    for size in (0.3, 0.01):
        found = (expected.double() + size * torch.randn(elements, generator=random, dtype=torch.float64)).to(dtype)
        distance = distance_of(sketch(found), sketch(expected))
        assert distance == pytest.approx(relative(found, expected), rel=0.15), seed  # five times the deviation


@given(st.integers(1, 3000), st.sampled_from(DTYPES), st.data())
def test_equal_tensors_have_no_distance_and_any_other_element_has_one(elements, dtype, data):
    expected = torch.randn(elements, dtype=torch.float64).to(dtype)
    found = expected.clone()
    assert distance_of(sketch(found), sketch(expected)) == 0
    found[data.draw(st.integers(0, elements - 1))] += 100
    assert distance_of(sketch(found), sketch(expected)) > 0.01
    found[data.draw(st.integers(0, elements - 1))] = float("nan")
    distance = distance_of(sketch(found), sketch(expected))
    assert distance != distance


def test_neighbours_that_changed_places_are_seen():
    expected = torch.randn(1 << 20)
    found = expected.view(-1, 2).flip(1).flatten()
    assert distance_of(sketch(found), sketch(expected)) == pytest.approx(2**0.5, rel=0.15)


@pytest.mark.parametrize("dtype", [DataType.FLOAT32, DataType.BFLOAT16, DataType.FLOAT64])
@pytest.mark.parametrize("size", [7, 64, 160])
def test_sketches_take_no_more_memory_than_they_say(dtype, size):
    form = OutputForm(make_problem(batch=8, filters=16, groups=2, spatial=(size, size), dtype=dtype), -1)
    out, other = form.new().zero_(), form.new().zero_()
    with LiveBytes() as live:
        found = sketch(out)
        sketch(other)
    assert found.numel() == out.numel() // 1024 + 1
    assert 0 < live.peak <= sum(sketch_sizes(form))


def test_layouts_are_told_apart_by_dimensions_of_more_than_one_element():
    def in_order(tensor, form):
        return tensor.is_contiguous(memory_format=form.memory_format)

    form = OutputForm(make_problem(filters=4, layout=Layout.NHWC), -1)
    assert in_order(form.new(), form)
    assert not in_order(form.new().contiguous(), form)
    flat = OutputForm(make_problem(spatial=(3, 2)), -1)
    assert flat.sizes == (8, 4, 1, 1)
    assert in_order(flat.new().contiguous(memory_format=torch.channels_last), flat)
