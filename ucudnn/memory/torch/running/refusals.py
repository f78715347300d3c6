"""What is said of a budget below the floor of a step."""

import logging

from ucudnn.errors import BudgetError
from ucudnn.memory.step.batches import check_batch, join_batches
from ucudnn.memory.step.budget import check_budget
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.torch.device.stated_budget import StatedBudget
from ucudnn.memory.torch.subject.step_program import StepSubject
from ucudnn.memory.torch.tracing.traced_program import trace_program


def check_floor(subject: StepSubject, graph: StepGraph, costs: Costs, stated: StatedBudget) -> None:
    """Raise an error, with the remedies, if the budget is below the floor of a step."""
    try:
        check_budget(graph, costs, stated.tensor_bytes)
    except BudgetError:
        graph = _at_every_batch(subject, graph)  # its remedies know smaller mini-batches
        with stated.explained():
            check_budget(graph, costs, stated.tensor_bytes)
        raise


def _at_every_batch(subject: StepSubject, graph: StepGraph) -> StepGraph:
    """Return a step that stands for every mini-batch, or as it is if its sizes are not affine in the mini-batch.

    It is as it is, too, if the model cannot compute other mini-batches, and then raises whatever it likes.
    """
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # until the error ends the fit
    try:
        second, third = (trace_program(subject, graph.name, graph.batch, factor=factor).graph for factor in (2, 3))
        return check_batch(join_batches(graph, second), third)
    except Exception:  # noqa: BLE001  # whatever the model or the loss raises
        return graph
