"""Steps with one divided segment, beside the plain loop."""

import copy
import math
from collections import Counter

import pytest
import torch

from tests.support.plain_training import fit_plan
from ucudnn.errors import StepGraphError
from ucudnn.memory.policies.catalog import find_policy
from ucudnn.memory.torch.division.divided_program import divided
from ucudnn.memory.torch.division.part_axes import PartAxes
from ucudnn.memory.torch.division.segment import SegmentOrder, StepSegment
from ucudnn.memory.torch.division.segment_choice import SegmentChoice
from ucudnn.memory.torch.measuring.operation_costs import step_costs
from ucudnn.memory.torch.subject.step_program import step_subject
from ucudnn.memory.torch.tracing.traced_program import trace_program


def program_of(model, sample, loss):
    subject = step_subject(model, sample, loss, None)
    return subject, trace_program(subject, "net", len(sample[0]))


def divided_step(model, sample, loss, order):
    subject, program = program_of(model, sample, loss)
    axes = PartAxes(program, slabs=order.axes.slabs)
    found, origins = divided(axes, [SegmentOrder(axes, order.segment)])
    made = Counter(index for index, _ in origins)
    assert all(made[axes.split.origins[index][0]] >= order.segment.parts for index in order.rules)
    costs = step_costs(found.graph, found.device)
    return fit_plan(subject, found, find_policy("stock").plan(found.graph, costs, None), costs, debug=True)


def check(model, sample, loss, order):
    """Train a step with a divided segment, and compare it with the plain loop; return the divided program."""
    reference = copy.deepcopy(model)
    step = divided_step(model, sample, loss, order)
    found = step._run.program
    torch.manual_seed(0)
    expected = loss(reference(sample[0]), sample[1])
    expected.backward()
    torch.manual_seed(0)
    loss_of_parts = step(*sample)
    loss_of_parts.backward()
    assert float(loss_of_parts.detach()) == pytest.approx(float(expected.detach()), rel=1e-11)
    gradients = [(one.grad, other.grad) for one, other in zip(model.parameters(), reference.parameters(), strict=True)]
    scale = max(float(other.abs().max()) for _, other in gradients)
    for one, other in gradients:
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11 * scale)
    for one, other in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    return found


def segment_of(axes, program, begin, end, parts):
    """Return a segment with a run of forward between two shares of it, or the longest one that begins there."""
    choice = SegmentChoice(program, step_costs(program.graph, program.device), slabs=axes.slabs)
    turn = axes.program.graph.backward_begins
    first = int(begin * (turn - 1))
    for last in range(first + max(1, math.ceil(end * (turn - first))), first, -1):
        forward = choice._with_norms(range(first, last))
        for backward in map(choice._with_norms, choice._backward_of(forward)):
            try:
                order = SegmentOrder(axes, StepSegment(forward, backward, parts))
            except StepGraphError:
                continue
            if order.level:
                return order
    return None
