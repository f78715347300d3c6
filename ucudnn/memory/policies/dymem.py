"""Policies 'dymem' and 'dymem-skip': Dymem's order, offloads, prefetches and workspaces (sections 3.1, 3.2 and 4.2).

Operations run depth first. The inputs of all layers leave but those of fully connected layers, Softmax and Dropout.
Compute does not wait at the end of a layer; it waits where the pool is full, and at the end of forward for all
offloads. In backward, `search_prefetch_layers` says what comes back beside a layer. A convolution takes the fastest
algorithm whose workspace fits into the largest piece that the pool has left when it begins, in steps of 1 MiB.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Literal

from ucudnn.memory.plans.actions import ActionKind, synchronize
from ucudnn.memory.plans.layerwise import layerwise_actions
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.pool_room import fastest_in_room, room_for_workspaces
from ucudnn.memory.pools.two_ended import mobility_in
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.simulation.stalls import with_stalls
from ucudnn.memory.step.budget import check_budget, check_need
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.layers import StepLayer, find_layers, parts_in_order
from ucudnn.memory.step.order import depth_first_order

PastLimit = Literal["stop", "skip"]
"""What the search does at a convolution when two reside: it ends, or goes on to layers before it. Algorithm 2 leaves
this open, because its loop variable is undefined in print."""

_MOST_CONVOLUTIONS = 2  # that may reside (section 3.2.2); the current layer counts


@dataclass(frozen=True, kw_only=True)
class DymemPolicy:
    """Dymem. Its pool is the budget; where the pool places storages is not part of the plan: see TwoEndedPool.

    Attributes:
        past_limit: the reading of algorithm 2.
    """

    past_limit: PastLimit

    def plan(self, graph: StepGraph, costs: Costs, budget: int | None) -> MemoryPlan:
        """Return the plan of a step. Without a budget, the pool never blocks and every workspace fits.

        Raises:
            BudgetError: if the plan's peak is above the budget with the smallest workspaces. The paper then restarts
                with a larger pool.
        """
        name = "dymem" if self.past_limit == "stop" else "dymem-skip"
        order = parts_in_order(graph, depth_first_order(graph))
        check_budget(graph, costs.with_configurations(costs.smallest), budget, order)
        chosen = costs.fastest if budget is None else costs.smallest
        layers = find_layers(graph, order)
        leaving = {
            number: layer.inputs for number, layer in enumerate(layers.forward) if layer.inputs and not layer.resident
        }

        search = partial(search_prefetch_layers, layers.forward, past_limit=self.past_limit)
        plan = MemoryPlan(
            policy=name,
            graph=graph,
            actions=layerwise_actions(graph, layers, leaving, search, synchronous=False),
            budget=budget,
            configurations=chosen,
        )
        if budget is None:
            return plan
        # Where all offloads have ended behind themselves, the peak is the least that waiting can reach.
        settled = ((each, synchronize()) if each.kind is ActionKind.OFFLOAD else (each,) for each in plan.actions)
        least = simulate(replace(plan, actions=tuple(chain.from_iterable(settled))), costs).peak_bytes
        check_need(name, graph, least, budget)
        waiting = with_stalls(plan, costs, budget)  # with the smallest workspaces
        room = room_for_workspaces(waiting, costs, budget, mobility_in(waiting))
        return with_stalls(replace(plan, configurations=fastest_in_room(costs, room)), costs, budget)


def search_prefetch_layers(
    layers: Sequence[StepLayer], current: int, is_away: Callable[[int], bool], past_limit: PastLimit
) -> list[int]:
    """Return the layers whose inputs come back beside a layer, in order (algorithm 2).

    That is every layer before the current one whose input is away, but of convolutions only the nearest: two, of which
    the current one counts if it is a convolution. A convolution counts whether its input is away or not, as printed.
    """
    if not layers:  # the step has no forward
        return []
    convolutions = int(layers[current].convolution)
    found = []
    for number in range(current - 1, -1, -1):
        if layers[number].convolution:
            if convolutions == _MOST_CONVOLUTIONS:
                if past_limit == "stop":
                    break
                continue
            convolutions += 1
        if is_away(number):
            found.append(number)
    return found
