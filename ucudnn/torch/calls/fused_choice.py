"""Who adds the bias of a convolution: an engine that computes the convolution, or another kernel if that is faster."""

from dataclasses import replace
from functools import partial
from statistics import median

import torch

from ucudnn.backends.cudnn.algorithms.legacy_call import ADDED
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.configuration import Configuration
from ucudnn.handle import Handle
from ucudnn.kernel import KernelKey
from ucudnn.planning.choices import Origin
from ucudnn.problem import ConvolutionProblem

_WORTH_FUSING = 0.97  # of the time of both kernels: less may be noise
_SAMPLES, _CALLS = 9, 8
_LEAD_MS = 0.5  # in which the host queues the calls of a sample


def is_fused(configuration: Configuration) -> bool:
    """Return whether the engines of a configuration add the bias themselves, in each part."""
    calls = [each for part in configuration.parts for each in part.slabs or (part,)]
    return not any(each.algorithm.endswith(ADDED) for each in calls)


def without_addition(
    problem: ConvolutionProblem, configuration: Configuration
) -> tuple[ConvolutionProblem, Configuration]:
    """Return what is left to compute if the caller adds the bias, where another kernel would add it."""
    if not problem.biased or not all(part.algorithm.endswith(ADDED) for part in configuration.parts):
        return problem, configuration
    parts = (replace(part, algorithm=part.algorithm.removesuffix(ADDED)) for part in configuration.parts)
    return problem.without_bias(), replace(configuration, parts=tuple(parts))


def measured_with_bias(handle: Handle, key: KernelKey, out: torch.Tensor, bias: torch.Tensor) -> Configuration | None:
    """Plan a kernel with its bias by measurements, and keep the plan if it is the faster one.

    It is compared with the plan without the bias, which is made first, and with PyTorch's addition behind it. Only
    engines that add the bias themselves are measured.

    Args:
        handle: measures on the current GPU; its backend's lock is held.
        key: the kernel with its bias, which has no plan.
        out: an output of the kernel, which is overwritten.
        bias: its bias.

    Returns:
        The configuration. None if the other way is faster, if no engine adds the bias, or if the handle does not
        measure kernels one by one before they run; then the kernel has no plan.

    Raises:
        UcudnnError: if one of both cannot be planned.
        RuntimeError: if CUDA fails.
    """
    plans, backend, problem = handle.plans, handle.backend, key.problem
    if problem.deterministic or not plans.measures_each or not isinstance(backend, CudnnBackend):
        return None
    first = plans.planned(key._replace(problem=problem.without_bias())).decision
    if first is None or first.origin is not Origin.MEASURED:
        return None
    entry = plans.plan_without(key, lambda name: name.endswith(ADDED))
    if entry is None or entry.decision is None:
        return None
    found, faster = entry.decision.configuration, False
    try:
        both_ms = first.configuration.time_ms + _addition_ms(out, bias, backend)
        faster = is_fused(found) and found.time_ms < _WORTH_FUSING * both_ms
    finally:
        if not faster:
            plans.forget(key)
    return found if faster else None


def _addition_ms(out: torch.Tensor, bias: torch.Tensor, backend: CudnnBackend) -> float:
    """Return the median milliseconds in which PyTorch adds a bias to an output."""
    addend = bias.view(-1, *[1] * (out.dim() - 2))
    run, lead = partial(_repeat, out.zero_(), addend), partial(backend.delay, _LEAD_MS)
    return median(backend.elapsed_ms(run, lead) for _ in range(_SAMPLES)) / _CALLS


def _repeat(out: torch.Tensor, addend: torch.Tensor) -> None:
    for _ in range(_CALLS):
        out.add_(addend)
