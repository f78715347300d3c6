"""Plans train to PyTorch's bits on a GPU with deterministic algorithms: every policy, and random plans.

It is the twin of `tests/memory/torch/running/test_fit.py`. PyTorch's own step is trained twice first. Where it does
not repeat itself, the operation that differs is named in a warning, and plans must stay within the spread of some runs.
"""

import functools
import warnings

import pytest
import torch

from tests.support.memory_plans import random_plan_in_parts
from tests.support.plain_training import Race
from tests.support.repeatability import (
    differing_operation,
    differing_tensor,
    distance,
    lacking_operation,
    largest_distance,
    same,
)
from tests.support.small_networks import NETWORKS, small_network
from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.policies.catalog import POLICIES

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),  # PyTorch names what may not repeat itself
    pytest.mark.filterwarnings("default:PyTorch's own:UserWarning"),
]

RUNS = 5  # of PyTorch's step, where it does not repeat itself
COPIES = {ActionKind.OFFLOAD, ActionKind.PREFETCH}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """Let PyTorch and cuDNN compute the same bits each time, as far as they can."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class DeviceRace(Race):
    """A race on the GPU, of which PyTorch's own runs may differ."""

    def __init__(self, name):
        super().__init__(small_network(name), outside=name == "several", device="cuda")
        self.name = name
        self.runs = [(self.losses, self.after), self.plain()]
        self.passed = {}  # by the actions of a plan
        if not same(*self.runs):
            self.runs += [self.plain() for _ in range(RUNS - 2)]
            what = differing_operation(self.plain) or "an operation that differs seldom"
            self.spread = largest_distance(self.runs)
            warnings.warn(f"PyTorch's own {name} does not repeat itself: {what}, {self.spread:.1e}", stacklevel=2)
        else:
            self.spread = 0.0

    def check(self, step):
        """Train a fitted step from the start; compare it with PyTorch's runs: to the bit where they repeat."""
        found = self.trained(step)
        if self.spread:
            nearest = min(distance(run, found) for run in self.runs)
            assert nearest <= self.spread, f"{self.name}: {nearest:.1e} beyond PyTorch's own spread"
        else:
            assert same(self.runs[0], found), self.difference(found, step)

    def difference(self, found, step):
        """Return where a fitted step left PyTorch's run: what decides between the plan, its copies and the operators.

        Where even PyTorch's run is another one now, the plan need not be at fault. Where no operator differs as long as
        each result is copied to the host, copies and compute race, or an operator differs seldom.
        """
        what = differing_tensor(self.runs[0], found, [*self.model.state_dict()])
        again = differing_tensor(self.runs[0], self.plain(), [*self.model.state_dict()])
        operation = lacking_operation(self.plain, lambda: self.trained(step))
        return (
            f"{self.name}: off by {distance(self.runs[0], found):.1e}, first in {what};"
            f" PyTorch's own run once more: {again or 'the same'};"
            f" with each result copied to the host: {operation or 'the same'}"
        )

    def check_once(self, plan):
        """Check a plan, unless another policy's plan with the same actions was checked; return what moved."""
        actions = tuple(plan.actions)
        if actions not in self.passed:
            step = self.fitted(plan)
            self.check(step)
            self.passed[actions] = step.transfers.offloaded_bytes
            step.close()
        return self.passed[actions]


@functools.cache
def race(name):
    torch.manual_seed(0)
    return DeviceRace(name)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [*NETWORKS, "several"])
def test_every_policy_trains_to_the_bits_of_pytorch(name, policy):
    trained = race(name)
    plan = POLICIES[policy].plan(trained.program.graph, trained.costs, None)
    moved = trained.check_once(plan)
    assert (moved > 0) == any(kind in COPIES for kind, _ in plan.actions)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*NETWORKS, "several"])
def test_random_plans_train_to_the_bits_of_pytorch(name, seed):
    trained = race(name)
    plan = random_plan_in_parts(trained.program.graph, trained.costs, seed)
    assert {kind for kind, _ in plan.actions} >= COPIES
    assert trained.check_once(plan) > 0
