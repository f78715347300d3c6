"""HookedStep: what `fit(..., policy="hooks")` returns: a model that trains eagerly within a budget."""

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any, final

import torch
from torch import nn

from ucudnn.errors import InvalidValueError
from ucudnn.memory.torch.hooks.budgeted_steps import BudgetedSteps
from ucudnn.memory.torch.subject.model_checks import check_arguments
from ucudnn.units import shortened

HOOKS = "hooks"
"""The name of the policy that makes no plan."""

INSTEAD_OF_A_PLAN = '\nor train it as it is, without a plan: fit(..., policy="hooks"), or ucudnn.memory.budget'
"""The remedy where a step cannot be traced."""


@final
class HookedStep(nn.Module):
    """A model, or a model and its loss, whose training keeps a budget without a plan, as in `budget`.

    On a CPU what its forward makes counts, because backward and the optimizer run outside of it.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None, steps: BudgetedSteps) -> None:
        super().__init__()
        self.model = model
        self._loss, self._steps = loss, steps

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns, or the loss of it and the last argument if a loss was given.

        In evaluation mode the model returns its output where there is no target. It raises a BudgetError if the step
        needs more.
        """
        with self._steps.explained(), self._steps.followed():
            if self._loss is None or (not self.model.training and len(args) < 2):
                return self.model(*args, **kwargs)
            return self._loss(self.model(*args[:-1], **kwargs), args[-1])

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether the Trainer of transformers may add `num_items_in_batch`: where the model takes keywords."""
        kinds = [each.kind for each in signature(self.model.forward).parameters.values()]
        return bool(getattr(self.model, "accepts_loss_kwargs", Parameter.VAR_KEYWORD in kinds))

    def report(self) -> str:
        """Return what left the device and what was computed again so far, and for which modules, for people."""
        return self._steps.report()

    def close(self) -> None:
        """Bound PyTorch's allocator no longer."""
        self._steps.close()

    def __deepcopy__(self, memo: Any) -> Any:
        raise InvalidValueError("a step within a budget has memory of its own: copy its model, and fit the copy")


def hooked_step(
    model: nn.Module, sample: Any, loss: Any, optimizer: Any, budget: int | None, host_bytes: int | None
) -> HookedStep:
    """Return a model that trains within a budget by hooks, from the arguments of `fit`.

    Raises:
        BudgetError: if the process has more on the device already.
        InvalidValueError: if an argument is none of those, or there is no budget.
    """
    if not isinstance(model, nn.Module):
        raise InvalidValueError(f"model={shortened(model)} is no torch.nn.Module, of which a step has parameters")
    if budget is None:
        raise InvalidValueError("policy='hooks' does nothing without a budget: give one, such as budget='12GiB'")
    check_arguments(loss, optimizer, ((), sample) if isinstance(sample, Mapping) else (sample, {}))
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    return HookedStep(model, loss, BudgetedSteps(budget, device, host_bytes))
