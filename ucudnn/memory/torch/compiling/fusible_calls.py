"""Which operator calls may lie in a region: elementwise ones, reductions, normalization, casts and copies."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any, final

import torch

from ucudnn.memory.torch.subject.traced_values import TracedCall, TracedTensor, listed, mapped
from ucudnn.memory.torch.tracing.assemble import writes
from ucudnn.memory.torch.tracing.in_place import ELEMENTWISE

aten = torch.ops.aten
_parsed: Any = torch._C.parse_schema

BATCH_NORM, LAYER_NORM = aten.native_batch_norm.default, aten.native_layer_norm.default
GROUP_NORM = aten.native_group_norm.default

_REDUCING = (
    *("max_pool", "sum", "mean", "var", "amax", "amin"),
    *("nll_loss", "mse_loss", "smooth_l1", "huber", "binary_cross"),
)
_TAGS = {getattr(torch.Tag, name) for name in ("pointwise", "reduction") if hasattr(torch.Tag, name)}
_REDUCTION = getattr(torch.Tag, "reduction", None)
_NAMES = frozenset({
    "native_batch_norm", "native_layer_norm", "native_group_norm", "_fused_rms_norm",
    "native_batch_norm_backward", "native_layer_norm_backward", "native_group_norm_backward",
    "_fused_rms_norm_backward", "_softmax", "_safe_softmax", "_log_softmax",
    "_softmax_backward_data", "_log_softmax_backward_data",
    "mse_loss", "mse_loss_backward", "smooth_l1_loss", "smooth_l1_loss_backward", "huber_loss", "huber_loss_backward",
    "binary_cross_entropy", "binary_cross_entropy_backward", "binary_cross_entropy_with_logits",
    "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward",
    "_to_copy", "copy_", "clone", "cat", "stack", "constant_pad_nd", "select_backward", "slice_backward",
    "fill_", "zero_", "full", "zeros", "ones", "full_like", "zeros_like", "ones_like", "new_zeros", "new_full",
    "new_ones", "scalar_tensor", "arange", "tril", "triu", "sum", "mean", "var", "var_mean", "amax", "amin",
    "hardswish_backward", "hardsigmoid_backward", "hardtanh_backward", "leaky_relu_backward", "elu_backward",
    "softplus_backward", "mish_backward", "glu", "glu_backward", "log_sigmoid_forward", "log_sigmoid_backward",
    "native_dropout_backward", "masked_fill_", "max_pool2d_with_indices", "max_pool2d_with_indices_backward",
})  # fmt: skip

_ALIGNED = 16  # bytes that a tensor core's load takes at once
_LARGE_PRODUCT = 2**31  # operations, below which an H200 takes a few microseconds


@final
class OwnOperator:
    """A function of tensors that stands in a `TracedCall` where an operator of PyTorch does.

    The function calls operators of PyTorch, and draws nothing. The declaration is a schema of PyTorch.
    """

    namespace, _overloadname = "ucudnn", "default"
    tags: tuple[Any, ...] = ()

    def __init__(self, function: Callable[..., Any], declaration: str) -> None:
        self._function, self._schema = function, _parsed(f"ucudnn::{declaration}")
        self._opname = self.__name__ = declaration.partition("(")[0]

    def __call__(self, *args: Any) -> Any:
        """Return what the function returns."""
        return self._function(*args)

    def __str__(self) -> str:
        return f"ucudnn.{self._opname}"

    __repr__ = __str__


def is_fusible(call: TracedCall, counted: int) -> bool:
    """Return whether a region may hold a call whose storages are all among the counted ones.

    What draws random numbers stays by itself: it draws what the plain loop draws, once, and what it drew is a tensor.
    """
    func: Any = call.func
    known = func.namespace == "aten" and (_TAGS & {*func.tags} or func._opname in _NAMES | ELEMENTWISE)
    if call.draws or not (known or isinstance(func, OwnOperator)):
        return False
    if not call.outputs or any(isinstance(each, (list, dict)) for each in listed(call.results)):
        return False
    return all(
        each.storage < counted and each.is_plain and not each.dtype.is_complex and 0 not in each.shape
        for each in chain(call.inputs, call.outputs)
    )


def wants_padding(call: TracedCall) -> bool:
    """Return whether a call is a large product of matrices of which a side has no whole number of 16 bytes.

    Inductor pads such a product where that is faster: with the 50,257 words of GPT-2 an H200 takes a seventh of the
    time.
    """
    if call.func not in (aten.mm.default, aten.addmm.default, aten.bmm.default) or call.flops < _LARGE_PRODUCT:
        return False
    matrices = (each for each in chain(call.inputs, call.outputs) if each.is_plain and len(each.shape) > 1)
    return any(side * each.dtype.itemsize % _ALIGNED for each in matrices for side in each.shape[-2:])


def is_cheap(call: TracedCall) -> bool:
    """Return whether a fusible call may be computed again where its result is read, because it sums nothing up.

    A softmax is so, because its result is larger than what it is made of by much, or as large.
    """
    name = call.func._opname
    return _REDUCTION not in call.func.tags and not name.startswith(_REDUCING) and "norm" not in name


def may_come_first(call: TracedCall) -> bool:
    """Return whether a call may run before others that it does not depend on: one that draws, or takes memory alone."""
    return call.draws or call.func._opname.startswith(("empty", "new_empty"))


def takes_memory(call: TracedCall) -> bool:
    """Return whether a call only takes memory like that of a tensor, of which it reads nothing."""
    return call.func._opname in ("empty_like", "new_empty", "new_empty_strided")


def out_of_place(call: TracedCall, storage: int, new: int) -> TracedCall | None:
    """Return a call that makes a new storage rather than writing an operand's; None where no operator is known for it.

    The operand must lie in the storage as the result does.
    """
    written, func = writes(call), call.func
    if len(written) != 1 or written[0].storage != storage or call.results != written[0]:
        return None
    outs = {argument.name for argument in func._schema.arguments if argument.is_out}
    packet = func._overloadpacket if outs else getattr(aten, func._opname.removesuffix("_"), None)
    other = getattr(packet, "default" if outs else func._overloadname, None)
    if other is None or (not outs and not func._opname.endswith("_")):
        return None
    if any(each.dtype is not written[0].dtype for each in call.inputs):
        return None  # out of place, the result might have the wider type
    names = [each.name for each in func._schema.arguments if not each.is_out]
    if names != [each.name for each in other._schema.arguments] or other._schema.is_mutable:
        return None
    kwargs = {key: value for key, value in call.kwargs.items() if key not in outs}
    made = mapped(call.results, TracedTensor, lambda each: replace(each, storage=new))
    return replace(call, func=other, kwargs=kwargs, results=made)
