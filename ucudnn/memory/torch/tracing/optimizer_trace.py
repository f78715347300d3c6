"""Traces the update of an optimizer on fake tensors, so that its state and its temporaries count in the plan.

The caller runs the optimizer himself; no code is generated for it.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from ucudnn.errors import StepGraphError
from ucudnn.memory.step.graph import Phase
from ucudnn.memory.torch.subject.update_parts import optimizer_of, parted
from ucudnn.memory.torch.tracing.tracer import Tracer

_UNCOUNTED = "fit without optimizer=, and give a budget that leaves room for its state"


def trace_optimizer(
    optimizer: torch.optim.Optimizer,
    fakes: Mapping[int, Tensor],
    gradients: Mapping[int, Tensor | None],
    faked: Callable[[Tensor], Tensor],
    tracer: Tracer,
    *,
    in_parts: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Run the update of an optimizer under a tracer, and yield the tensors of its state with names.

    Args:
        optimizer: the optimizer of the real parameters.
        fakes: the fake tensor of each real parameter, by its id.
        gradients: the gradient of each fake parameter, by its id.
        faked: makes a fake tensor of a real one.
        tracer: writes the operators down.
        in_parts: whether it updates some parameters at a time (see `update_parts`).

    Raises:
        InvalidValueError: if a parameter of the optimizer is none of the model's.
        StepGraphError: if the update reads values of tensors or attributes of its own, or takes steps of the model.
    """
    if isinstance(optimizer, torch.optim.LBFGS):  # `step_program` counts its state
        return
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise StepGraphError(f"{type(optimizer).__name__} calls the model several times in one update: {_UNCOUNTED}")
    parameters: list[Tensor] = []
    try:
        stand_in, names = optimizer_of(optimizer, fakes)
        for parameter, state in optimizer.state.items():
            stand_in.state[fakes[id(parameter)]] = tree_map_only(Tensor, partial(_of_state, faked), state)
        parameters += [fake for group in stand_in.param_groups for fake in group["params"]]
        for fake in parameters:
            gradient = gradients.get(id(fake))
            fake.grad = None if gradient is None else gradient.detach()
        tracer.any_value = f"{type(optimizer).__module__}.".startswith("torch.optim.")
        with tracer.unwritten():
            stand_in.step()  # makes its state
        for fake, state in stand_in.state.items():
            yield from ((f"{names[id(fake)]}.{key}", value) for key, value in state.items() if torch.is_tensor(value))
        with parted(stand_in) if in_parts else nullcontext(), tracer, tracer.during(Phase.OPTIMIZER):
            stand_in.step()
    except DataDependentOutputException as error:
        raise StepGraphError(
            f"the update of {type(optimizer).__name__} reads the value of a tensor ({error.func}): {_UNCOUNTED}"
        ) from error
    except AttributeError as error:  # copies have none of its own: the update would change those of the optimizer
        raise StepGraphError(
            f"the update of {type(optimizer).__name__} needs more than its groups and its state, such as an attribute"
            f" of its own ({error}), which a trace could not leave as it is: {_UNCOUNTED}"
        ) from error
    finally:
        tracer.any_value = False
        for fake in parameters:
            fake.grad = None


def _of_state(faked: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Return a fake tensor; that of a number on the host, such as Adam's count of steps, knows its value."""
    if tensor.device.type != "cpu" or tensor.dim():
        return faked(tensor)
    with unset_fake_temporarily():
        value = tensor.item()
    return torch.tensor(value, dtype=tensor.dtype)
