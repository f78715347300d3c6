"""Batch norms as PyTorch's own operator, which regions know, with what it reads alone.

cuDNN keeps bytes of its own for backward, beside mean and inverse deviation. Compiled code does not make them. Backward
is given running statistics, too, and reads none of them in training.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ucudnn.memory.step.graph import StepOperation
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.memory.torch.subject.traced_values import TracedCall, TracedTensor

aten = torch.ops.aten

_FORWARD, _BACKWARD = aten.cudnn_batch_norm.default, aten.cudnn_batch_norm_backward.default
_OWN_BACKWARD = aten.native_batch_norm_backward.default
_FORWARD_ARGUMENTS = (
    "input",
    "weight",
    "bias",
    "running_mean",
    "running_var",
    "training",
    "exponential_average_factor",
)


def with_native_norms(program: StepProgram) -> StepProgram:
    """Return a step whose batch norms are PyTorch's own."""
    pairs = zip(program.calls, program.graph.operations, strict=True)
    changed = [_changed(call, operation) for call, operation in pairs]
    calls, operations = zip(*changed, strict=True)
    return replace(program, calls=calls, graph=replace(program.graph, operations=operations))


def _changed(call: TracedCall, operation: StepOperation) -> tuple[TracedCall, StepOperation]:
    if call.func is _FORWARD and call.argument("training"):
        args = [call.argument(name) for name in (*_FORWARD_ARGUMENTS, "epsilon")]
        return _as(call, operation, aten.native_batch_norm.default, args, call.results[3:])
    if call.func is _BACKWARD:
        mask = [each is not None for each in call.results]
        given = [call.argument(name) for name in ("grad_output", "input", "weight")]
        saved = [call.argument(name) for name in ("save_mean", "save_var")]
        args = [*given, None, None, *saved, True, call.argument("epsilon"), mask]
        return _as(call, operation, _OWN_BACKWARD, args, _unread(call))
    if call.func is _OWN_BACKWARD and call.argument("train"):
        return _as(call, operation, _OWN_BACKWARD, (*call.args[:3], None, None, *call.args[5:]), _unread(call))
    return call, operation


def _unread(call: TracedCall) -> list[object]:
    return [call.argument(name) for name in ("reserveSpace", "running_mean", "running_var")]


def _as(
    call: TracedCall, operation: StepOperation, func: object, args: Sequence[object], unread: Sequence[object]
) -> tuple[TracedCall, StepOperation]:
    """Return a call as that of another operator, which does not access some tensors."""
    without = {each.storage for each in unread if isinstance(each, TracedTensor)}
    other = replace(call, func=func, args=tuple(args), kwargs={}, results=call.results[:3])
    kind = f"aten.{other.func._opname}"
    reads, writes = (tuple(each for each in of if each not in without) for of in (operation.reads, operation.writes))
    return other, replace(operation, kind=kind, reads=reads, writes=writes)
