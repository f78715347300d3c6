"""What a pool of a fixed size has left for a convolution's workspace (Dymem, section 4.2).

A workspace is one piece of memory, so what counts is the largest free piece when the convolution begins: a hole between
storages, or the gap between both ends of the pool. It is asked for in steps of 1 MiB.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from ucudnn.configuration import Configuration
from ucudnn.memory.plans.actions import COMPUTES, ActionKind
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.pools.free_list import FreeList
from ucudnn.memory.pools.placement import in_order
from ucudnn.memory.pools.two_ended import Mobility, TwoEndedSpace
from ucudnn.memory.simulation.result import Lifetime
from ucudnn.memory.simulation.simulator import fixed_bytes, simulate
from ucudnn.memory.step.costs import Costs

_STEP = 1 << 20
_SCRATCH = -1  # the storage of a lifetime that is scratch


def room_for_workspaces(
    plan: MemoryPlan, costs: Costs, total_bytes: int, mobility: Callable[[Lifetime], Mobility]
) -> dict[int, int]:
    """Return the bytes of the largest free piece when each convolution begins, by the index of its operation.

    Args:
        plan: a plan, whose storages are placed in the pool as they come.
        costs: what the step takes on a device.
        total_bytes: of the pool's main space, and of all that exists before the step. Gradients of parameters and
            outputs of the step are not placed, but their bytes count.
        mobility: how the pool groups pieces: `mobility_in`, or always MOVABLE for plain best fit.
    """
    probes = {  # with one byte of workspace, whose lifetime shows when a convolution begins
        operation: Configuration(parts=(replace(front[0].parts[0], workspace_bytes=1), *front[0].parts[1:]))
        for operation, front in costs.configurations.items()
    }
    done = simulate(replace(plan, configurations=probes), costs)
    order = [target for kind, target in plan.actions if kind in COMPUTES]
    running = dict(zip(order, done.running_bytes, strict=True))
    pool_bytes = total_bytes - fixed_bytes(plan, costs)
    lifetimes = done.lifetimes
    space, found = TwoEndedSpace(), dict[int, int]()
    parts: dict[int, tuple[FreeList, int]] = {}
    for ended, begun in in_order(lifetimes):
        for index in ended:
            if index in parts:
                part, offset = parts.pop(index)
                part.give_back(offset, lifetimes[index].size)
        for index in begun:
            life = lifetimes[index]
            kind, operation = plan.actions[life.action]
            if life.storage == _SCRATCH and kind is ActionKind.RUN and operation in probes:
                found[operation] = min(space.room(pool_bytes), total_bytes - running[operation] + life.size)
            else:
                parts[index] = space.take(life.size, mobility(life))
    return found


def fastest_in_room(costs: Costs, room: Mapping[int, int], step: int = _STEP) -> dict[int, Configuration]:
    """Return the fastest configuration of each convolution whose workspace fits its room; the smallest if none does."""
    chosen = {}
    for operation, front in costs.configurations.items():
        sizes = (costs.rounded(-(-each.workspace_bytes // step) * step) for each in front)
        fitting = [each for each, size in zip(front, sizes, strict=True) if size <= room[operation]]
        chosen[operation] = fitting[-1] if fitting else front[0]
    return chosen
