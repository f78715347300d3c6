"""Tangents: the gradients of a step's outputs, with which its backward begins."""

import torch
from torch import Tensor

from ucudnn.memory.torch.subject.traced_values import TracedTensor


def lying_as(tensor: Tensor, traced: TracedTensor) -> Tensor:
    """Return a tensor as the trace has it in memory: the tensor itself, or a copy."""
    lies = tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    if lies == (traced.stride, 0, traced.dtype, False, False):
        return tensor
    made = torch.empty_strided(traced.shape, traced.stride, dtype=traced.dtype, device=tensor.device)
    return made.copy_(tensor)


def tangent_of(output: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """Return a tensor for the gradient of an output, in the strides of that or in others."""
    return torch.empty_like(output) if stride is None else output.new_empty_strided(output.shape, stride)
