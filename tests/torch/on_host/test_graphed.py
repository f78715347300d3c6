"""Programs that make graphed callables while they are tuned, on the host's GPU.

`torch.cuda.make_graphed_callables` needs CUDA. Here it is what it does: steps in another stream that end without an
optimizer, then captures of a forward and a backward pass, each apart.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from tests.support.host_gpu import assert_near
from tests.support.tuned_program import LIMIT
from ucudnn.torch.overrides import process_overrides
from ucudnn.torch.steps.phase import TuningPhase


def passes(one, within=nullcontext):
    """Take a forward and a backward pass, each in a context; return the output and its gradients."""
    given = one.x.clone().requires_grad_()
    with within():
        out = one.model(given)
    upstream = torch.ones_like(out)
    with within():
        gradients = torch.autograd.grad(out, (given, *one.model.parameters()), upstream)
    return [out.detach(), *gradients]


def warm_up(one, host):
    """Take the steps before a capture; return the last output and its gradients."""
    return [passes(one, host.elsewhere) for _ in range(3)][-1]


def capture(one, host):
    """Capture a forward and a backward pass; return the output and its gradients."""
    return passes(one, partial(host.elsewhere, captures=True))


@pytest.mark.parametrize(
    "phase", [TuningPhase.WATCHING, TuningPhase.TRYING, TuningPhase.COMPARING, TuningPhase.SETTLED]
)
def test_graphs_that_are_made_in_any_phase_have_pytorchs_kernels_and_tuning_goes_on(program, host, calls, phase):
    one = program()
    with one.enable() as on:
        one.until(lambda: one.phase is phase)
        kept = {name: each.clone() for name, each in one.model.state_dict().items()}
        tried = dict(one.tuner.trials)
        found = [warm_up(one, host)]
        count = on.report().calls
        calls()
        found.append(capture(one, host))
        assert not calls(), "nothing of ours is captured"
        assert on.report().calls == count
        assert one.phase is phase, "neither a capture nor what comes before it ends a step"
        assert one.tuner.trials == tried
        one.settle()
        assert one.tuner.kernels
        assert one.computed() == 5, "calls outside of the graph run the kernels that were found"
    one.model.load_state_dict(kept)
    for each in found:
        assert_near(each, passes(one))


def test_graphs_that_are_made_before_the_first_step_leave_nothing_to_try(program, host):
    one = program()
    expected = passes(one)
    with one.enable() as on:
        assert_near(warm_up(one, host), expected)
        baseline = one.program.baseline_calls
        assert_near(capture(one, host), expected)
        assert one.program.baseline_calls == baseline + 6, "two outputs and four gradients"
        while one.phase is not TuningPhase.SETTLED:  # a graph is replayed: no convolution is called
            one.program.passed_ms += one.program.idle_ms
            one.optimizer.step()
        assert on.report().calls == 0
        assert one.made.operators() == (None, None), "calls that may still come make no detour"


def test_graphs_within_a_stated_limit_have_its_plans_and_what_they_use_is_kept(program, host):
    one = program(limit_bytes=LIMIT)
    expected = passes(one)
    with one.enable() as on:
        assert_near(warm_up(one, host), expected)
        calls = on.report().calls
        assert calls == 18, "heuristic plans are made before the capture"
        host.forget()
        assert_near(capture(one, host), expected)
        assert on.report().calls == calls + 6
        assert 0 < max(host.allocated) <= LIMIT + expected[0].nbytes
        assert one.program.baseline_calls == 0, "PyTorch's own kernels know no limit"
        one.settle()
        assert one.tuner.kernels, "the rest of the program is tuned"
    assert one.made in process_overrides._kept, "graphs hold addresses of what it owns"
