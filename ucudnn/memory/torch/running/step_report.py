"""What a fitted step says of its plan, for people: what it does and takes, predicted and measured."""

from collections.abc import Iterable, Mapping
from statistics import median

import torch

from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.reports.plan_summary import backward_end_ms, issue_lines, plan_lines
from ucudnn.memory.simulation.result import Simulation
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.torch.device.stated_budget import StatedBudget, library_workspace_bytes, memory_parts, outside_bytes
from ucudnn.memory.torch.running.planned_run import PlannedRun
from ucudnn.units import format_bytes, format_ms


def step_report(
    run: PlannedRun,
    costs: Costs,
    stated: StatedBudget,
    beside: Mapping[str, int],
    others: Iterable[tuple[MemoryPlan, Simulation]],
    raced: Iterable[str],
    *,
    in_parts: bool,
) -> str:
    """Return what a plan does and what that takes, predicted and measured so far.

    `beside` are bytes of what else is there during the whole step, by name, `others` plans of other mini-batches, and
    `raced` says who computes the step, where not only the plan does. An optimizer in parts updates some parameters at a
    time.
    """
    plan, device = run.plan, run.program.device
    parts, library = memory_parts(plan.graph, costs), library_workspace_bytes(device)
    parts["library workspaces"] = library
    parts["outside of PyTorch's allocator (context, modules, NCCL)"] = outside_bytes(device)
    peak = f"peak: predicted {format_bytes(run.simulation.peak_bytes + library)}"
    if device.type == "cuda":
        peak += f", measured {format_bytes(torch.cuda.max_memory_allocated(device))}"
    time = f"forward and backward: predicted {format_ms(backward_end_ms(plan, costs, run.simulation))}"
    measured = run.clock.times_ms()
    if measured:
        time += f", measured {format_ms(median(measured))} in {len(measured)} steps"
    budget = stated.budget
    within = "" if budget is None else f", budget {format_bytes(budget)}"
    head = f"{plan.graph.name}, mini-batch {plan.graph.batch}, {costs.where}: policy {plan.policy}{within}"
    host = f"host memory: {format_bytes(run.transfers.block_bytes)}{', pinned' if device.type == 'cuda' else ''}"
    usage = [f"{name}: {format_bytes(size)}" for name, size in parts.items() if size]
    among = [f"among the buffers: {name} {format_bytes(size)}" for name, size in beside.items()]
    smaller = [
        f"mini-batch {other.graph.batch}: policy {other.policy},"
        f" peak predicted {format_bytes(found.peak_bytes + library)}"
        for other, found in others
    ]
    update = ["update: some parameters at a time, because all at once exceed the budget"] if in_parts else []
    told = [
        *run.program.divided,
        *run.program.compiled,
        *update,
        *stated.lines(),
        *usage,
        *among,
        host,
        *issue_lines(run.simulation),
    ]
    lines = [*told, *plan_lines(plan, costs, run.simulation), *smaller]
    return "\n".join([head, *raced, peak, time, *lines])
