"""How what an operator returns lies in memory, where its fake, which computes nothing, lies otherwise.

PyTorch makes fakes of many operators by others that compute the same. On channels_last tensors those lie otherwise.
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


def _normalized(args: Any, result: Any) -> Any:
    """Return what batch normalization returns: its statistics have the type of its weights.

    Its fake gives them the input's, which is a smaller one under autocast.
    """
    weight = args[1]
    if weight is None:
        return result
    return result[0], *(each if each.dtype is weight.dtype else each.to(weight.dtype) for each in result[1:])


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
    aten.soft_margin_loss.default: _reduced_in_place,
    aten.binary_cross_entropy.default: _crossed,
    aten.binary_cross_entropy_backward.default: _like(1),
    aten.mse_loss_backward.default: _contiguous,
    aten.smooth_l1_loss_backward.default: _contiguous,
    aten.huber_loss_backward.default: _contiguous,
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
    aten.native_batch_norm.default: _normalized,
    aten.native_batch_norm_backward.default: _formatted(1),
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
