"""How a plan of nnU-Net trains in a process of its own, and what that takes. Not a script.

The loop is that of nnU-Net's trainer: autocast to float16, scaled gradients, clipping at 12 and SGD. cuDNN tries its
algorithms in the first step. Images and labels are random.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.memory.nnunet_plans import opened
from bench.memory.rival_steps import cap
from bench.torch.measuring import conditions
from ucudnn.memory import fit
from ucudnn.memory.torch.comparison.trial import numbered_device
from ucudnn.memory.torch.device.stated_budget import outside_bytes
from ucudnn.memory.torch.measuring.measured_peak import peak_bytes
from ucudnn.memory.torch.measuring.training_step import TrainingStep

_WARM, _TIMED, _MOST_WARM = 3, 4, 12
_PLAN_SECONDS = 15
_Forward = Callable[[], tuple[Any, Tensor]]  # what the loop holds until the step ends, and the loss


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a process trains: a plan with some patch, plain or with `fit`, within a budget or without one."""

    case: Mapping[str, Any]
    patch: tuple[int, ...]
    fits: bool
    budget: int | None
    device: str


class _Tensors(TorchDispatchMode):
    """Reads the bytes of tensors after each operator, when its workspace is free again."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.most = max(self.most, torch.cuda.memory_allocated())
        return result


def serve(asked: Asked, connection: Connection) -> None:
    """Wait for the turn on the device, and send what is measured or why nothing is."""
    import_module("ucudnn.memory.torch.nnunet")  # takes seconds, as nnU-Net does
    connection.send("ready")
    connection.recv()
    try:
        answer = _measured(asked)
    except Exception as error:  # noqa: BLE001  # a patch that does not fit is a row with its reason
        answer = {"reason": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    connection.send({**answer, "machine": conditions(numbered_device(asked.device))})


def _measured(asked: Asked) -> dict[str, Any]:
    from ucudnn.memory.torch.nnunet import plans_step

    device, plans = numbered_device(asked.device), opened(asked.case)
    on_gpu = device.type == "cuda"
    torch.manual_seed(0)
    with device:
        step = plans_step(plans, asked.patch, plans.batch, are_held=not on_gpu and not asked.fits)
    if not on_gpu:  # where volumes of 16 bits take minutes, and nnU-Net trains without autocast
        step = replace(step, autocast=nullcontext)
    step.inputs[0].normal_()
    for each in step.targets:
        each.random_(0, 2 if plans.regions else plans.outputs)
    torch.backends.cudnn.benchmark = on_gpu
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    cap(device, asked.budget)
    begin = perf_counter()
    forward, told = _fitted(step, asked.budget) if asked.fits else (_plain(step), {})
    cap(device, asked.budget)  # fitting loads kernels
    told["fit_s"] = perf_counter() - begin
    return {**told, **_figures(step, _loop(step, forward, device), device, tensors=not asked.fits)}


def _plain(step: TrainingStep) -> _Forward:
    def forward() -> tuple[Any, Tensor]:
        output = step.model(*step.inputs)
        return output, step.loss(output, *step.targets)

    return forward


def _fitted(step: TrainingStep, budget: int | None) -> tuple[_Forward, dict[str, Any]]:
    sample = (*step.inputs, [*step.targets])
    with step.autocast():
        fitted: Any = fit(
            step.model,
            sample,
            lambda output, targets: step.loss(output, *targets),
            step.optimizer,
            budget,
            plan_seconds=_PLAN_SECONDS,
        )
    done = fitted.simulation
    told = {"policy": fitted.plan.policy, "predicted_bytes": done.peak_bytes, "predicted_ms": done.step_ms}
    return lambda: ((), fitted(*sample)), told


def _loop(step: TrainingStep, forward: _Forward, device: torch.device) -> Callable[[], None]:
    optimizer = step.optimizer
    assert optimizer is not None
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")

    def take() -> None:
        step.clear()
        with step.autocast():
            _held, loss = forward()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(step.model.parameters(), 12)
        scaler.step(optimizer)
        scaler.update()
        loss.detach().cpu()

    return take


def _figures(step: TrainingStep, take: Callable[[], None], device: torch.device, *, tensors: bool) -> dict[str, Any]:
    """Take steps, and return bytes and milliseconds; the scaler leaves out updates until its scale is low enough."""
    assert step.optimizer is not None
    on_gpu, warm, times = device.type == "cuda", 1, list[float]()
    begin = perf_counter()
    take()
    found: dict[str, Any] = {"first_s": perf_counter() - begin}
    found["first_bytes"] = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    while warm < _WARM or (not step.optimizer.state and warm < _MOST_WARM):
        take()
        warm += 1
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(_TIMED):
        begin = perf_counter()
        take()
        if on_gpu:
            torch.cuda.synchronize(device)
        times.append((perf_counter() - begin) * 1e3)
    found |= {"ms": median(times), "least_ms": min(times), "most_ms": max(times), "warm_steps": warm}
    found["updated"] = bool(step.optimizer.state)
    if not on_gpu:
        most = peak_bytes(step) if tensors else 0
        return {**found, "allocated_bytes": most, "tensor_bytes": most, "reserved_bytes": most, "outside_bytes": 0}
    found["allocated_bytes"] = torch.cuda.max_memory_allocated(device)
    found["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    found["outside_bytes"] = outside_bytes(device)
    if tensors:
        with _Tensors() as read:
            take()
        found["tensor_bytes"] = read.most
    return found
