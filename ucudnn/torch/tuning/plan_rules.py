"""The rules of the gate for calls that heuristic plans, or plans that were adopted, compute within a stated limit."""

from array import array
from collections.abc import Mapping
from typing import Any, NoReturn

from ucudnn.torch.calls.call_cache import CachedCall
from ucudnn.torch.calls.fused_call import FusedCall
from ucudnn.torch.calls.kernel_call import KernelCall
from ucudnn.torch.gate.call_gate import GateOutput, GateRule, look_of

Asides = Mapping[tuple[Any, ...], "array[int]"]
"""A number for each look of calls, which is not 0 while something is tried in them."""


def plan_rules(calls: Mapping[tuple[Any, ...], CachedCall], asides: Asides) -> tuple[list[GateRule], list[GateRule]]:
    """Return the rules of forward and backward calls all of whose outputs cuDNN can compute without Python.

    Args:
        calls: what becomes of calls, by their look and the name of their layer, which must be ''.
        asides: for calls in which something may be tried.
    """
    forward: list[GateRule] = []
    backward: list[GateRule] = []
    for key, call in calls.items():
        if call.reason or not call.lies_as_computed:
            continue
        kernels = {0: call.output} if call.output is not None else {0: call.input_gradient, 1: call.weight_gradient}
        wanted = {at: kernel for at, kernel in kernels.items() if kernel is not None}
        outputs = {at: _output(kernel, call.fused if _fuses(call) else None) for at, kernel in wanted.items()}
        ready = {at: each for at, each in outputs.items() if each is not None}
        if wanted and len(ready) == len(wanted):  # a part of a gradient's call would have another plan
            rules = backward if call.output is None else forward
            look = key[:-1]
            rules.append(GateRule(look_of(look), ready, call.bias_as, _fuses(call), asides.get(look)))
    return forward, backward


def _fuses(call: CachedCall) -> bool:
    return call.fused is not None and call.fused.is_on


def _output(kernel: KernelCall, fused: FusedCall | None) -> GateOutput | None:
    direct = kernel.direct() if fused is None else fused.direct()
    return None if direct is None else GateOutput(_never, *kernel.form, direct)


def _never(x: int, w: int, y: int) -> NoReturn:
    raise AssertionError("cuDNN computes this without Python")
