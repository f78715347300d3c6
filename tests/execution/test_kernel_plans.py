"""The kernels of a handle: shapes that change for ever are forgotten, and planned again if they recur."""

from dataclasses import replace

import pytest

from tests.support.faulty_backend import check
from tests.support.operands import QUICK
from ucudnn.configuration import Configuration
from ucudnn.errors import InfeasibleError, UcudnnError
from ucudnn.execution import kernel_plans
from ucudnn.handle import Handle
from ucudnn.kernel import KernelKey
from ucudnn.planning.choices import Origin
from ucudnn.problem import ConvolutionProblem, DataType, Operation


def problem_of(height=5):
    return ConvolutionProblem(
        operation=Operation.FORWARD, batch=2, channels=3, spatial=(height, 6), filters=4, kernel=(3, 3), padding=(1, 1),
        dtype=DataType.FLOAT64,
    )  # fmt: skip


def test_only_the_latest_kernels_are_kept_and_older_ones_are_planned_again(monkeypatch):
    monkeypatch.setattr(kernel_plans, "_MOST_KERNELS", 4)
    handle = Handle(backend="cpu", database="off", effort=QUICK)
    wide = Handle(backend="cpu", database="off", total_workspace="1MiB", effort=QUICK)
    for height in (4, 5, 6, 7, 8, 9, 4, 4):
        check(handle, problem_of(height))
        check(wide, problem_of(height), layer="one")
    assert [entry.kernel.problem.spatial[0] for entry in handle.plans.entries.values()] == [7, 8, 9, 4]
    assert len(handle.plans.decisions) == 4
    assert [each.calls for each in handle.report().kernels] == [1, 1, 1, 2]
    assert handle.report().changed == 0
    assert len(wide.plans.entries) == 6, "a division has a segment for each kernel"


def test_seconds_are_those_of_decisions_only(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(kernel_plans, "perf_counter", lambda: now[0])
    decide = kernel_plans.decide

    def slow(*arguments):
        now[0] += 2.0
        return decide(*arguments)

    monkeypatch.setattr(kernel_plans, "decide", slow)
    handle = Handle(backend="cpu", database="off", effort=QUICK)
    for _ in range(3):
        check(handle, problem_of())
        now[0] += 10.0
        assert handle.plans.seconds == 2.0

    def failing(*_):
        now[0] += 1.0
        raise UcudnnError("nothing fits")

    monkeypatch.setattr(kernel_plans, "decide", failing)
    with pytest.raises(UcudnnError, match="nothing fits"):
        handle.plans.plan(KernelKey("", problem_of(7), 0, False))
    assert handle.plans.seconds == 3.0, "an error takes time, too"


@pytest.fixture
def planned():
    """Return a handle within 1 MiB, a kernel that it has planned, and another configuration of that."""
    handle = Handle(backend="cpu", database="off", effort=QUICK, workspace_limit="1MiB", policy="undivided")
    key = KernelKey("", problem_of(), 0, False)
    (whole,) = handle.plans.plan(key).decision.configuration.parts
    return handle, key, Configuration(parts=(replace(whole, size=1),) * 2)


def test_a_configuration_is_taken_for_a_while_and_the_one_before_comes_back(planned):
    handle, key, other = planned
    entry, plans = handle.plans.entries[key], handle.plans
    before, epoch = entry.decision, plans.epoch

    def computed():
        check(handle, key.problem, seed=None)
        return len(entry.plan.steps)

    assert computed() == 1
    plan = entry.plan
    kept = plans.take(key.problem, other)
    assert (entry.decision.configuration, entry.decision.origin, entry.plan) == (other, Origin.PROGRAM, None)
    assert computed() == 2
    plans.put_back(kept)
    assert entry.decision is before
    assert entry.plan is plan, "nothing is compiled again"
    assert computed() == 1
    assert plans.epoch == epoch + 2
    plans.adopt(key.problem, other)
    assert computed() == 2


def test_unwanted_algorithms_are_not_chosen_from_then_on(planned):
    handle, key, other = planned
    unwanted = other.parts[0].algorithm  # the fastest one
    for plan in (lambda: handle.plans.plan_without(key, lambda name: name == unwanted), lambda: handle.plans.plan(key)):
        assert unwanted not in {part.algorithm for part in plan().decision.configuration.parts}
    assert handle.plans.plan_without(key, lambda name: True) is None, "no others are listed"


def test_what_needs_more_than_the_limit_is_not_taken(planned):
    handle, key, other = planned
    large = replace(other, parts=tuple(replace(each, workspace_bytes=2**20 + 1) for each in other.parts))
    before, epoch = handle.plans.entries[key].decision, handle.plans.epoch
    with pytest.raises(InfeasibleError, match="needs more than 1 MiB"):
        handle.plans.take(key.problem, large)
    assert handle.plans.entries[key].decision is before
    assert handle.plans.epoch == epoch


def test_a_kernel_that_was_forgotten_meanwhile_is_not_put_back(planned):
    handle, key, other = planned
    kept = handle.plans.take(key.problem, other)
    handle.plans.forget(key)
    handle.plans.put_back(kept)
    assert not handle.plans.entries


def test_kernels_of_other_sizes_learn_from_what_is_adopted_and_not_from_what_is_taken_for_a_while(planned, monkeypatch):
    handle, key, other = planned
    learned = []
    monkeypatch.setattr(handle.plans._benchmark.rule, "learn", lambda *found: learned.append(found))
    handle.plans.put_back(handle.plans.take(key.problem, other))
    assert not learned
    handle.plans.adopt(key.problem, other)
    assert learned == [(key.problem, 2**20, other)]
