"""Norms in regions: PyTorch's own operator for batch norms, and outputs of norms from what their backward reads anyway.

cuDNN keeps bytes of its own for the backward of a batch norm, beside mean and inverse deviation. Compiled code does not
make them. Backward is given running statistics, too, and reads none of them in training. A region of backward that
computes a norm's output again from input, mean and inverse deviation does no sums for that, and writes no statistics.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ucudnn.memory.step.graph import StepOperation
from ucudnn.memory.torch.compiling.fusible_calls import BATCH_NORM, GROUP_NORM, LAYER_NORM, OwnOperator
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.memory.torch.subject.traced_values import TracedCall, TracedTensor

aten = torch.ops.aten

_FORWARD, _BACKWARD = aten.cudnn_batch_norm.default, aten.cudnn_batch_norm_backward.default
_OWN_BACKWARD = aten.native_batch_norm_backward.default
_GIVEN_FORWARD = "input", "weight", "bias", "running_mean", "running_var", "training", "exponential_average_factor"


def with_native_norms(program: StepProgram) -> StepProgram:
    """Return a step whose batch norms are PyTorch's own."""
    pairs = zip(program.calls, program.graph.operations, strict=True)
    calls, operations = zip(*[_changed(call, operation) for call, operation in pairs], strict=True)
    return replace(program, calls=calls, graph=replace(program.graph, operations=operations))


def _changed(call: TracedCall, operation: StepOperation) -> tuple[TracedCall, StepOperation]:
    if call.func is _FORWARD and call.argument("training"):
        args = [call.argument(name) for name in (*_GIVEN_FORWARD, "epsilon")]
        return _as(call, operation, BATCH_NORM, args, call.results[3:])
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
    without = {each.storage for each in unread if isinstance(each, TracedTensor)}
    other = replace(call, func=func, args=tuple(args), kwargs={}, results=call.results[:3])
    kind = f"aten.{other.func._opname}"
    reads, writes = (tuple(each for each in of if each not in without) for of in (operation.reads, operation.writes))
    return other, replace(operation, kind=kind, reads=reads, writes=writes)


def _batch_norm(x: Tensor, mean: Tensor, deviation: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = [1, -1, *[1] * (x.dim() - 2)]
    return _scaled(x, mean.view(shape), deviation.view(shape), weight, bias, shape)


def _layer_norm(x: Tensor, mean: Tensor, deviation: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = [*(weight if weight is not None else bias if bias is not None else mean).shape]
    return _scaled(x, mean, deviation, weight, bias, shape)


def _group_norm(x: Tensor, mean: Tensor, deviation: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    def spread(each: Tensor) -> Tensor:
        samples, groups = each.shape
        return each[:, :, None].expand(samples, groups, x.shape[1] // groups).reshape(samples, -1, *rest)

    rest = [1] * (x.dim() - 2)
    return _scaled(x, spread(mean), spread(deviation), weight, bias, [1, -1, *rest])


def _scaled(
    x: Tensor, mean: Tensor, deviation: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]
) -> Tensor:
    """Return the output in the type of x; 16 bits are computed in float32."""
    wide = torch.float32 if x.dtype.itemsize == 2 else x.dtype
    y = (x.to(wide) - mean.to(wide)) * deviation.to(wide)
    y = y if weight is None else y * weight.to(wide).view(shape)
    y = y if bias is None else y + bias.to(wide).view(shape)
    return y.to(x.dtype)


_GIVEN = "(Tensor x, Tensor mean, Tensor deviation, Tensor? weight, Tensor? bias) -> Tensor"
_OUTPUTS = {
    BATCH_NORM: (OwnOperator(_batch_norm, f"batch_norm_output{_GIVEN}"), 1),
    LAYER_NORM: (OwnOperator(_layer_norm, f"layer_norm_output{_GIVEN}"), 2),
    GROUP_NORM: (OwnOperator(_group_norm, f"group_norm_output{_GIVEN}"), 1),
}
"""What computes the output of each norm, and where its weight stands among its arguments; the bias is behind that."""


def is_norm(call: TracedCall) -> bool:
    """Return whether a call is a norm whose mean and deviation are there, so that its output follows from them.

    On a CPU some have 16 bits, from which the output would follow with a larger error than that of forward.
    """
    statistics = call.results[1:3] if call.func in _OUTPUTS else ()
    exact = [isinstance(each, TracedTensor) and 0 not in each.shape and each.dtype.itemsize > 2 for each in statistics]
    return bool(exact) and all(exact)


def norm_output(call: TracedCall) -> TracedCall:
    """Return the call that computes the output of a norm from its input, mean and deviation."""
    function, weight = _OUTPUTS[call.func]
    output, mean, deviation = call.results[:3]
    args = call.args[0], mean, deviation, *call.args[weight : weight + 2]
    return replace(call, func=function, args=args, kwargs={}, results=output)
