"""Where steps end: at optimizers, or where the first convolution recurs outside of a backward pass."""

import pytest

pytest.importorskip("torch")

from ucudnn.torch.steps.step_tracker import StepTracker


def steps(tracker, calls):
    """Return which calls began a step."""
    return [tracker.is_candidate(call) and tracker.begins(call, in_backward=backward) for call, backward in calls]


def test_in_inference_a_step_begins_where_the_first_call_recurs():
    tracker = StepTracker()
    a, b, c = "abc"
    assert steps(tracker, [(each, False) for each in (a, b, c, a, b, c, a)]) == [0, 0, 0, 1, 0, 0, 1]
    assert tracker.steps == 2


def test_a_checkpoint_that_computes_the_first_call_again_begins_no_step():
    tracker = StepTracker()
    a, b = "ab"
    assert steps(tracker, [(a, False), (b, False), (b, True), (a, True), (a, False)]) == [0, 0, 0, 0, 1]


def test_as_soon_as_an_optimizer_steps_only_optimizers_count():
    tracker = StepTracker()
    a = "a"
    assert steps(tracker, [(a, False), (a, False)]) == [0, 1]
    tracker.optimizer_stepped()
    assert steps(tracker, [(a, False)] * 5) == [0] * 5
    tracker.optimizer_stepped()
    assert tracker.steps == 3
