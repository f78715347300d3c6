"""How often a candidate runs in a check: a run before the one that is timed loads its code."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.configurations import in_parts
from tests.support.host_gpu import PROBLEM
from tests.support.live_bytes import LiveBytes
from tests.support.problems import make_problem
from ucudnn.problem import DataType, Layout
from ucudnn.torch.calls.problem import OutputForm
from ucudnn.torch.trials.call_site import CallSite
from ucudnn.torch.trials.candidate_list import Candidate, Trial
from ucudnn.torch.tuning.candidate_check import CandidateCheck, distance_of, sketch, sketch_sizes


class Recorder:
    """A tuner and its program, which record what happens in a check."""

    def __init__(self):
        self.events, self.measured_marks = [], []
        self.program, self.watch = self, SimpleNamespace(holds=lambda *_: True)

    def live_bytes(self):
        return 0

    def mark(self):
        self.events.append("mark")
        return len(self.events)

    def poison(self, size_bytes):
        self.events.append("poison")

    def distance(self, found, expected):
        return lambda: float((found - expected).norm())

    def measured(self, site, candidate, begin, end, distance=None):
        if candidate is None:
            self.events.clear()  # of PyTorch's own kernel
        else:
            self.measured_marks.append((begin, end, distance()))


def check_of(tuner, site, out):
    """Return a check whose candidates write one output."""
    form = SimpleNamespace(size_bytes=16, new=lambda: out)
    return CandidateCheck(
        tuner, site, form, lambda sizes, after: True, lambda _: (out, out, out, None), lambda found: found
    )


@pytest.mark.parametrize(
    ("baseline_ms", "was_slow", "runs"),
    [
        (0.5, False, ["run", "mark", "run", "mark"]),
        (2.0, False, ["mark", "run", "mark"]),  # a second run would take as long again
        (2.0, True, ["run", "mark", "run", "mark"]),  # the first check may have loaded code
    ],
)
def test_a_run_that_loads_code_is_not_timed_where_kernels_are_short_or_a_check_is_the_second_one(
    baseline_ms, was_slow, runs
):
    tuner, site = Recorder(), CallSite(PROBLEM)
    site.baseline_ms = [baseline_ms] * 3
    candidate = Candidate(in_parts("a"), 0)
    candidate.was_slow = was_slow
    out = torch.full((4,), 5.0)

    def run(*operands):
        tuner.events.append("run")
        out.fill_(7.0)
        return True

    check = check_of(tuner, site, out)
    kernel = SimpleNamespace(workspace_bytes=0, run=run)
    trial, expected = Trial(candidate=candidate, in_place=False, estimate_ms=1.0, kernel=kernel), torch.full((4,), 7.0)
    assert check.output(trial, lambda: expected) is expected
    assert trial.is_over
    assert tuner.events == ["poison", *runs]
    assert tuner.measured_marks == [(len(runs) - 1, len(runs) + 1, 0.0)]


def test_a_candidate_that_fails_in_place_is_not_run_again_in_the_step():
    candidate, expected = Candidate(in_parts("a"), 0), torch.ones(4)
    kernel = SimpleNamespace(workspace_bytes=0, run=lambda *_: False)
    trial = Trial(candidate=candidate, in_place=True, estimate_ms=1.0, kernel=kernel)
    check = check_of(Recorder(), CallSite(PROBLEM), torch.empty(4))
    assert check.output(trial, lambda: expected) is expected
    assert trial.is_over
    assert candidate.failures == 1


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
