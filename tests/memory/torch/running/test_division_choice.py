"""Whether a step is divided depends on times that are measured, and those that are hoped for."""

from dataclasses import dataclass, replace

import pytest

from tests.support.divided_networks import NETWORKS
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.torch.device.stated_budget import StatedBudget
from ucudnn.memory.torch.measuring.operation_costs import step_costs
from ucudnn.memory.torch.measuring.progress import Stages
from ucudnn.memory.torch.running.division_choice import DivisionChoice
from ucudnn.memory.torch.running.step_planning import FitOptions
from ucudnn.memory.torch.subject.step_program import step_subject
from ucudnn.memory.torch.tracing.traced_program import trace_program


@dataclass(frozen=True)
class Planning:
    costs: Costs


@pytest.mark.parametrize(("slow", "divides"), [("whole", True), ("both", False), ("none", False)])
def test_a_convolution_that_is_slow_undivided_is_measured_in_parts_where_the_profile_hopes_for_more(slow, divides):
    model, sample, loss = NETWORKS["u-net"]
    subject = step_subject(model(), sample(), loss, None)
    program = trace_program(subject, "net", 5)
    costs = step_costs(program.graph, program.device)
    liveness = measure_liveness(program.graph, costs)
    budget = (liveness.floor_bytes + 2 * liveness.peak_bytes) // 3
    planned = []

    def of(other):
        planned.append(other)
        found = step_costs(other.graph, other.device)
        if slow == "both" or (slow == "whole" and other is program):
            times = [20 * each if at in other.graph.problems else each for at, each in enumerate(found.time_ms)]
            found = replace(found, time_ms=tuple(times))
        return Planning(found), make_plan(other.graph, found, budget, "joint")

    hoped = of(program)[0].costs if slow == "both" else costs
    planned.clear()
    options = FitOptions(measured=False, policy="joint", plan_seconds=None)
    chosen = DivisionChoice(of, subject, program, hoped, StatedBudget(budget=budget), options, Stages(None)).divided()
    assert len(planned) == 1 + divides
    assert (chosen[1].graph is not program.graph) is divides
