"""All policies by name, and the interface that they share."""

from collections.abc import Mapping
from typing import Protocol

from ucudnn.errors import InvalidValueError
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.base import BasePolicy
from ucudnn.memory.policies.checkpoint import CheckpointPolicy
from ucudnn.memory.policies.dymem import DymemPolicy
from ucudnn.memory.policies.foreign import ForeignPolicy, load_policy
from ucudnn.memory.policies.joint import JointPolicy
from ucudnn.memory.policies.selective import SelectivePolicy
from ucudnn.memory.policies.stock import StockPolicy
from ucudnn.memory.policies.swaps.hidden import HiddenSwapPolicy
from ucudnn.memory.policies.swaps.spill import SpillPolicy
from ucudnn.memory.policies.swaps.swap import SwapPolicy
from ucudnn.memory.policies.vdnn import VdnnPolicy
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.units import shortened


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
    "checkpoint-selective": SelectivePolicy(),
    "vdnn-conv-m": VdnnPolicy(offloads="conv", fastest=False),
    "vdnn-conv-p": VdnnPolicy(offloads="conv", fastest=True),
    "vdnn-all-m": VdnnPolicy(offloads="all", fastest=False),
    "vdnn-all-p": VdnnPolicy(offloads="all", fastest=True),
    "vdnn-dynamic": VdnnPolicy(offloads="dynamic"),
    "vdnn-ext-conv-m": VdnnPolicy(offloads="conv", fastest=False, extended=True),
    "vdnn-ext-conv-p": VdnnPolicy(offloads="conv", fastest=True, extended=True),
    "vdnn-ext-all-m": VdnnPolicy(offloads="all", fastest=False, extended=True),
    "vdnn-ext-all-p": VdnnPolicy(offloads="all", fastest=True, extended=True),
    "vdnn-ext-dynamic": VdnnPolicy(offloads="dynamic", extended=True),
    "swap": SwapPolicy(),
    "swap-capped": SwapPolicy(capped=True),
    "swap-hidden": HiddenSwapPolicy(),
    "spill": SpillPolicy(),
    "joint": JointPolicy(),
    "dymem": DymemPolicy(past_limit="stop"),
    "dymem-skip": DymemPolicy(past_limit="skip"),
}
"""A new policy is a file beside this one and a line here."""


AUTO = "auto"
"""The name that stands for the fastest of all policies within a budget."""


def find_policy(name: str) -> MemoryPolicy:
    """Return a policy by its name, or by the name of its class, 'module:Class'.

    Raises:
        InvalidValueError: if there is none of this name; the message lists all.
    """
    if ":" in name:
        return load_policy(name)
    if name not in POLICIES:
        raise InvalidValueError(f"policy {name!r} is not known: take one of {', '.join(POLICIES)}")
    return POLICIES[name]


def chosen_policies(policy: str | MemoryPolicy) -> list[MemoryPolicy]:
    """Return the policies that a choice stands for: all of them for 'auto', else one by its name or itself.

    Raises:
        InvalidValueError: if there is none of the name, or it is neither a name nor a policy.
    """
    if isinstance(policy, str):
        return [*POLICIES.values()] if policy == AUTO else [find_policy(policy)]
    shipped = type(policy) in {ForeignPolicy, *map(type, POLICIES.values())}
    return [policy if shipped else ForeignPolicy(policy, shortened(policy))]


def named_policies(text: str) -> list[str]:
    """Return the policies of a text of names with commas between them.

    The beginning of several names stands for all of them: 'vdnn-ext' for 'vdnn-ext-all-p' and its sisters. 'auto' stays
    as it is. It raises an InvalidValueError if there is none of a name; the message lists all.
    """
    found: list[str] = []
    for name in (each.strip() for each in text.split(",")):
        sisters = [each for each in POLICIES if each.startswith(f"{name}-")]
        if name in POLICIES or not sisters:
            if name != AUTO:
                find_policy(name)
            sisters = [name]
        found += sisters
    return list(dict.fromkeys(found))
