"""What passes leaves nothing behind: after it, the program is tuned and its kernels run as without it."""

import pytest
import torch

from tests.support.tuned_program import LIMIT
from ucudnn.problem import Operation
from ucudnn.torch.steps import step_tracker
from ucudnn.torch.steps.phase import TuningPhase
from ucudnn.torch.trials.candidate_list import FAILED

PHASES = [each for each in TuningPhase if each is not TuningPhase.SETTLED]
PHASES_WITHIN_A_LIMIT = [each for each in PHASES if each is not TuningPhase.HOST_CHECK]
LATER_PHASES = [TuningPhase.WATCHING, TuningPhase.TRYING, TuningPhase.COMPARING]


@pytest.fixture
def one(program):
    """Return a program all five kernels of which have a faster candidate."""
    return program()


@pytest.fixture
def soon_silent(monkeypatch):
    """Let optimizers count no more after 128 mini-batches of inference instead of 1024, each of which has two calls."""
    monkeypatch.setattr(step_tracker, "_LEAST_SILENCE", 256)


def reach(one, phase):
    """Take steps until a phase has begun, and something is tried in the next step if anything is in that phase."""
    one.program.can_delay = phase is TuningPhase.HOST_CHECK
    one.until(lambda: one.phase is phase and (phase is not TuningPhase.TRYING or one.tuner.trials))


def settle_with_all(one):
    """Take steps until all is settled; require that all five kernels are replaced, and that they run."""
    one.settle()
    assert len(one.tuner.kernels) == one.computed() == 5


def test_optimizers_that_step_within_backward_passes_end_no_step_there(one):
    optimizers = {each: torch.optim.SGD([each], lr=1e-3) for each in one.model.parameters()}
    for each, optimizer in optimizers.items():
        each.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    one.optimizer = torch.optim.SGD(one.model.parameters(), lr=1e-3)
    one.optimizer.step = lambda: None
    with one.enable():
        settle_with_all(one)


def test_optimizers_that_step_in_a_row_end_one_step(one):
    others = [torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3) for _ in range(3)]
    one.optimizer.register_step_post_hook(lambda *_: [each.step() for each in others] and None)
    with one.enable():
        settle_with_all(one)


def test_a_program_whose_optimizer_steps_before_its_first_convolution_is_tuned(one):
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.ones(1)
    with one.enable():
        torch.optim.SGD([weight], lr=1e-3).step()
        reach(one, TuningPhase.TRYING)
        assert one.tuner._watched_training
        settle_with_all(one)


def test_inference_is_tuned_though_the_first_convolution_never_recurs(one):
    one.made._tracker._most_calls = 8
    with one.enable():
        torch.conv2d(torch.randn(1, 4, 9, 9), torch.randn(3, 4, 3, 3))
        one.settle(one.infer)
        assert len(one.tuner.kernels) == 2


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("lasts", [False, True])
def test_tuning_goes_on_in_another_stream_and_after_one_in_any_phase(one, host, phase, lasts):
    with one.enable():
        reach(one, phase)
        with host.elsewhere():
            if lasts:
                settle_with_all(one)
            for _ in range(3):
                one.check()
        settle_with_all(one)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("seconds", [30, 3600])
def test_a_program_that_evaluates_or_saves_between_steps_is_tuned(program, phase, seconds):
    one = program(share=0.05)
    with one.enable():
        reach(one, phase)
        one.program.passed_ms += seconds * 1e3
        settle_with_all(one)
        assert one.ledger.left_seconds > -2


def test_candidates_that_fail_again_and_again_are_given_up(one, host):
    with one.enable() as on:
        reach(one, TuningPhase.TRYING)
        host.most_bytes = 0  # of a workspace
        one.until(lambda: one.phase is TuningPhase.SETTLED, 200)
        assert not one.tuner.kernels
        assert on.report().tuned[0].outcomes[FAILED]


@pytest.mark.parametrize("phase", [TuningPhase.WATCHING, TuningPhase.TRYING])
def test_a_long_evaluation_within_a_step_keeps_few_times(one, phase):
    with one.enable():
        reach(one, phase)
        if phase is TuningPhase.TRYING:  # in place of PyTorch's own kernel
            one.until(lambda: any(each.in_place for each in one.tuner.trials.values()))
        with torch.no_grad():
            for _ in range(1500):
                one.model(one.x)
        assert len(one.tuner._readings) <= 5 * 256
        settle_with_all(one)


REACHED = [
    *((None, phase, batch) for phase in LATER_PHASES for batch in (8, 4)),
    *((LIMIT, phase, batch) for phase, batch in zip(PHASES_WITHIN_A_LIMIT, (4, 8, 4, 8, 8), strict=True)),
]
"""A limit, a phase in which calls come to Python, and a mini-batch; without a limit, none come in the first phases."""


@pytest.mark.usefixtures("soon_silent")
@pytest.mark.parametrize(("limit_bytes", "phase", "batch"), REACHED)
def test_a_program_that_infers_after_it_has_trained_settles_and_tunes_its_training_later(
    program, phase, limit_bytes, batch
):
    one = program(limit_bytes=limit_bytes)
    with one.enable():
        reach(one, phase)
        if phase is TuningPhase.COMPARING:
            one.until(lambda: bool(one.tuner._comparison.running))
        x, one.x = one.x, one.x[:batch].clone()
        one.until(lambda: one.phase is TuningPhase.SETTLED, 6000, lambda: one.infer(100.0))
        assert not one.tuner.trials
        for _ in range(3):
            one.infer(100.0)
        one.x = x
        if limit_bytes is None:
            settle_with_all(one)
        else:
            one.settle()
            final = {each.operation for each in one.tuner.sites if one.tuner.owner.is_final(each)}
            assert final >= {Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER}


@pytest.mark.parametrize("count", [128 + 76, 128 + 400])
@pytest.mark.parametrize("phase", LATER_PHASES)
def test_evaluations_of_any_length_between_steps_pass(soon_silent, program, phase, count):
    one = program()
    with one.enable():
        one.until(lambda: one.phase is phase)
        for _ in range(3):
            for _ in range(count):
                one.infer(100.0)
            for _ in range(6):
                one.check()
        settle_with_all(one)
