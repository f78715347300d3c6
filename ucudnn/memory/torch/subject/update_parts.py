"""Updates in parts: an optimizer updates some parameters at a time, so that its temporaries are theirs alone.

PyTorch's optimizers compute each step of their formula for all parameters at once, which takes temporaries as large as
all of them. Each parameter is updated by itself, so that the bits are the same in parts.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import _default_to_fused_or_foreach

from ucudnn.errors import InvalidValueError
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.liveness import measure_liveness

PARTS = 8
"""Parts of the parameters, if none of these is larger."""
_LEFT = 0.5  # share of a budget that kernels, libraries' workspaces and holes leave at least; the rest is known late
_ASKED: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
"""How many want the updates of optimizers in parts."""
_GIVEN: WeakKeyDictionary[torch.optim.Optimizer, torch.optim.Optimizer] = WeakKeyDictionary()
"""Optimizers of programs, by those that stand in their place."""
_BEFORE = "_ucudnn_before"  # of such an update: the attribute in whose place it is


def has_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer updates several parameters at once, each by itself: one of PyTorch's own that can do so."""
    groups = optimizer.param_groups
    own = type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)
    return own and any(len(group["params"]) > 1 and at_once(group) for group in groups)


def has_large_update(
    optimizers: Sequence[torch.optim.Optimizer], graph: StepGraph, costs: Costs, budget: int | None
) -> bool:
    """Whether the update alone may exceed what a budget in bytes leaves, and may run in parts; None bounds nothing."""
    if budget is None or not any(map(has_parts, optimizers)):
        return False
    return max(measure_liveness(graph, costs).floors[graph.optimizer_begins :], default=0) > _LEFT * budget


def at_once(group: Mapping[str, Any]) -> bool:
    """Whether an optimizer of PyTorch updates a group's parameters at once, with temporaries for all of them.

    Where nobody has said so, that depends on the device and on the type of parameters, which fakes do not have.
    """
    chosen = group.get("foreach")
    if chosen is not None or "foreach" not in group or group.get("fused") is not None or group.get("differentiable"):
        return bool(chosen) and not group.get("fused")
    if isinstance(group.get("lr"), Tensor) and group.get("capturable") is False:
        return False
    return _default_to_fused_or_foreach([*group["params"]], differentiable=False)[1]


def in_parts(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return groups of parameters, each of which has a part of those of one group."""
    found = []
    most = sum(each.nbytes for group in groups for each in group["params"]) / PARTS
    for group in groups:
        parts: list[list[Tensor]] = [[]]
        for each in group["params"]:
            if parts[-1] and sum(other.nbytes for other in parts[-1]) + each.nbytes > most:
                parts.append([])
            parts[-1].append(each)
        found += [{**group, "params": part} for part in parts]
    return found


def optimizer_of(
    optimizer: torch.optim.Optimizer, others: Mapping[int, Tensor]
) -> tuple[torch.optim.Optimizer, dict[int, str]]:
    """Return an optimizer without state of tensors in the place of its parameters, and their names by their ids.

    Where nobody has chosen, groups say whether they are updated at once, which PyTorch chooses by types of parameters.

    Raises:
        InvalidValueError: if a parameter is none of the model's, by whose ids the others are given.
    """
    found, names = copy.copy(optimizer), dict[int, str]()
    _GIVEN[found] = optimizer
    found.__dict__.pop("step", None)  # schedulers put one there that updates the real parameters
    found.param_groups, found.state = [], defaultdict(dict)
    for number, group in enumerate(optimizer.param_groups):
        for index, each in enumerate(group["params"]):
            if id(each) not in others:
                raise InvalidValueError(f"parameter {index} of the optimizer's group {number} is none of the model's")
            names[id(others[id(each)])] = f"group{number}.{index}"
        told = {"foreach": at_once(group)} if group.get("foreach", ...) is None else {}
        found.param_groups.append({**group, **told, "params": [others[id(each)] for each in group["params"]]})
    return found, names


def given_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that updates in the program, which has the state, where another stands in its place."""
    return _GIVEN.get(optimizer, optimizer)


@contextmanager
def parted(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let an optimizer have its groups in parts inside, if it updates several parameters at once."""
    groups = optimizer.param_groups
    if has_parts(optimizer):
        optimizer.param_groups = in_parts(groups)
    try:
        yield
    finally:
        optimizer.param_groups = groups


def update_in_parts(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Let each update of an optimizer run in parts, until what is returned is called by all who asked for that."""
    inner: Any = optimizer.step
    _ASKED[optimizer] = _ASKED.get(optimizer, 0) + 1

    @wraps(inner)
    def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        with parted(optimizer) if _ASKED.get(optimizer) else nullcontext():
            return inner(*args, **kwargs)

    if not hasattr(inner, _BEFORE):  # schedulers of the learning rate may have wrapped it since
        setattr(step, _BEFORE, vars(optimizer).get("step"))
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # schedulers want a method

    def end() -> None:
        _ASKED[optimizer] -= 1
        own = vars(optimizer).get("step")
        if not _ASKED[optimizer] and isinstance(own, MethodType) and hasattr(own, _BEFORE):  # nobody has wrapped it
            del optimizer.step
            if getattr(own, _BEFORE) is not None:
                optimizer.step = getattr(own, _BEFORE)  # type: ignore[method-assign]

    return end
