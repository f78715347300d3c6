"""Policies of users: an object with a method `plan`, given itself or by the name of its class, 'module:Class'."""

import sys
from functools import cache
from importlib import import_module
from typing import Any, final

from ucudnn.errors import InvalidValueError
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.units import bytes_down, bytes_up, shortened


@final
class ForeignPolicy:
    """A policy that does not ship with ucudnn, whose plans are checked.

    Args:
        policy: an object with a method plan(graph, costs, budget), which returns a MemoryPlan or raises a BudgetError.
        name: what errors call it.

    Raises:
        InvalidValueError: if it has no such method; later, if what that returns is no plan that keeps the budget.
    """

    def __init__(self, policy: Any, name: str) -> None:
        if isinstance(policy, type) or not callable(getattr(policy, "plan", None)):
            raise InvalidValueError(
                f"policy={name} is no policy: give 'auto', a name, 'module:Class' or an object with a method"
                " plan(graph, costs, budget)"
            )
        self._policy, self._name = policy, name

    def plan(self, graph: StepGraph, costs: Costs, budget: int | None) -> MemoryPlan:
        """Return the policy's plan; arguments and errors are those of `MemoryPolicy.plan`."""
        found = self._policy.plan(graph, costs, budget)
        if not isinstance(found, MemoryPlan):
            raise InvalidValueError(
                f"policy {self._name} returned {shortened(found)}: plan(graph, costs, budget) returns a MemoryPlan, or"
                " raises a BudgetError if there is none"
            )
        peak = simulate(found, costs).peak_bytes
        if budget is not None and peak > budget:
            raise InvalidValueError(
                f"policy {self._name} returned a plan of {bytes_up(peak)}, and the budget is {bytes_down(budget)}:"
                " raise a BudgetError where there is none for it"
            )
        return found


@cache
def load_policy(name: str) -> ForeignPolicy:
    """Return an object of the class that 'module:Class' names; modules of the current folder are found, too.

    Raises:
        InvalidValueError: if there is no such module or class, or it needs arguments.
    """
    module, _, path = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return ForeignPolicy(getattr(import_module(module), path)(), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # the last one: no name of a module
        where = ": no such file in this folder or on PYTHONPATH" if isinstance(error, ModuleNotFoundError) else ""
        raise InvalidValueError(f"policy {name!r} cannot be loaded: {error}{where}") from error
