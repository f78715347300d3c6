"""Operators of backward that may write their result into an operand that nobody reads afterwards.

They are those of which an element of the result is written by the thread that has read what it depends on:

* Operators that compute each element from those at the same place. PyTorch's `TensorIterator`, on which they stand,
  allows that a result lies where an operand lies.
* The backward of a softmax. It sums a row before it writes any of it, and then computes each element alone.
* The backward of PReLU in pieces, of which each is computed apart and copied over its operand.

In a trial on small operands they must give the same bits. Operators that write into no given tensor, such as the
backward of batch and layer normalization, stay as they are.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from ucudnn.memory.step.graph import Phase
from ucudnn.memory.torch.subject.traced_values import Trace, TracedCall, TracedTensor, listed, mapped
from ucudnn.memory.torch.tracing.real_geometry import relaid

aten = torch.ops.aten

ELEMENTWISE = frozenset({
    "binary_cross_entropy_backward", "elu_backward", "gelu_backward", "hardshrink_backward", "hardtanh_backward",
    "huber_loss_backward", "leaky_relu_backward", "logit_backward", "mse_loss_backward", "sigmoid_backward",
    "silu_backward", "smooth_l1_loss_backward", "softplus_backward", "softshrink_backward", "tanh_backward",
    "threshold_backward",
})  # fmt: skip
"""Operators of single elements that PyTorch does not tag as such, at least not the form that writes a given tensor."""
_ROWS = frozenset({"_log_softmax_backward_data", "_softmax_backward_data"})
_PRELU = aten._prelu_kernel_backward.default
_MOST_ENTRIES, _MOST_ROWS, _MOST_ELEMENTS = 12, 3, 1 << 20  # of operands in a trial
_PIECES = 16
_TO_PIECES = frozenset({_PRELU})
"""Operators that may run in pieces, which takes them longer."""
_TRIED: dict[Any, bool] = {}
"""Whether operators gave the same bits in place, by operator, operands and device."""


def has_pieces(calls: Iterable[TracedCall]) -> bool:
    """Whether some of a step's calls may run piece by piece."""
    return any(call.func in _TO_PIECES for call in calls)


def written_in_place(
    trace: Trace, calls: Sequence[TracedCall], kept: Set[int], device: str, *, in_pieces: bool = False
) -> tuple[list[TracedCall], dict[int, int]]:
    """Return the calls of a trace, of which some write into an operand, and which storage is another one then.

    An operand is written over if it was made in the step, no later call is given its storage, and it and the result lie
    alike and are all of their storages. What forward has made is written over by operators in pieces alone, because
    plans have more ways to keep it where nothing writes it in backward. Storages that are there before or after the
    step are kept.
    """
    last = {each.storage: index for index, call in enumerate(calls) for each in (*call.inputs, *call.outputs)}
    own = {
        storage
        for storage, each in enumerate(trace.storages)
        if each.born >= 0 and each.device == device and storage not in kept
    }
    pieces = [call.results[0].bytes_touched for call in calls if in_pieces and call.func is _PRELU]
    least = max(pieces, default=0) * 3 // 4  # four tensors of these bytes take what the three of the largest one take
    found: list[TracedCall] = []
    merged: dict[int, int] = {}
    for index, call in enumerate(calls):
        current = call.with_storages(merged)
        out = _result(call, least if in_pieces else None) if call.phase is Phase.BACKWARD else None
        if out is not None and out.storage in own and trace.storages[out.storage].born == index:
            for operand in _operands(current, out):
                written = None
                sizes = {trace.storages[each.storage].size for each in (operand, out)}
                is_whole = sizes == {out.bytes_touched} != {0}
                if operand.storage in own and last[operand.storage] == index and is_whole:
                    is_backward = calls[trace.storages[operand.storage].born].phase is Phase.BACKWARD
                    written = _written(current, operand, device) if is_backward or call.func is _PRELU else None
                if written is not None and _gives_same_bits(trace, current, written, operand):
                    merged[out.storage] = operand.storage
                    last[operand.storage] = last[out.storage]
                    current = written
                    break
        found.append(current)
    return found, merged


def _result(call: TracedCall, least: int | None) -> TracedTensor | None:
    """Return the result that may lie where an operand lies; in pieces that of more than the least bytes."""
    if least is None or call.func is not _PRELU:
        return call.results if isinstance(call.results, TracedTensor) else None
    found: TracedTensor = call.results[0]
    return found if found.bytes_touched > least else None


def _operands(call: TracedCall, out: TracedTensor) -> Iterator[TracedTensor]:
    """Yield the operands that lie as a result does, and whose storages are given in no other form."""
    for operand in dict.fromkeys(call.inputs):
        shown = {each for each in call.inputs if each.storage == operand.storage}
        if operand.geometry == out.geometry and operand.is_plain and operand.is_dense and shown == {operand}:
            yield operand


def _written(call: TracedCall, operand: TracedTensor, device: str) -> TracedCall | None:
    """Return a call that writes into an operand; None where that would not be safe, or would only be another copy."""
    if call.func is _PRELU:
        is_alike = call.args[0].geometry == call.args[1].geometry
        written = replace(call, func=_IN_PIECES, kwargs={"written": operand}, results=call.results[1])
        return written if is_alike else None
    form = None if call.draws else _form(call.func, device)
    if form is None:
        return None
    func, out = form
    if out:
        return replace(call, func=func, kwargs={**call.kwargs, out: operand}, results=operand)
    return replace(call, func=func, results=operand) if call.args[0] == operand else None


@cache
def _form(func: Any, device: str) -> tuple[Any, str] | None:
    """Return an operator that writes its result into a tensor, and that argument; '' for the first one."""
    is_safe = torch.Tag.pointwise in func.tags or func._opname in ELEMENTWISE or func._opname in _ROWS
    if func.namespace != "aten" or not is_safe or func._schema.is_mutable:
        return None
    own = [(each.name, str(each.type)) for each in func._schema.arguments]
    for other in (getattr(func._overloadpacket, name) for name in func._overloadpacket.overloads()):
        outs = [each.name for each in other._schema.arguments if each.is_out]
        rest = [(each.name, str(each.type)) for each in other._schema.arguments if not each.is_out]
        if len(outs) == 1 and rest == own and _has_kernel(other, device):
            return other, outs[0]
    other = getattr(getattr(aten, f"{func._opname}_", None), func._overloadname, None)
    return (other, "") if other is not None and _has_kernel(other, device) else None


def _has_kernel(func: Any, device: str) -> bool:
    """Whether an operator is written for a device; others call the one that returns a new tensor, and copy that."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), device.upper()))


def _gives_same_bits(trace: Trace, call: TracedCall, written: TracedCall, operand: TracedTensor) -> bool:
    """Whether an operator gives the same bits in place, in a trial on small operands that lie as those of the step."""
    row = call.argument("dim") if call.func._opname in _ROWS else None
    small: dict[TracedTensor, tuple[TracedTensor, str]] = {}
    for each in call.inputs:
        entries = min(_MOST_ENTRIES, int(_MOST_ELEMENTS ** (1 / max(1, len(each.shape)))))
        most = entries if row is None else _MOST_ROWS
        wholes = () if row is None or not each.shape else (row % len(each.shape),)
        shape = tuple(size if at in wholes else min(size, most) for at, size in enumerate(each.shape))
        stride = relaid(each.shape, each.stride, shape)
        if stride is None or prod(shape) > _MOST_ELEMENTS or not each.is_plain:
            return False
        small[each] = TracedTensor(0, shape, stride, 0, each.dtype), trace.storages[each.storage].device
    others = str(mapped((call.args, dict(call.kwargs)), TracedTensor, lambda _: None))
    key = written.func, call.inputs.index(operand), others, *map(str, small.values())
    if key not in _TRIED:
        try:
            with no_dispatch(), torch.no_grad(), torch._C._DisableAutocast():
                apart, together = _called(call, small), _called(written, small, operand)
            _TRIED[key] = len(apart) == len(together) and all(map(_alike, apart, together))
        except Exception:  # noqa: BLE001  # whatever it raises, it stays as it is
            _TRIED[key] = False
    return _TRIED[key]


def _called(
    call: TracedCall, small: Mapping[TracedTensor, tuple[TracedTensor, str]], operand: TracedTensor | None = None
) -> list[Tensor]:
    """Return what an operator returns of small operands; with an operand, this first and what it returns beside it.

    Its numbers are the same in each trial, infinity and NaN among them but in rows, of which these would leave nothing.
    """
    made: dict[TracedTensor, Tensor] = {}
    for tensor, (own, device) in small.items():
        dtype, numbers = own.dtype, torch.arange(own.extent, dtype=torch.float64, device="cpu")
        numbers = (numbers * 0.6180339887498949 + len(made) / 3) % 1.0 * 8.0 - 4.0
        if call.func._opname not in _ROWS and (dtype.is_floating_point or dtype.is_complex):
            for place, value in enumerate((0.0, -0.0, float("inf"), float("nan"))):
                numbers[5 + 7 * place :: 89] = value
        numbers = numbers > 0 if dtype is torch.bool else numbers.to(dtype)
        made[tensor] = own.within(numbers.to(device))
    args, kwargs = (mapped(each, TracedTensor, made.__getitem__) for each in (call.args, dict(call.kwargs)))
    results = listed(call.func(*args, **kwargs))
    if operand is not None:
        results = [made[operand], *(each for each in results if each is not made[operand])]
    return results


def _alike(one: Tensor, other: Tensor) -> bool:
    steps = [[step for step, size in zip(each.stride(), each.shape, strict=True) if size != 1] for each in (one, other)]
    bits = [torch.empty(0, dtype=torch.uint8, device="cpu").set_(each.cpu().untyped_storage()) for each in (one, other)]
    return one.shape == other.shape and steps[0] == steps[1] and torch.equal(*bits)


def _prelu_backward(grad: Tensor, own: Tensor, weight: Tensor, *, written: Tensor) -> Tensor:
    """Write the gradient of PReLU's operand over an operand; return the products whose sum is that of its weight.

    Pieces are parts along the dimension that has enough entries whose bytes lie together.
    """
    axis = max(range(grad.dim()), key=lambda each: (min(grad.shape[each], _PIECES), grad.stride(each)))
    products = torch.empty_like(grad)
    parts = (each.chunk(_PIECES, axis) for each in (grad, own, weight.expand_as(own), written, products))
    for grad_part, own_part, weight_part, written_part, products_part in zip(*parts, strict=True):
        first, second = _PRELU(grad_part, own_part, weight_part)
        written_part.copy_(first)
        products_part.copy_(second)
        del first, second
    return products


_LIBRARY = torch.library.Library("ucudnn", "FRAGMENT")
_LIBRARY.define("prelu_backward(Tensor grad_output, Tensor self, Tensor weight, *, Tensor(a!) written) -> Tensor")
_LIBRARY.impl("prelu_backward", _prelu_backward, "CompositeExplicitAutograd")
_IN_PIECES = torch.ops.ucudnn.prelu_backward.default
