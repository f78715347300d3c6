"""Tests of the first step: it runs the plan that takes least, and what it takes decides on the plan of the others."""

import warnings

import pytest

from tests.support.live_bytes import LiveBytes
from tests.support.plain_training import Race
from tests.support.shared_gpu import GPU, MIB, SharedGpu
from tests.support.small_networks import small_network
from ucudnn.memory.simulation.simulator import predicted_bytes, simulate
from ucudnn.memory.torch.device.stated_budget import StatedBudget
from ucudnn.memory.torch.running import fit, step_planning
from ucudnn.memory.torch.running.first_step import FirstStep, outside_meter
from ucudnn.units import bytes_up


class CountingMeter:
    """Counts the bytes of storages, and claims some more."""

    def __init__(self, more=0):
        self.counted, self.more = LiveBytes(), more

    def begin(self):
        self.level = self.counted.peak = self.counted.live

    def taken_bytes(self):
        return self.counted.peak - self.level + self.more


@pytest.fixture(scope="module")
def trained():
    return Race(small_network("unet3d"), steps=3)


@pytest.fixture(autouse=True)
def no_gradients(trained):
    trained.model.zero_grad()


@pytest.fixture(scope="module")
def budget(trained):
    return int(0.9 * trained.fitted("stock").simulation.peak_bytes)


def fitted(trained, budget, meter, policy="auto", outside=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "step_meter", lambda _: meter)
        patch.setattr(step_planning, "outside_meter", lambda _: outside)
        return fit.fit_subject(trained.subject, fit.FitOptions(budget=budget, policy=policy, measured=False))


def peaks(trained, step, meter, steps=3):
    """Take steps; return the most bytes that each of them counted beyond those before it, and the plans that ran."""
    found, plans = [], []
    for _ in range(steps):
        trained.model.zero_grad()
        with meter.counted:
            meter.counted.peak = before = meter.counted.live
            loss = step(*trained.inputs)
            plans.append(step._run.plan if step._first is None else step._first.run.plan)
            loss.backward()
        found.append(meter.counted.peak - before)
        del loss
    return found, plans


def test_the_first_step_takes_least_and_the_next_ones_what_the_budget_allows(trained, budget):
    meter = CountingMeter()
    step = fitted(trained, budget, meter)
    found, plans = peaks(trained, step, meter)
    frugal, *later = plans
    assert later == [step.plan, step.plan]
    assert found[0] < found[2]
    copied = found[1] - found[2]  # a plan's first forward keeps a copy of the buffers that it writes, on the host
    assert 0 <= copied < 1000
    for taken, plan in zip(found, plans, strict=True):
        simulation = simulate(plan, trained.costs)
        assert simulation.peak_bytes <= budget
        assert taken <= predicted_bytes(plan, trained.costs, simulation) + copied
    assert simulate(frugal, trained.costs).time_ms > step.simulation.time_ms


def test_what_the_first_step_takes_beyond_its_prediction_is_taken_from_the_later_plan(trained, budget):
    plain = fitted(trained, budget, None)
    more = budget - plain.simulation.peak_bytes + budget // 50
    meter = CountingMeter(more)
    step = fitted(trained, budget, meter)
    _, plans = peaks(trained, step, meter)
    assert plans[1] is step.plan
    assert plans[1] != plain.plan
    assert step.simulation.peak_bytes <= budget - more
    assert step.simulation.time_ms < simulate(plans[0], trained.costs).time_ms
    trained.check(step)


class Block:
    """Notes the layouts that it changes to."""

    taken = True

    def __init__(self):
        self.layouts = []

    def change(self, layout):
        self.layouts.append(layout)

    def close(self):
        self.taken = False


def test_another_plan_gets_a_block_of_its_own_and_the_frugal_one_stays_in_that_of_the_first_step(trained, budget):
    for more in (0, budget // 50, budget):
        plain = fitted(trained, budget, None)
        meter = CountingMeter(more and budget - plain.simulation.peak_bytes + more)
        step = fitted(trained, budget, meter)
        step._block = block = Block()
        step._layout = lambda plan: ("layout", plan)
        _, plans = peaks(trained, step, meter)
        assert block.layouts == ([("layout", plans[1])] if more == budget // 50 else [])
        step.close()


def test_where_no_room_is_left_the_frugal_plan_stays(trained, budget):
    meter = CountingMeter(budget)
    step = fitted(trained, budget, meter)
    _, plans = peaks(trained, step, meter)
    assert plans[0] is plans[1] is plans[2] is step.plan
    trained.check(step)


def test_a_plan_that_does_not_fit_side_by_side_follows_a_first_step_that_took_what_was_predicted(trained, budget):
    step = fitted(trained, budget, CountingMeter())
    frugal, later = step._first.run, step._run
    asked = []
    first = FirstStep(frugal, trained.costs, -1, CountingMeter(), asked.append)
    assert first.follow(later) is later
    assert asked == []


def test_what_is_told_of_the_allocator_is_of_the_plan_that_runs(trained, budget):
    for more in (0, budget):
        meter = CountingMeter(more)
        step = fitted(trained, budget, meter)
        told = []
        step._told = lambda plan, told=told: told.append(plan) or StatedBudget(budget=len(told))
        _, plans = peaks(trained, step, meter)
        assert (plans[0] is plans[1]) == bool(more)
        assert told == ([step.plan] if more else []), "the frugal plan stays, and the budget told of another one"
        assert step.stated.budget == (1 if more else budget)


def test_plans_change_between_steps_only(trained, budget):
    meter = CountingMeter()
    step = fitted(trained, budget, meter, "checkpoint")
    first, second = step(*trained.inputs), step(*trained.inputs)
    frugal = step._first.run
    first.backward()
    assert step._first.ended
    second.backward()  # of the plan of its own forward
    assert frugal.forwards == 2
    trained.model.zero_grad()
    step(*trained.inputs).backward()
    assert frugal.forwards == 2
    assert step._first is None


def test_a_step_without_its_backward_is_no_first_step(trained, budget):
    meter = CountingMeter()
    step = fitted(trained, budget, meter)
    loss = step(*trained.inputs)
    del loss  # its backward never runs
    step(*trained.inputs)
    assert not step._first.ended
    trained.check(step)


def test_without_a_budget_or_a_meter_there_is_one_plan(trained, budget):
    assert fitted(trained, None, CountingMeter())._first is None
    assert fitted(trained, budget, None)._first is None


class Outside:
    """Says which bytes are there beside the allocator, and notes before which steps it was asked."""

    def __init__(self):
        self.bytes = self.step = 0
        self.asked = []

    def __call__(self):
        self.asked.append(self.step)
        return self.bytes


def test_what_grows_beside_the_allocator_beyond_its_reserve_is_taken_from_the_plan(trained, budget):
    meter, outside = CountingMeter(), Outside()
    step = fitted(trained, budget, meter, outside=outside)
    filling = fitted(trained, budget, None)
    grown = budget - filling.simulation.peak_bytes + budget // 50
    taken = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for outside.step in range(6):
            outside.bytes = grown if outside.step > 1 else 0  # kernels of the second step
            ((each,), _) = peaks(trained, step, meter, steps=1)
            taken.append(each)
    assert step.simulation.peak_bytes <= budget - grown < filling.simulation.peak_bytes
    assert taken[1] > max(taken[2:])
    assert outside.asked == [1, 2, 4], "asking the driver takes time"
    trained.check(step)


def test_growth_that_the_plan_leaves_room_for_changes_nothing(trained, budget):
    outside = Outside()
    step = fitted(trained, budget, CountingMeter(), outside=outside)
    outside.bytes = budget - step.simulation.peak_bytes
    before = step.plan
    trained.check(step)
    assert outside.asked
    assert step.plan is before


def test_growth_comes_on_top_of_what_the_first_step_took(trained, budget):
    outside = Outside()
    more = budget // 100
    step = fitted(trained, budget, CountingMeter(more), outside=outside)
    outside.bytes = budget - fitted(trained, budget, None).simulation.peak_bytes + more
    trained.check(step)
    assert step.simulation.peak_bytes <= budget - more - outside.bytes


def test_growth_for_which_there_is_no_plan_is_told_once(trained, budget):
    outside = Outside()
    step = fitted(trained, budget, CountingMeter(), outside=outside)
    outside.bytes = budget
    with pytest.warns(UserWarning, match=rf"{bytes_up(budget)} beyond the budget's reserve") as caught:
        trained.check(step)
    assert len([each for each in caught if "reserve" in str(each.message)]) == 1


@pytest.mark.parametrize("silent", [False, True])
def test_what_other_processes_take_changes_no_plan(trained, budget, monkeypatch, silent):
    step = fitted(trained, budget, CountingMeter(), outside=outside_meter(GPU))
    before = step.plan
    shared = SharedGpu(monkeypatch, reserved=5 * MIB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for others in (0, 100 * MIB, 30000 * MIB, 200 * MIB, 50000 * MIB):
            shared.processes, shared.silent = {7: 5 * MIB, 8: others}, silent
            trained.model.zero_grad()
            step(*trained.inputs).backward()
    assert step._guard._steps >= 4, "nothing looked"
    assert step.plan is before


def test_what_this_process_takes_beside_others_is_taken_from_the_plan(trained, budget, monkeypatch):
    step = fitted(trained, budget, CountingMeter(), outside=outside_meter(GPU))
    filling = fitted(trained, budget, None)
    grown = budget - filling.simulation.peak_bytes + budget // 50
    SharedGpu(monkeypatch, reserved=5 * MIB).processes = {7: 5 * MIB + grown, 8: 30000 * MIB}
    trained.check(step)
    assert step.simulation.peak_bytes <= budget - grown < filling.simulation.peak_bytes


def test_a_step_that_is_planned_anew_has_the_layouts_of_its_plan_and_ends_the_updates_in_parts_that_came_with_it(
    trained,
):
    step, other = trained.fitted("stock"), trained.fitted("stock")
    ended = []
    other._layout, other._ends = dict, [lambda: ended.append("other's")]
    step._layout, step._ends = list, [lambda: ended.append("own")]
    run, step._refit = other._run, lambda *_: other
    step._replan((), {}, None, None)
    assert (step._run, step._layout, other._layout) == (run, dict, list)
    other.close()
    assert ended == ["own"]
    step.close()
    assert ended == ["own", "other's"]
