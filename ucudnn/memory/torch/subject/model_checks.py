"""Checks that a model can be trained by a plan; each refusal says what to do instead."""

from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ucudnn.errors import InvalidValueError
from ucudnn.units import shortened

INSTEAD_OF_COMPILED = (
    ", and a plan runs PyTorch's operators one by one: fit it without torch.compile, with compile=True for regions that"
    " are compiled within the plan"
)
_SHARDED = {"FullyShardedDataParallel", "FSDPModule"}


def check_model(model: nn.Module, *, sharded: bool = False) -> None:
    """Check that a model, or the one in a DistributedDataParallel, can be trained by a plan.

    A model that is sharded may have DTensors.

    Raises:
        InvalidValueError: if it is none, in evaluation mode, compiled, scripted, sharded or replicated, or waits for
            other processes.
    """
    if not isinstance(model, nn.Module):
        raise InvalidValueError(f"model={shortened(model)} is no torch.nn.Module, of which a step has parameters")
    if not model.training:
        raise InvalidValueError(
            "the model is in evaluation mode, and only a training step has a plan: call model.train()"
        )
    if isinstance(model, DistributedDataParallel):
        if model.mixed_precision is not None:
            raise InvalidValueError(
                "DistributedDataParallel(mixed_precision=...) replaces parameters during the step: use torch.autocast"
            )
        model = model.module
    for name, module in model.named_modules():
        _check_module(f"module {name!r}" if name else "the model", module)
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise InvalidValueError(
                f"parameter {name} has no shape before the model is called: call the model once before fit"
            )
        if is_traceable_wrapper_subclass(parameter) and not (sharded and type(parameter).__name__ == "DTensor"):
            raise InvalidValueError(
                f"parameter {name} is a {type(parameter).__name__}, which stands for parts of a tensor, and a plan"
                " needs plain tensors: fit the model before its parameters are distributed"
            )


def check_arguments(loss: Any, optimizer: Any, sample: Any) -> None:
    """Check what else is given to `fit`: what is no such thing would fail late, in words of PyTorch.

    Raises:
        InvalidValueError: naming the argument.
    """
    if loss is not None and not callable(loss):
        raise InvalidValueError(
            f"loss={shortened(loss)} cannot be called: give a function of the model's output and the target, such as"
            " torch.nn.functional.cross_entropy"
        )
    several = [*optimizer] if isinstance(optimizer, list | tuple) else [] if optimizer is None else [optimizer]
    for each in several:
        if isinstance(each, type) or not hasattr(each, "param_groups"):
            raise InvalidValueError(f"optimizer={shortened(each)} is no torch.optim.Optimizer, nor a sequence of them")
        if hasattr(each.step, "get_compiler_config"):
            raise InvalidValueError(f"the step of {type(each).__name__} is compiled{INSTEAD_OF_COMPILED}")
    for number, leaf in enumerate(tree_leaves(sample)):
        if is_numpy_array(leaf):
            raise InvalidValueError(f"argument {number} of the sample is a NumPy array: give torch.from_numpy of it")


def is_numpy_array(leaf: Any) -> bool:
    """Whether an argument is an array of NumPy, which has no equality as a whole."""
    return type(leaf).__module__ == "numpy" and type(leaf).__name__ == "ndarray"


def _check_module(what: str, module: nn.Module) -> None:
    if type(module).__name__ in ("FittedStep", "ShardedStep"):
        raise InvalidValueError(
            "the model is a step that fit returned, or holds one, and follows the plan of that: give fit the model"
            " itself, which is the step's attribute `model`"
        )
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        raise InvalidValueError(f"{what} is compiled{INSTEAD_OF_COMPILED}")
    if isinstance(module, torch.jit.ScriptModule):
        raise InvalidValueError(
            f"{what} is a module of TorchScript, which no trace can follow: fit the Python module that torch.jit.script"
            " or torch.jit.trace made it of"
        )
    if {base.__name__ for base in type(module).__mro__} & _SHARDED:
        raise InvalidValueError(
            f"{what} is sharded by FSDP, which frees and gathers parameters during the step: fit the model first, and"
            " call fully_shard on the fitted step, or use DistributedDataParallel"
        )
    if isinstance(module, DistributedDataParallel):
        raise InvalidValueError(
            f"{what} is a DistributedDataParallel within the model: put the whole model into it, and fit that"
        )
    if isinstance(module, nn.DataParallel):
        raise InvalidValueError(f"{what} is a DataParallel, which copies the model in each step: {INSTEAD_OF_REPLICAS}")
    communicates = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    if isinstance(module, nn.SyncBatchNorm) and communicates:
        raise InvalidValueError(
            f"{what} is a SyncBatchNorm, which waits for other processes during the step, and a plan cannot: use the"
            " batch normalization of one process"
        )


INSTEAD_OF_REPLICAS = "use DistributedDataParallel, with a process for each GPU"
