"""Budgets: what is said where a step does not fit one."""

from collections.abc import Iterable, Iterator, Sequence
from operator import add

from ucudnn.errors import BudgetError, StepGraphError
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.liveness import Liveness, measure_liveness
from ucudnn.units import bytes_down, bytes_up


def check_budget(graph: StepGraph, costs: Costs, budget: int | None, order: Sequence[int] | None = None) -> None:
    """Check that a budget is not below the floor of a step, in the program's order or another one.

    Raises:
        BudgetError: if it is; the message names the floor, the operation that sets it, and the cheapest remedies.
    """
    liveness = measure_liveness(graph, costs, order)
    if budget is not None and budget < liveness.floor_bytes:
        operation = graph.operation_name(liveness.order[liveness.floor_place]) if liveness.order else "no operation"
        left = f"a budget of {bytes_down(budget)}" if budget >= 0 else "a budget of which nothing is left for tensors"
        raise BudgetError(
            f"{left} is below the floor of {graph.name}, {bytes_up(liveness.floor_bytes)}, which {operation} sets:"
            f" {', or '.join(_remedies(liveness, costs, budget))}",
            kernel=operation,
            limit_bytes=budget,
            required_bytes=liveness.floor_bytes,
        )


def check_need(policy: str, graph: StepGraph, least_bytes: int, budget: int | None) -> None:
    """Check that a policy needs no more than a budget, which other policies may keep; None bounds nothing.

    Raises:
        BudgetError: if it does; the message names both.
    """
    if budget is None or least_bytes <= budget:
        return
    raise BudgetError(
        f"policy {policy} needs {bytes_up(least_bytes)} for {graph.name}, and the budget is {bytes_down(budget)}:"
        " take another policy or a larger budget",
        kernel="",
        limit_bytes=budget,
        required_bytes=least_bytes,
    )


def below_floor(floor: BudgetError, needs: Iterable[tuple[int | None, str]]) -> BudgetError:
    """Return the error of a budget below the floor, where policies may need less by smaller scratch."""
    known = [(size, policy) for size, policy in needs if size is not None]
    least_bytes, policy = min(known, default=(floor.required_bytes, ""))
    if least_bytes >= floor.required_bytes:
        return floor
    return with_need(floor, f", or to {bytes_up(least_bytes)}, which policy {policy} needs", least_bytes)


def with_need(error: BudgetError, addition: str, required_bytes: int) -> BudgetError:
    """Return an error of a budget with an addition to its message, and another need."""
    return BudgetError(
        f"{error}{addition}", kernel=error.kernel, limit_bytes=error.limit_bytes, required_bytes=required_bytes
    )


def _remedies(liveness: Liveness, costs: Costs, budget: int) -> Iterator[str]:
    """Yield what brings the floor below a budget: less scratch costs least, then a smaller mini-batch."""
    graph = liveness.graph
    bare = [*map(add, liveness.persistent_bytes, liveness.working_bytes)]
    if max(bare, default=liveness.floor_bytes) <= budget:
        place = liveness.floor_place
        over = sum(floor + scratch > budget for floor, scratch in zip(bare, liveness.scratch_bytes, strict=True))
        others = f" and {over - 1} other operations less, too" if over > 1 else ""
        yield f"give it at most {bytes_down(budget - bare[place])} of scratch{others}"
    low, high = 0, graph.batch  # with the same scratch low may fit, and high does not fit
    while high - low > 1:
        middle = (low + high) // 2
        floor = _floor(liveness, costs, middle)
        low, high = (middle, high) if floor is None or floor <= budget else (low, middle)
    if low and _floor(liveness, costs, low) is not None:
        yield f"take a mini-batch of at most {low} instead of {graph.batch}"
    parts = zip(liveness.order, bare, liveness.scratch_bytes, strict=True)
    least = max((size + (0 if each in graph.problems else scratch) for each, size, scratch in parts), default=0)
    may_fall = not costs.configurations and least < liveness.floor_bytes
    lower = f", which convolutions= of fit lowers to {bytes_up(least)} at best, by algorithms with less workspace"
    yield f"raise the budget to the floor{lower if may_fall else ''}"


def _floor(liveness: Liveness, costs: Costs, batch: int) -> int | None:
    """Return the floor at a mini-batch; None below the mini-batches for which the step's sizes hold."""
    try:
        return measure_liveness(liveness.graph.with_batch(batch), costs, liveness.order).floor_bytes
    except StepGraphError:
        return None
