"""Programs that make graphed callables while they are tuned, on the host's GPU.

`torch.cuda.make_graphed_callables` needs CUDA. Here it is what it does: steps in another stream that end without an
optimizer, then captures of a forward and a backward pass, each apart.
"""

import pytest

torch = pytest.importorskip("torch")

from tests.support.host_gpu import assert_near  # noqa: E402
from tests.support.tuned_program import TunedProgram, end_programs  # noqa: E402
from ucudnn.torch.overrides import process_overrides  # noqa: E402
from ucudnn.torch.steps.phase import TuningPhase  # noqa: E402

LIMIT = 3000
"""Bytes of workspace, within which the stand-in's fast engine computes a part of the mini-batch only."""


@pytest.fixture
def tuned(host):
    """Return a function that makes a program, which is ended after the test."""
    made = []

    def make(**options):
        made.append(TunedProgram(host, 50.0, share=0.5, **options))
        return made[-1]

    yield make
    end_programs(made)


def warm_up(one, host):
    """Take the steps before a capture; return the last output and its gradients."""
    given = one.x.clone().requires_grad_()
    host.stream = 0x40
    for _ in range(3):
        out = one.model(given)
        gradients = torch.autograd.grad(out, (given, *one.model.parameters()), torch.ones_like(out))
    host.stream = 0
    return [out.detach(), *gradients]


def capture(one, host):
    """Capture a forward and a backward pass; return the output and its gradients."""
    given = one.x.clone().requires_grad_()
    host.captures, host.stream = True, 0x40
    out = one.model(given)
    host.captures, host.stream = False, 0
    upstream = torch.ones_like(out)
    host.captures, host.stream = True, 0x40
    gradients = torch.autograd.grad(out, (given, *one.model.parameters()), upstream)
    host.captures, host.stream = False, 0
    return [out.detach(), *gradients]


def run_until(one, phase, most=400):
    for _ in range(most):
        assert_near(one.step(), one.expected)
        if one.tuner.phase is phase:
            return
    pytest.fail(f"{one.tuner.phase} after {most} steps")


def reference(one):
    """Return the output and its gradients from PyTorch's own kernels."""
    given = one.x.clone().requires_grad_()
    out = one.model(given)
    return [out.detach(), *torch.autograd.grad(out, (given, *one.model.parameters()), torch.ones_like(out))]


@pytest.mark.parametrize(
    "phase", [TuningPhase.WATCHING, TuningPhase.TRYING, TuningPhase.COMPARING, TuningPhase.SETTLED]
)
def test_graphs_that_are_made_in_any_phase_have_pytorchs_kernels_and_tuning_goes_on(tuned, host, calls, phase):
    one = tuned()
    with one.enable() as on:
        run_until(one, phase)
        kept = {name: each.clone() for name, each in one.model.state_dict().items()}
        tried = dict(one.tuner.trials)
        found = [warm_up(one, host)]
        count = on.report().calls
        calls()
        found.append(capture(one, host))
        assert not calls(), "nothing of ours is captured"
        assert on.report().calls == count
        assert one.tuner.phase is phase, "neither a capture nor what comes before it ends a step"
        assert one.tuner.trials == tried
        run_until(one, TuningPhase.SETTLED)
        assert one.tuner.kernels
        count = on.report().calls
        assert_near(one.step(), one.expected)
        assert on.report().calls == count + 5, "calls outside of the graph run the kernels that were found"
    one.model.load_state_dict(kept)
    for each in found:
        assert_near(each, reference(one))


def test_graphs_that_are_made_before_the_first_step_leave_nothing_to_try(tuned, host):
    one = tuned()
    expected = reference(one)
    with one.enable() as on:
        assert_near(warm_up(one, host), expected)
        stock = one.program.stock_calls
        assert_near(capture(one, host), expected)
        assert one.program.stock_calls == stock + 6, "two outputs and four gradients"
        for _ in range(400):  # a graph is replayed: no convolution is called
            one.program.passed_ms += one.program.idle_ms
            one.optimizer.step()
            if one.tuner.phase is TuningPhase.SETTLED:
                break
        assert one.tuner.phase is TuningPhase.SETTLED
        assert on.report().calls == 0
        assert one.made.operators() == (None, None), "calls that may still come make no detour"


def test_graphs_within_a_stated_limit_have_its_plans_and_what_they_use_is_kept(tuned, host):
    one = tuned(limit_bytes=LIMIT)
    expected = reference(one)
    with one.enable() as on:
        assert_near(warm_up(one, host), expected)
        calls = on.report().calls
        assert calls == 18, "heuristic plans are made before the capture"
        host.forget()
        assert_near(capture(one, host), expected)
        assert on.report().calls == calls + 6
        assert 0 < max(host.allocated) <= LIMIT + expected[0].nbytes
        assert one.program.stock_calls == 0, "PyTorch's own kernels know no limit"
        run_until(one, TuningPhase.SETTLED)
        assert one.tuner.kernels, "the rest of the program is tuned"
    assert one.made in process_overrides._kept, "graphs hold addresses of what it owns"
