"""How often a candidate runs in a check: a run before the one that is timed loads its code."""

from types import SimpleNamespace

import pytest
import torch

from tests.support.configurations import in_parts
from tests.support.host_gpu import PROBLEM
from ucudnn.torch.trials.call_site import CallSite
from ucudnn.torch.trials.candidate_list import Candidate, Trial
from ucudnn.torch.tuning.candidate_check import CandidateCheck


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
