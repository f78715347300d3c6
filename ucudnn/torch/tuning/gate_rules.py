"""The rules of the gate for the calls of a tuned program, and for those that plans compute within a stated limit."""

from array import array
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ucudnn.torch.calls.call_cache import CachedCall
from ucudnn.torch.calls.fused_call import FusedCall
from ucudnn.torch.calls.kernel_call import KernelCall
from ucudnn.torch.gate.call_gate import GateOutput, GateRule, signature_of
from ucudnn.torch.tuning.tuned_call import TunedCall

Key = tuple[Any, ...]
"""All that the outcome of a call depends on."""


def adopted_rules(calls: Mapping[Key, TunedCall]) -> list[GateRule]:
    """Return the rules for those calls of which a part is replaced by adopted kernels."""
    rules = (call.rule(signature_of(key)) for key, call in list(calls.items()) if call.path is not None)
    return [rule for rule in rules if rule is not None]


def beginning(rules: list[GateRule], begins: Callable[[], object]) -> list[GateRule]:
    """Return rules of which the first one calls a function before it computes, where no optimizer tells of steps."""
    if not rules:
        return rules
    at, first = next(iter(rules[0].outputs.items()))

    def compute(*addresses: int) -> bool:
        begins()
        return first.compute(*addresses)

    outputs = {**rules[0].outputs, at: first._replace(compute=compute, direct=None)}
    return [rules[0]._replace(outputs=outputs), *rules[1:]]


def plan_rules(
    calls: Mapping[Key, CachedCall], bypasses: Mapping[Key, "array[int]"]
) -> tuple[list[GateRule], list[GateRule]]:
    """Return the rules of forward and backward calls all of whose outputs cuDNN can compute without Python.

    Args:
        calls: what becomes of calls, by their signature and the name of their layer, which must be ''.
        bypasses: for calls in which something may be tried, a number that is not 0 while that is so.
    """
    forward: list[GateRule] = []
    backward: list[GateRule] = []
    for key, call in calls.items():
        if call.reason or not call.lies_as_computed:
            continue
        kernels = {0: call.output} if call.output is not None else {0: call.input_gradient, 1: call.weight_gradient}
        wanted = {at: kernel for at, kernel in kernels.items() if kernel is not None}
        fused = call.fused if call.fused is not None and call.fused.is_on else None
        outputs = {at: _output(kernel, fused) for at, kernel in wanted.items()}
        ready = {at: each for at, each in outputs.items() if each is not None}
        if wanted and len(ready) == len(wanted):  # a part of a gradient's call would have another plan
            rules = backward if call.output is None else forward
            signature = key[:-1]
            rules.append(
                GateRule(signature_of(signature), ready, call.bias_as, fused is not None, bypasses.get(signature))
            )
    return forward, backward


def _output(kernel: KernelCall, fused: FusedCall | None) -> GateOutput | None:
    direct = kernel.direct() if fused is None else fused.direct()
    return None if direct is None else GateOutput(_never, kernel.form.sizes, kernel.form.strides, direct)


def _never(x: int, w: int, y: int) -> NoReturn:
    raise AssertionError("cuDNN computes this without Python")
