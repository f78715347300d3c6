"""What is trained, from the arguments of `fit`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ucudnn.errors import InvalidValueError
from ucudnn.memory.torch.subject.model_checks import check_arguments, check_model, gradient_bytes
from ucudnn.memory.torch.subject.step_program import StepSubject

_KEPT, _BUCKETS = "gradients of earlier steps", "buckets of DistributedDataParallel"


def step_subject(
    model: nn.Module,
    sample: Any,
    loss: Callable[..., Tensor] | None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    *,
    keep_gradients: bool = False,
) -> StepSubject:
    """Return what is trained, from the arguments of `fit`.

    Raises:
        InvalidValueError: if there is a loss but nothing behind the model's arguments, or no plan can train the model.
    """
    check_model(model)
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    if isinstance(sample, Mapping):
        kwargs = sample
    else:
        args = tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)
    if loss is not None and len(args) < 2:
        raise InvalidValueError("with a loss the sample is a tuple of the model's arguments and the loss's target")
    check_arguments(loss, optimizer, (args, kwargs))
    optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer or ())
    size = gradient_bytes(model)
    beside = {_KEPT: size} if keep_gradients else {}
    parallel = model if isinstance(model, DistributedDataParallel) else None
    if parallel is not None:
        beside[_BUCKETS] = size
    return StepSubject(
        model=model if parallel is None else parallel.module,
        parallel=parallel,
        args=args,
        kwargs=kwargs,
        loss=loss,
        targets=0 if loss is None else 1,
        optimizers=optimizers,
        beside=beside,
        gradients_kept=keep_gradients,
    )
