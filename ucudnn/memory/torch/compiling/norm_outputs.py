"""The output of a normalization from what its backward reads anyway: input, mean and inverse deviation.

A region of backward that computes a norm's output again does no sums for that, and writes no running statistics.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ucudnn.memory.torch.compiling.fusible_calls import BATCH_NORM, GROUP_NORM, LAYER_NORM
from ucudnn.memory.torch.subject.traced_values import TracedCall, TracedTensor

_parsed: Any = torch._C.parse_schema


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


def _operator(function: Any) -> Any:
    """Return a function that stands in a `TracedCall` where an operator of PyTorch does."""
    name = f"{function.__name__.strip('_')}_output"
    given = "Tensor x, Tensor mean, Tensor deviation, Tensor? weight, Tensor? bias"
    function.namespace, function._opname, function._overloadname, function.tags = "ucudnn", name, "default", ()
    function._schema = _parsed(f"ucudnn::{name}({given}) -> Tensor")
    return function


_OUTPUTS = {
    each: (_operator(function), weight)
    for each, function, weight in (
        (BATCH_NORM, _batch_norm, 1),
        (LAYER_NORM, _layer_norm, 2),
        (GROUP_NORM, _group_norm, 1),
    )
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
