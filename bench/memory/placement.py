"""Where a plan's tensors can lie, on a CPU: bytes that PyTorch's allocator or another way takes beyond the live ones.

    python -m bench.memory.placement

Steps are those that ship with ucudnn, at the mini-batches of `bench.memory.execution`, with the times of an H200. A
convolution's scratch is modelled as copies of its operands in another layout, which gives measured peaks of both U-Nets
to 0.1 %. For each network and share of the step's peak, the fastest plan takes 97 % of the budget in live bytes. Ways:

* growing: the allocator as it is, whose range grows where no hole is large enough; bytes that it gives back to the
  driver in each step where it may have no more than the budget
* block: all bytes are taken at once, and tensors lie by best fit
* two pools: storages that backward reads in one, all else in another, each by best fit
* written in place: what forward makes lies as planned, as if every operator of forward wrote where it is told (real for
  some only), and all else by best fit in a pool of its own
* planned: all lies as planned: the bound
* moves: a block, in which storages move and slide, and copies are issued late; bytes that move in each step
* chosen: the same for the plan that `auto` chooses for an allocator that may take the whole budget: its policy, the
  time of its step with its moves, and the storages that slide

Two pools, written in place and planned place what comes and goes in a step; gradients and the optimizer's state have
bytes of their own. The others place these among activations, as the allocator does.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from bench.memory.execution import BATCHES, SHARES
from bench.tools.results import cpu_conditions, save
from bench.tools.script import add_names, command_line, note, out_of, run_main
from ucudnn.errors import BudgetError
from ucudnn.memory.allocator.block import BlockLimits
from ucudnn.memory.allocator.compaction import Compaction, compact
from ucudnn.memory.allocator.headroom import AllocatorRoom
from ucudnn.memory.allocator.replay import replay_allocator, replay_returns
from ucudnn.memory.allocator.step_replay import ReplayedPlan
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.planner.planner import frugal_plan, least_plan, make_plan, returns_ms
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.pools.best_fit import BestFitPool
from ucudnn.memory.pools.placement import live_bytes
from ucudnn.memory.pools.planned import PlannedPool
from ucudnn.memory.simulation.late_copies import with_late_copies
from ucudnn.memory.simulation.result import Lifetime, Simulation
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import Role, StepGraph
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.step.shipped import open_step

SPARED = 0.015  # of a budget, as on a GPU
PART = 0.97  # of the budget that live bytes take
TENSORS = (Role.ACTIVATION, Role.INPUT)


def step_of(name: str) -> tuple[StepGraph, Costs]:
    """Return a step and its costs, with the scratch that the docstring states."""
    graph = open_step(name).with_batch(BATCHES[name])
    costs = replace(device_costs(load_device("h200"), graph), configurations={})
    scratch = list(costs.scratch_bytes)
    for number, operation in enumerate(graph.operations):
        if "convolution" in operation.kind:
            operands = {*operation.reads, *operation.writes}
            copied = sum(graph.sizes[each] for each in operands if graph.storages[each].role in TENSORS)
            scratch[number] = max(scratch[number], copied)
    return graph, replace(costs, scratch_bytes=tuple(scratch))


def ways(plan: MemoryPlan, costs: Costs, budget: int) -> dict[str, Any]:
    """Return what each way takes for a plan, in bytes; None where it does not fit into the budget."""
    graph, done = plan.graph, simulate(plan, costs)
    scratch = dict(enumerate(costs.scratch_bytes))
    grown = replay_allocator(plan, costs, scratch, done.delayed)
    before = done.peak_bytes - grown.live_bytes  # what exists before the first step
    returned = replay_returns(plan, costs, scratch, done.delayed, budget - before)
    frugal = frugal_plan(graph, costs, "auto", plan)
    first = None if frugal is None else replayed(frugal, simulate(frugal, costs), costs)
    limits = BlockLimits(most_bytes=budget - before, live_bytes=grown.live_bytes)
    step = replayed(*with_late_copies(plan, costs), costs)
    still = replace(limits, most_bytes=4 * grown.reserved_bytes, fixed=range(len(graph.storages)))
    block, moved = (compact(step, costs, each, first) for each in (still, limits))
    pieces, around = done.lifetimes, done.peak_bytes - live_bytes(done.lifetimes)
    saved, forward = {*graph.saved}, graph.backward_begins
    made = [bool(graph.writers[each.storage]) and graph.writers[each.storage][0] < forward for each in pieces]
    kept = [each.storage >= 0 and each.storage in saved for each in pieces]
    first_pool, second_pool = split(pieces, kept)
    planned, others = split(pieces, [each.storage >= 0 and is_made for each, is_made in zip(pieces, made, strict=True)])
    return {
        "growing": before + grown.reserved_bytes,
        "given_back": returned.returned_bytes if returned.fits else None,
        "block": _taken(block, before),
        "two_pools": around + best_fit(first_pool) + best_fit(second_pool),
        "written_in_place": around + PlannedPool().place(planned).extent_bytes + best_fit(others),
        "planned": around + PlannedPool().place(pieces).extent_bytes,
        "moves": _taken(moved, before),
        "moved": None if moved is None else moved.moved_bytes,
    }


def replayed(plan: MemoryPlan, done: Simulation, costs: Costs) -> ReplayedPlan:
    """Return a plan with what its replay has to know."""
    return ReplayedPlan(plan, dict(enumerate(costs.scratch_bytes)), done.delayed, done.ended)


def chosen(graph: StepGraph, costs: Costs, budget: int) -> dict[str, Any] | None:
    """Return the figures of the plan that is chosen for an allocator; None where there is none."""
    spare = int(budget * SPARED)
    room = AllocatorRoom(most_bytes=budget, spare_bytes=spare, frugal=least_plan(graph, costs, "auto"))
    begin = perf_counter()
    try:
        plan = make_plan(graph, costs, budget, "auto", room)
    except BudgetError:
        return None
    planning_s, done, layout = perf_counter() - begin, simulate(plan, costs), room.compaction(plan, costs)
    found = {"policy": plan.policy, "live": done.peak_bytes, "taken": room.taken_bytes(plan, costs)}
    if layout is None:
        given_back = room.returns(plan, costs)
        return {**found, "time_ms": done.time_ms + returns_ms(given_back), "given_back": given_back.returned_bytes}
    moves = [move for several in layout.moves.values() for move in several]
    return {
        **found,
        "time_ms": done.time_ms + room.moves_ms(layout),
        "moved": layout.moved_bytes,
        "moves_ms": room.moves_ms(layout),
        "storages": sum(len(move.storages) for move in moves),
        "slides": sum(len(move.storages) for move in moves if move.slides),
        "copies": layout.copies,
        "planning_s": planning_s,
    }


def _taken(found: Compaction | None, before: int) -> int | None:
    return None if found is None else before + found.reserved_bytes


def split(pieces: Sequence[Lifetime], marks: Sequence[bool]) -> tuple[list[Lifetime], list[Lifetime]]:
    """Return the pieces that are marked, and the others."""
    marked = [each for each, mark in zip(pieces, marks, strict=True) if mark]
    return marked, [each for each, mark in zip(pieces, marks, strict=True) if not mark]


def best_fit(pieces: Sequence[Lifetime]) -> int:
    """Return the bytes of a pool that places pieces as they come."""
    return BestFitPool().place(pieces).extent_bytes


def cell(name: str, share: float) -> dict[str, Any]:
    """Return the figures of a network at a share of its peak."""
    graph, costs = step_of(name)
    budget = int(share * measure_liveness(graph, costs).peak_bytes)
    try:
        plan = make_plan(graph, costs, int(budget * PART), "auto")
    except BudgetError as error:
        return {"budget": budget, "least_bytes": int(error.required_bytes / PART)}
    done = simulate(plan, costs)
    found = {"policy": plan.policy, "time_ms": done.time_ms, "live": done.peak_bytes}
    return {"budget": budget, **found, **ways(plan, costs, budget), "chosen": chosen(graph, costs, budget)}


WAYS = ("growing", "block", "two_pools", "written_in_place", "planned", "moves")


def show(cases: dict[str, dict[str, Any]]) -> None:
    """Print the table: what each way takes beyond the bytes alive, in percent of these."""
    columns = ("cell", "policy", "live GiB", *WAYS, "GiB given back", "GiB moved", "chosen")
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for name, case in cases.items():
        if "policy" not in case:
            print(f"| {name} | below the floor |")
            continue
        taken = ["does not fit" if case[way] is None else f"{case[way] / case['live'] - 1:+.1%}" for way in WAYS]
        moved = ["never fits" if case[key] is None else f"{case[key] / 2**30:.2f}" for key in ("given_back", "moved")]
        print(
            f"| {name} | {case['policy']} | {case['live'] / 2**30:.2f} | {' | '.join([*taken, *moved, told(case)])} |"
        )


def told(case: dict[str, Any]) -> str:
    """Return the figures of the chosen plan as text."""
    found = case["chosen"]
    if found is None:
        return "none"
    text = f"{found['policy']}, {found['time_ms']:.0f} ms, {found['taken'] / found['live'] - 1:+.1%}"
    if "moved" not in found:
        return f"{text}, gives {found['given_back'] / 2**30:.1f} GiB back"
    return f"{text}, {found['storages']} move {found['moved'] / 2**30:.1f} GiB, {found['slides']} of them slide"


def main() -> None:
    """Compute the table of all networks, or of those that are named."""
    parser = command_line(__doc__, __spec__.name, "memory/placement.json")
    add_names(parser, BATCHES)
    arguments: Namespace = parser.parse_args()
    cases = {}
    for name in arguments.names or BATCHES:
        for share in SHARES:
            note(f"{name} {share:.0%}")
            cases[f"{name} {share:.0%}"] = cell(name, share)
    show(cases)
    if not arguments.names or arguments.out:
        save(out_of(arguments), {"conditions": cpu_conditions(), "cases": cases})


if __name__ == "__main__":
    run_main(main)
