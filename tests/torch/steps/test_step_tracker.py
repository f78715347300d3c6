"""Where steps end: at optimizers, or where the first convolution recurs outside of a backward pass."""

import gc
from itertools import pairwise
from threading import Thread

import pytest
import torch
from torch.nn.modules import module as modules

from ucudnn.torch.steps.step_tracker import StepTracker, before_next_module


class Optimizer:
    """Stands for one."""


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
    tracker, optimizer = StepTracker(), Optimizer()
    a = "a"
    assert steps(tracker, [(a, False), (a, False)]) == [0, 1]
    assert tracker.optimizer_stepped(optimizer)
    assert steps(tracker, [(a, False)] * 5) == [0] * 5
    assert tracker.optimizer_stepped(optimizer)
    assert tracker.steps == 3


def silent_for(tracker, calls, limit=1 << 16):
    """Return after how many of the calls, which recur, optimizers count no more; `limit` if they still do."""
    for count in range(limit):
        call = calls[count % len(calls)]
        if tracker.is_candidate(call) and tracker.begins(call, in_backward=False):
            assert not tracker.by_optimizer
            return count
    return limit


@pytest.mark.parametrize("length", [1, 7, 3000])
def test_convolutions_count_again_where_a_program_infers_after_it_has_trained(length):
    tracker, optimizer = StepTracker(), Optimizer()
    for _ in range(5):
        assert not any(steps(tracker, [(str(each), False) for each in range(length)])) or not tracker.by_optimizer
        assert tracker.optimizer_stepped(optimizer)
    ended, calls = tracker.steps, "ab"
    assert silent_for(tracker, calls) == max(2048, 4 * length), "longer than any step of optimizers"
    assert tracker.steps == ended + 1
    assert tracker.first in calls
    begun = sum(steps(tracker, [(each, False) for each in calls * 10]))
    assert begun in (9, 10)
    assert tracker.optimizer_stepped(optimizer)
    assert tracker.by_optimizer
    assert tracker.steps == ended + 1 + begun + 1


def test_a_long_evaluation_counts_as_inference_after_twice_as_many_calls_each_time():
    tracker, optimizer, found = StepTracker(), Optimizer(), []
    for _ in range(4):
        tracker.optimizer_stepped(optimizer)
        found.append(silent_for(tracker, "ab"))
    assert found == [2048, 4096, 8192, 16384]


def test_no_silence_counts_in_a_backward_pass_or_once_optimizers_are_trusted():
    tracker, optimizer = StepTracker(), Optimizer()
    tracker.optimizer_stepped(optimizer)
    assert not any(steps(tracker, [("a", True)] * 5000))
    tracker.optimizer_stepped(optimizer)
    tracker.trust_optimizers()
    assert silent_for(tracker, "ab") == 1 << 16


def stepped(tracker, optimizers):
    """Return at which of the steps of optimizers a step of the program ended."""
    return [at for at, each in enumerate(optimizers) if tracker.optimizer_stepped(each)]


@pytest.mark.parametrize("count", [2, 3, 100])
def test_a_step_ends_once_where_several_optimizers_step_in_a_row(count):
    tracker, optimizers = StepTracker(), [Optimizer() for _ in range(count)]
    ends = stepped(tracker, optimizers * 20)
    late = [at for at in ends if at >= 8 * count]
    assert {after - before for before, after in pairwise(late)} == {count}


def test_an_optimizer_that_is_made_later_ends_steps_though_the_first_one_lives():
    tracker, first, second = StepTracker(), Optimizer(), Optimizer()
    assert stepped(tracker, [first] * 3) == [0, 1, 2]
    assert stepped(tracker, [second] * 20) == list(range(4, 20))
    assert stepped(tracker, [first] * 20) == list(range(8, 20)), "longer each time"


def test_an_optimizer_that_steps_seldom_ends_no_steps_though_it_was_the_first():
    tracker, seldom, often = StepTracker(), Optimizer(), Optimizer()
    assert stepped(tracker, [seldom, *[often] * 6] * 3) == [0, *range(5, 7), *range(8, 14), *range(15, 21)]


def test_an_optimizer_that_takes_the_place_of_one_that_is_gone_ends_steps_at_once():
    tracker, first = StepTracker(), Optimizer()
    assert stepped(tracker, [first] * 3) == [0, 1, 2]
    del first
    gc.collect()
    assert stepped(tracker, [Optimizer()] * 3) == [0, 1, 2]


def test_another_convolution_begins_steps_if_the_first_one_never_recurs():
    tracker = StepTracker()
    network = [("stem", False), *[("block", False)] * 3, ("head", False), ("block", True)]
    assert not any(steps(tracker, [("other model", False)]))
    found = steps(tracker, network * 400)
    assert tracker.first in ("stem", "head"), "a step has it once"
    begun = [at for at, each in enumerate(found) if each]
    assert begun[0] <= 3 * 256
    assert {after - before for before, after in pairwise(begun)} == {len(network)}


def test_a_first_convolution_that_seldom_recurs_begins_steps_in_the_end():
    tracker = StepTracker()
    found = steps(tracker, [(number % 5000, False) for number in range(60_000)])
    begun = [at for at, each in enumerate(found) if each]
    assert len(begun) >= 6
    assert {after - before for before, after in pairwise(begun)} == {5000}


@pytest.fixture
def noted():
    """Return a module that notes its calls, and the calls; no hook may be left."""
    calls, before = [], len(modules._global_forward_pre_hooks)
    module = torch.nn.Identity()
    module.forward = lambda: calls.append("module")
    yield module, calls
    assert len(modules._global_forward_pre_hooks) == before


def test_a_function_is_called_once_before_the_next_module_which_any_thread_may_call(noted):
    module, calls = noted

    def action():
        calls.append("action")
        before_next_module(lambda: calls.append("again"))

    before_next_module(action)
    thread = Thread(target=module)
    thread.start()
    thread.join()
    module()
    module()
    assert calls == ["action", "module", "again", "module", "module"]


def test_what_is_taken_back_is_not_called(noted):
    module, calls = noted
    handle = before_next_module(lambda: calls.append("action"))
    handle.remove()
    handle.remove()
    module()
    assert calls == ["module"]
