"""How what an operator returns lies in memory, and its type, where its fake, which computes nothing, has another.

PyTorch makes fakes of many operators by others that compute the same. On channels_last tensors those lie otherwise, and
where the arguments have several types, what they return beside the first result has another one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten


def as_computed(func: Any, args: Any, result: Any) -> Any:
    """Return what an operator returns; a fake result of the type and the layout of the real one's.

    Args:
        func: the operator.
        args: its arguments by position.
        result: what it returned. Whatever is no fake comes back unchanged.
    """
    first = result[0] if isinstance(result, tuple | list) and result else result
    if not isinstance(first, FakeTensor):
        return result
    rule = _RULES.get(func)
    if rule is None and first.device.type == "cpu":
        rule = _RULES_OF_CPUS.get(func)
    return result if rule is None else rule(args, result)


def _contiguous(args: Any, result: Any) -> Any:
    return tree_map_only(Tensor, Tensor.contiguous, result)


def _reduced_in_place(args: Any, result: Any) -> Any:
    """Return a loss that is reduced in the storage of the losses of all elements."""
    return result if result.dim() else result.new_empty(max(args[0].numel(), 1)).as_strided((), ())


def _crossed(args: Any, result: Any) -> Any:
    """Return a binary cross-entropy: of each element in the place of the input's, or reduced."""
    return torch.empty_like(args[0]) if result.dim() else _reduced_in_place(args, result)


def _seeded(args: Any, result: Any) -> Any:
    """Return what attention returns: the seed and the offset of its dropout lie on the host, where backward reads them.

    Only in a captured CUDA graph they do not.
    """
    return tuple(each.new_empty((), device="cpu") if _is_scalar(each) else each for each in result)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.dim() and not value.is_floating_point()


def _with_statistics(*positions: int) -> Callable[[Any, Any], Any]:
    """Return the rule of a normalization whose statistics, or gradients of weights, have the type of an argument.

    It is the first that is there. Fakes give them the input's type, which is a smaller one under autocast.
    """

    def rule(args: Any, result: Any) -> Any:
        like = next((args[each] for each in positions if isinstance(args[each], Tensor)), result[0])
        return result[0], *(_as_type(each, like.dtype) for each in result[1:])

    return rule


def _typed(position: int) -> Callable[[Any, Any], Any]:
    """Return the rule of what has the type of an argument, in its first result."""

    def rule(args: Any, result: Any) -> Any:
        dtype = args[position].dtype
        return _as_type(result, dtype) if isinstance(result, Tensor) else (_as_type(result[0], dtype), *result[1:])

    return rule


def _as_type(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return tensor if tensor is None or tensor.dtype is dtype else tensor.to(dtype)


def _normed(args: Any, result: Any) -> Any:
    """Return what normalization of weights returns: norms of float16 are in float32."""
    return result[0], result[1].float() if args[1].dtype is torch.float16 else result[1]


def _bagged(args: Any, result: Any) -> Any:
    """Return what a bag of embeddings returns: for each index its bag, in memory with one entry more.

    Sums need none of them; of bfloat16 the fake does not know that.
    """
    weight, indices, *_ = args
    mode, padding = args[4] if len(args) > 4 else 0, args[8] if len(args) > 8 else -1
    output, bags, *others = result
    if mode == 0 and padding < 0 and weight.dtype is torch.bfloat16 and weight.stride(1) == 1:
        bags = bags.new_empty(0)
    elif bags.numel():
        bags = bags.new_empty(indices.numel() + 1)[: indices.numel()]
    return output, bags, *others


def _in_turn(*rules: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the rule that several make, one after the other."""

    def rule(args: Any, result: Any) -> Any:
        for each in rules:
            result = each(args, result)
        return result

    return rule


def _like(position: int) -> Callable[[Any, Any], Any]:
    """Return the rule of what lies as an argument."""
    return lambda args, result: torch.empty_like(args[position])


def _formatted(position: int) -> Callable[[Any, Any], Any]:
    """Return the rule of what has the memory format of an argument."""

    def rule(args: Any, result: Any) -> Any:
        form = suggest_memory_format(args[position])
        if isinstance(result, Tensor):
            return result.contiguous(memory_format=form)
        return result[0].contiguous(memory_format=form), *result[1:]

    return rule


def _elementwise(first: int, second: int) -> Callable[[Any, Any], Any]:
    """Return the rule of what lies as the sum of two arguments: the first one decides, unless it is expanded."""

    def rule(args: Any, result: Any) -> Any:
        if not isinstance(args[first], Tensor) or not isinstance(args[second], Tensor):
            return result
        stride = torch.add(args[first], args[second]).stride()
        return result if result.stride() == stride else result.new_empty_strided(result.shape, stride)

    return rule


def _noisy(args: Any, result: Any) -> Any:
    """Return the gradient: the noise times that of the output, in evaluation that of a leaky ReLU."""
    training = args[5]
    return (_elementwise(2, 0) if training else _elementwise(1, 0))(args, result)


def _rolled(args: Any, result: Any) -> Any:
    """Return what CPUs roll: one dimension after the other, each as two parts that change places."""
    tensor, shifts, dims = args[0], args[1], args[2] if len(args) > 2 else ()
    if not dims or not tensor.numel():
        return result
    for shift, dim in zip(shifts, dims, strict=True):
        size = tensor.shape[dim]
        start = -shift % size
        tensor = torch.cat((tensor.narrow(dim, start, size - start), tensor.narrow(dim, 0, start)), dim)
    return tensor


_RULES: dict[Any, Callable[[Any, Any], Any]] = {
    aten.mse_loss.default: _reduced_in_place,
    aten.smooth_l1_loss.default: _reduced_in_place,
    aten.soft_margin_loss.default: _in_turn(_typed(0), _reduced_in_place),
    aten.huber_loss.default: _typed(0),
    aten.binary_cross_entropy.default: _crossed,
    aten.binary_cross_entropy_backward.default: _like(1),
    aten.mse_loss_backward.default: _in_turn(_typed(1), _contiguous),
    aten.smooth_l1_loss_backward.default: _in_turn(_typed(1), _contiguous),
    aten.huber_loss_backward.default: _in_turn(_typed(1), _contiguous),
    aten.soft_margin_loss_backward.default: _typed(1),
    aten._log_softmax_backward_data.default: _contiguous,
    aten.glu_backward.default: _contiguous,
    aten.rrelu_with_noise.default: _contiguous,
    aten.rrelu_with_noise_backward.default: _noisy,
    aten.hardswish_backward.default: _elementwise(0, 1),
    aten.hardtanh_backward.default: _elementwise(0, 1),
    aten.hardsigmoid_backward.default: _elementwise(0, 1),
    aten.softplus_backward.default: _elementwise(0, 1),
    aten.logit_backward.default: _elementwise(0, 1),
    aten.elu_backward.default: _elementwise(0, 5),
    aten.xlogy.Tensor: _elementwise(0, 1),
    aten.copysign.Tensor: _elementwise(0, 1),
    aten._scaled_dot_product_efficient_attention.default: _seeded,
    aten._efficient_attention_forward.default: _seeded,
    aten._scaled_dot_product_cudnn_attention.default: _seeded,
    aten._cudnn_attention_forward.default: _seeded,
}
_RULES_OF_CPUS: dict[Any, Callable[[Any, Any], Any]] = {
    aten.native_layer_norm.default: _with_statistics(2),
    aten.native_group_norm.default: _with_statistics(1),
    aten.native_group_norm_backward.default: _typed(1),
    aten.native_batch_norm.default: _with_statistics(1, 3),
    aten._native_batch_norm_legit.default: _with_statistics(1, 3),
    aten._native_batch_norm_legit.no_stats: _with_statistics(1),
    aten._native_batch_norm_legit_no_training.default: _with_statistics(1, 3),
    aten.native_batch_norm_backward.default: _in_turn(_formatted(1), _with_statistics(2, 3)),
    aten._weight_norm_interface.default: _normed,
    aten._embedding_bag.default: _bagged,
    aten.log_sigmoid_forward.default: _contiguous,
    aten.channel_shuffle.default: _formatted(0),
    aten.reflection_pad3d.default: _formatted(0),
    aten.replication_pad3d.default: _formatted(0),
    aten.reflection_pad2d_backward.default: _formatted(1),
    aten.reflection_pad3d_backward.default: _formatted(1),
    aten.replication_pad2d_backward.default: _formatted(1),
    aten.replication_pad3d_backward.default: _formatted(1),
    aten.roll.default: _rolled,
}
