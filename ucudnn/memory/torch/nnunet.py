"""Records what nnU-Net v2 trains by a plans file: its network, its loss and its optimizer, made by nnU-Net's own code.

nnU-Net trains with deep supervision, Dice and cross-entropy, SGD with Nesterov momentum, and autocast to float16. Its
loop holds the outputs until the step ends. What torch.compile makes of a network is not recorded.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from nnunetv2.training.loss.compound_losses import DC_and_BCE_loss, DC_and_CE_loss
from nnunetv2.training.loss.deep_supervision import DeepSupervisionWrapper
from nnunetv2.training.loss.dice import MemoryEfficientSoftDiceLoss
from nnunetv2.utilities.get_network_from_plans import get_network_from_plans
from torch import Tensor, nn

from ucudnn.errors import InvalidNetworkError
from ucudnn.memory.reports.comparison import Progress
from ucudnn.memory.reports.nnunet_plans import NnunetPlans, Patch
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.torch.measuring.training_step import TrainingStep
from ucudnn.memory.torch.record import made_program, record_made
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.problem import MathMode
from ucudnn.torch.model_timing import running

_OPTIMIZER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 3e-5, "momentum": 0.99, "nesterov": True, "foreach": True}


def record_plans(
    plans: NnunetPlans, patch: Patch, batches: Sequence[int], progress: Progress = lambda _: None
) -> StepGraph:
    """Return a step of nnU-Net's training of a patch, recorded without a GPU.

    It is recorded at one mini-batch, or at three, whose record stands for every mini-batch.

    Raises:
        InvalidNetworkError: if the network cannot be made of what the plans say, or its loss reads values.
        StepGraphError: if the step is not affine in its mini-batch.
    """
    with _named(plans):
        make = partial(plans_step, plans, patch, batches[0])
        return record_made(make, _name(plans, patch), batches, _conditions(plans, patch), progress)


def plans_program(plans: NnunetPlans, patch: Patch, batch: int, progress: Progress = lambda _: None) -> StepProgram:
    """Return the step of a patch and a mini-batch with its calls, as `fit` trains it, which holds no output.

    Raises:
        InvalidNetworkError: see `record_plans`.
    """
    with _named(plans):
        make = partial(plans_step, plans, patch, batch, are_held=False)
        return made_program(make, _name(plans, patch), batch, MathMode.TF32, _conditions(plans, patch), progress)


def plans_step(plans: NnunetPlans, patch: Patch, batch: int, *, are_held: bool = True) -> TrainingStep:
    """Return the step of a patch and a mini-batch, all zeros, on PyTorch's default device.

    `are_held` is whether the step holds its outputs until it ends, as nnU-Net's loop does.
    """
    outputs: list[Tensor] = []
    network = _make_network(plans).train()
    x = torch.zeros(batch, plans.channels, *patch)
    with torch.no_grad():
        sizes = [each.shape[2:] for each in network(x[:1])]
    kind, planes = (torch.bool, plans.outputs + plans.ignores) if plans.regions else (torch.int16, 1)
    own_loss = _make_loss(plans, len(sizes))

    def loss(output: list[Tensor], *targets: Tensor) -> Tensor:
        outputs[:] = output if are_held else []
        result: Tensor = own_loss(output, list(targets))
        return result

    return TrainingStep(
        model=network,
        inputs=(x,),
        loss=loss,
        targets=tuple(torch.zeros(batch, planes, *size, dtype=kind) for size in sizes),
        optimizer=torch.optim.SGD(network.parameters(), **_OPTIMIZER),
        autocast=partial(torch.autocast, x.device.type, torch.float16),
        held=lambda: outputs,
    )


@contextmanager
def _named(plans: NnunetPlans) -> Iterator[None]:
    """Let errors name the configuration; refuse what cannot be planned."""
    where = f"{plans.path}: configurations.{plans.configuration}"
    if plans.ignores and not plans.regions:
        labels = plans.path.with_name("dataset.json")
        raise InvalidNetworkError(f"{labels}: labels.ignore lets nnU-Net's loss read values, which no plan can hold")
    with running(where, lambda error: f"{where}.architecture makes no network that trains: {error}".split("\n")[0]):
        yield


def _name(plans: NnunetPlans, patch: Patch) -> str:
    return f"{plans.configuration} of {plans.path.name}, patches of {_edges(patch)}"


def _conditions(plans: NnunetPlans, patch: Patch) -> dict[str, str]:
    return {"network": plans.architecture["network_class_name"], "patch": _edges(patch), "autocast": "float16"}


def _edges(patch: Patch) -> str:
    return "x".join(map(str, patch))


def _make_network(plans: NnunetPlans) -> nn.Module:
    with warnings.catch_warnings(action="error"):  # of a class that is elsewhere, of which nnU-Net takes another one
        network = get_network_from_plans(
            plans.architecture["network_class_name"],
            plans.architecture["arch_kwargs"],
            plans.architecture["_kw_requires_import"],
            plans.channels,
            plans.outputs,
            allow_init=False,
            deep_supervision=True,
        )
    assert isinstance(network, nn.Module)
    return network


def _make_loss(plans: NnunetPlans, scales: int) -> Callable[..., Any]:
    """Return nnU-Net's loss: each resolution counts half of the one before, and the smallest does not count."""
    dice = {"batch_dice": plans.batch_dice, "smooth": 1e-5, "do_bg": plans.regions, "ddp": False}
    memory_efficient = {"dice_class": MemoryEfficientSoftDiceLoss}
    loss: nn.Module
    if plans.regions:
        loss = DC_and_BCE_loss({}, dice, use_ignore_label=plans.ignores, **memory_efficient)
    else:
        loss = DC_and_CE_loss(dice, {}, **memory_efficient)
    weights: list[float] = [0.5**scale for scale in range(scales - 1)]
    wrapped: nn.Module = DeepSupervisionWrapper(loss, [*(weight / sum(weights) for weight in weights), 0.0])
    return wrapped
