"""Costs of a divided step, from those of the step as it is."""

from dataclasses import replace

from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.torch.division.program_writer import Divided
from ucudnn.memory.torch.subject.step_program import StepProgram

_LEAST_MS = 0.003  # of a part, however small it is


def estimated_costs(whole: Divided, program: StepProgram, costs: Costs) -> Costs:
    """Return the costs of a divided step: a part has its share of time and scratch of the step as it is."""
    bytes_per_ms = fastest(program.graph, costs)
    times = []
    for operation, (index, share) in zip(whole.program.graph.operations, whole.origins, strict=True):
        own_ms = share * costs.time_ms[index] if share else operation.traffic.fixed / bytes_per_ms
        times.append(max(own_ms, min(_LEAST_MS, costs.time_ms[index])))
    return replace(
        costs,
        time_ms=tuple(times),
        scratch_bytes=tuple(int(share * costs.scratch_bytes[index]) for index, share in whole.origins),
        issue_ms=tuple(costs.issue_ms[index] for index, _ in whole.origins) if costs.issue_ms else (),
        configurations={},
        scratch_pieces={},
    )


def fastest(graph: StepGraph, costs: Costs) -> float:
    """Return the most bytes that an operation moves in a millisecond."""
    pairs = zip(graph.operations, costs.time_ms, strict=True)
    return max((each.traffic.at(graph.batch) / ms for each, ms in pairs if ms), default=1.0)
