"""Fitted steps train to the same bits as plain ones, by every policy and by random plans, and do what the plan says."""

import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support.live_bytes import LiveBytes
from tests.support.memory_plans import random_plan_in_parts
from tests.support.plain_training import CountedCopies, Race, train
from tests.support.repeatability import differing_operation, differing_tensor, distance, largest_distance, same
from tests.support.small_networks import NETWORKS, small_network
from ucudnn.memory.plans.actions import ActionKind, run
from ucudnn.memory.plans.frees import with_frees
from ucudnn.memory.plans.lower_order import lower_order
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.catalog import POLICIES, find_policy
from ucudnn.memory.step.liveness import measure_liveness

pytestmark = pytest.mark.usefixtures("one_thread")
aten = torch.ops.aten
HELPERS = {
    aten.as_strided.default, aten.alias.default, aten.clone.default, aten.empty_strided.default,
    aten.ones_like.default, aten.copy_.default, aten.detach.default, aten.view.default, aten.view.dtype,
}  # fmt: skip


@functools.cache
def race(name, **options):
    torch.manual_seed(0)
    return Race(small_network(name), **options)


def check(trained, plan, name):
    """Train by a plan or policy as the plain loop does, and name it where that differs."""
    try:
        trained.check(trained.fitted(plan))
    except AssertionError as error:
        error.add_note(f"trained by {name}")
        raise


def policies_of(network):
    """Return the policies that train a network: one network each, because random plans try all actions on each."""
    return [*POLICIES][NETWORKS.index(network) :: len(NETWORKS)]


@pytest.mark.parametrize("name", NETWORKS)
def test_policies_train_to_the_bits_of_the_plain_loop(name):
    for policy in policies_of(name):
        check(race(name), policy, policy)


@pytest.mark.parametrize("name", ["unet", "gpt"])
def test_a_plan_that_copies_beside_what_runs_again_trains_to_the_bits_of_the_plain_loop(name):
    trained = race(name)
    graph = trained.program.graph
    slow = tuple(10.0 if "convolution" in each.kind or "mm" in each.kind else 1.0 for each in graph.operations)
    costs = replace(trained.costs, time_ms=slow, issue_ms=(), configurations={}, memory_bytes=10**10)
    costs = replace(costs, offload_bytes_per_ms=300.0, prefetch_bytes_per_ms=300.0)
    plan = find_policy("joint").plan(graph, costs, measure_liveness(graph, costs).floor_bytes)
    kinds = Counter(kind for kind, _ in plan.actions)
    assert min(kinds[ActionKind.OFFLOAD], kinds[ActionKind.RECOMPUTE]) > 0
    step = trained.fitted(plan)
    with CountedCopies(step) as copies:
        trained.check(step)
    assert copies.calls["offload"] == trained.steps * kinds[ActionKind.OFFLOAD]


@pytest.mark.parametrize("name", ["unet", "gpt"])
def test_a_step_whose_backward_runs_in_another_order_trains_to_the_bits_of_the_plain_loop(name):
    trained = race(name)
    graph = trained.program.graph
    order = lower_order(graph, trained.costs)
    assert order != sorted(order)
    actions = with_frees(graph, [*map(run, order)])
    check(trained, MemoryPlan(policy="order", graph=graph, actions=actions), "another order")


@pytest.mark.parametrize("name", NETWORKS)
def test_spilling_trains_at_the_floor(name):
    trained = race(name)
    floor = measure_liveness(trained.program.graph, trained.costs).floor_bytes
    step = trained.fitted("spill", floor)
    assert step.simulation.peak_bytes == floor
    with CountedCopies(step) as copies:
        trained.check(step)
    kinds = Counter(kind for kind, _ in step.plan.actions)
    assert copies.calls["offload"] == trained.steps * kinds[ActionKind.OFFLOAD] > 0
    assert copies.calls["prefetch"] == trained.steps * kinds[ActionKind.PREFETCH] > 0


class WrittenAnew(nn.Module):
    """A layer's output is overwritten whole, long after it was read last."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        kept = self.first(x)
        wide = torch.tanh(self.second(torch.tanh(kept)))
        kept.copy_(wide)
        return self.last(torch.tanh(kept) * wide)


def test_bytes_that_are_written_anew_are_freed_before():
    torch.manual_seed(0)
    inputs = torch.randn(256, 8), torch.randn(256, 4)
    trained = Race((WrittenAnew(), inputs, lambda output, target: (output - target).square().mean()))
    step = trained.fitted("spill")
    copied = {target for kind, target in step.plan.actions if kind is ActionKind.OFFLOAD}
    freed = Counter(target for kind, target in step.plan.actions if kind is ActionKind.FREE)
    assert [target for target, times in freed.items() if times > 1 and target not in copied]
    trained.check(step)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_action_keeps_the_bits_of_the_plain_loop(name):
    """Random plans recompute, copy and free; `test_moves` lets storages move, and the tests of convolutions divide."""
    trained, acted = race(name), set()
    for seed in range(6):
        plan = random_plan_in_parts(trained.program.graph, trained.costs, seed)
        kinds = {kind for kind, _ in plan.actions}
        assert {ActionKind.OFFLOAD, ActionKind.PREFETCH} <= kinds
        acted |= kinds
        check(trained, plan, f"random plan {seed}")
    assert acted >= {ActionKind.RUN, ActionKind.RECOMPUTE, ActionKind.FREE, ActionKind.SYNCHRONIZE}


@pytest.mark.parametrize("policy", ["stock", "checkpoint", "vdnn-all-p", "vdnn-ext-all-p", "swap", "dymem", "spill"])
@pytest.mark.parametrize("name", ["resnet18", "unet", "gpt", "inplace"])
def test_the_code_runs_copies_and_frees_what_the_plan_says(name, policy):
    """Nothing but the plan's operators runs, as often as the plan says, and storages live as long as it says."""
    trained = race(name, kind=None)
    step = trained.fitted(policy, debug=False)
    plan, program = step.plan, trained.program
    expected = Counter(
        program.calls[target].func
        for kind, target in plan.actions
        if kind in (ActionKind.RUN, ActionKind.RECOMPUTE) and target not in program.outside
    )
    expected.update(call.func for _, call in program.uncounted)
    train(step, None, trained.inputs, steps=1)
    trained.model.zero_grad()
    present = [*trained.model.state_dict(keep_vars=True).values(), *trained.inputs]
    with CountedCopies(step) as copies, LiveBytes(present) as live:
        step(*trained.inputs).backward()
    ran = Counter({func: count for func, count in live.calls.items() if func not in HELPERS})
    assert ran == Counter({func: count for func, count in expected.items() if func not in HELPERS})
    kinds = Counter(kind for kind, _ in plan.actions)
    assert copies.calls["offload"] == kinds[ActionKind.OFFLOAD]
    assert copies.calls["prefetch"] == kinds[ActionKind.PREFETCH]
    assert live.peak == pytest.approx(step.simulation.peak_bytes, rel=0.02)
    if policy != "stock":
        assert kinds[ActionKind.OFFLOAD] + kinds[ActionKind.RECOMPUTE] > 0


def test_the_operation_that_does_not_repeat_itself_is_named():
    x = torch.ones(3)
    assert differing_operation(lambda: torch.relu(x) + 1) == ""
    assert differing_operation(lambda: torch.relu(torch.rand_like(x)) + 1) == "aten.rand_like.default"
    assert differing_operation(lambda: torch.full((3,), torch.nan)) == ""


def test_the_tensor_that_differs_first_is_named():
    losses, state = [torch.ones(()), torch.zeros(())], [torch.ones(2), torch.zeros(3), torch.full((1,), torch.nan)]
    assert differing_tensor((losses, state), (losses, state), ["weight", "bias"]) == ""
    assert differing_tensor((losses, state), (losses[::-1], state), ["weight"]) == "the loss of step 0"
    assert differing_tensor((losses, state), (losses, [state[0], state[1] + 1, state[2]]), ["weight", "bias"]) == "bias"
    assert differing_tensor((losses, state), (losses, [*state[:2], state[0]]), ["weight"]).startswith("tensor 1 of")


def test_runs_are_the_same_or_some_way_apart():
    runs = [([torch.ones(())], [torch.tensor([4.0, 2.0 + shift])]) for shift in (0.0, 0.5, 0.25, 0.0)]
    assert same(runs[0], runs[3])
    assert not same(runs[0], runs[1])
    assert (distance(runs[0], runs[3]), distance(runs[0], runs[2])) == (0.0, 0.0625)
    assert largest_distance(runs) == 0.125
