"""All policies by name, and the interface that they share."""

from collections.abc import Mapping
from typing import Protocol

from ucudnn.errors import InvalidValueError
from ucudnn.memory.costs import Costs
from ucudnn.memory.graph import StepGraph
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.base import BasePolicy
from ucudnn.memory.policies.checkpoint import CheckpointPolicy
from ucudnn.memory.policies.stock import StockPolicy


class MemoryPolicy(Protocol):
    """What every policy does."""

    def plan(self, graph: StepGraph, costs: Costs, budget: int | None) -> MemoryPlan:
        """Return a valid plan whose simulated peak is at most the budget.

        Args:
            graph: the step.
            costs: times and sizes of a device for the step.
            budget: bytes, persistent bytes and scratch included; None asks for the policy's plan without a bound.

        Raises:
            BudgetError: if the policy cannot keep the budget.
        """


POLICIES: Mapping[str, MemoryPolicy] = {
    "stock": StockPolicy(),
    "base": BasePolicy(),
    "checkpoint": CheckpointPolicy(),
}
"""A new policy is a file beside this one and a line here."""


def find_policy(name: str) -> MemoryPolicy:
    """Return a policy by its name.

    Raises:
        InvalidValueError: if there is none of this name; the message lists all.
    """
    if name not in POLICIES:
        raise InvalidValueError(f"policy {name!r} is not known: take one of {', '.join(POLICIES)}")
    return POLICIES[name]
