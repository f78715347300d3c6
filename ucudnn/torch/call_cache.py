"""Routes: what becomes of calls that look the same, so that only the first of them is looked at closely."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch

from ucudnn.problem import ConvolutionProblem, MathMode
from ucudnn.torch.kernel_call import KernelCall
from ucudnn.torch.problem import Sizes, TorchConvolution, convolution_of, memory_format_of

_ON_CUDNN = ("Cudnn", "CudnnTranspose")

Geometry = tuple[Sizes, Sizes, Sizes, bool, Sizes, int]
"""Stride, padding, dilation, transposed, output_padding and groups."""

KernelCallOf = Callable[[ConvolutionProblem], KernelCall]
"""Gives the lane of a problem, of the layer and the device that call."""


@final
class CachedCall:
    """What becomes of calls that look the same.

    Attributes:
        reason: why they are left to PyTorch; '' where they are not.
        format: memory format that inputs must be brought into first; None where all of them have it.
        output: what computes the output.
        input_gradient: what computes the gradient of the input; None where it is not wanted.
        weight_gradient: likewise, of the weight.
        bias_as: sizes and strides with which the bias is added.
    """

    __slots__ = ("bias_as", "format", "input_gradient", "output", "reason", "weight_gradient")

    def __init__(
        self,
        reason: str = "",
        *,
        memory_format: torch.memory_format | None = None,
        output: KernelCall | None = None,
        input_gradient: KernelCall | None = None,
        weight_gradient: KernelCall | None = None,
        bias_as: tuple[Sizes, Sizes] = ((), ()),
    ) -> None:
        self.reason = reason
        self.format = memory_format
        self.output = output
        self.input_gradient = input_gradient
        self.weight_gradient = weight_gradient
        self.bias_as = bias_as


def forward_call(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    geometry: Geometry,
    kernel_call_of: KernelCallOf,
    *,
    math: MathMode,
    deterministic: bool,
    enabled: bool,
) -> CachedCall:
    """Return the route of aten::_convolution."""
    call = _call(x, weight, geometry, math=math, deterministic=deterministic, enabled=enabled)
    if isinstance(call, str):
        return CachedCall(call)
    if bias is not None and (bias.shape != call.out_shape[1:2] or bias.dtype is not x.dtype or bias.device != x.device):
        return CachedCall("the bias does not fit")
    ones = (1,) * (x.dim() - 2)
    bias_as = ((), ()) if bias is None else ((*bias.shape, *ones), (*bias.stride(), *ones))
    return CachedCall(memory_format=_format(call, x, weight), output=kernel_call_of(call.forward), bias_as=bias_as)


def backward_call(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    geometry: Geometry,
    output_mask: Sequence[bool],
    kernel_call_of: KernelCallOf,
    *,
    math: MathMode,
    deterministic: bool,
    enabled: bool,
) -> CachedCall:
    """Return the route of aten::convolution_backward."""
    call = _call(x, weight, geometry, math=math, deterministic=deterministic, enabled=enabled)
    if isinstance(call, str):
        return CachedCall(call)
    if tuple(grad.shape) != call.out_shape or grad.dtype is not x.dtype or grad.device != x.device:
        return CachedCall("the gradient is of another shape or type")
    return CachedCall(
        memory_format=_format(call, grad, x, weight),
        input_gradient=kernel_call_of(call.backward_input) if output_mask[0] else None,
        weight_gradient=kernel_call_of(call.backward_weight) if output_mask[1] else None,
    )


def _format(call: TorchConvolution, *tensors: torch.Tensor) -> torch.memory_format | None:
    there = all(each.is_contiguous(memory_format=call.memory_format) for each in tensors)
    return None if there else call.memory_format


def _call(
    x: torch.Tensor, weight: torch.Tensor, geometry: Geometry, *, math: MathMode, deterministic: bool, enabled: bool
) -> TorchConvolution | str:
    """Return what is asked for, or why it is left to PyTorch."""
    if x.dtype is not weight.dtype or x.device != weight.device:
        return "input and weight differ in type or device"
    make = partial(
        convolution_of, tuple(x.shape), tuple(weight.shape), x.dtype, *geometry, math=math, deterministic=deterministic
    )
    call = make(memory_format=torch.contiguous_format)
    if call is None:
        kind = f"{str(x.dtype).removeprefix('torch.')} of {x.dim() - 2} dimensions"
        return f"{kind}: empty, of a type that cuDNN has not, or of shapes that PyTorch refuses"
    if x.is_cuda and not enabled:
        return "torch.backends.cudnn.enabled is False"
    found = _choice(x, weight, geometry) if x.is_cuda else memory_format_of(x, weight)
    return found if isinstance(found, str) else make(memory_format=found) or call


def _choice(x: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> torch.memory_format | str:
    """Return the memory format in which PyTorch would let cuDNN compute, or why it would not."""
    stride, padding, dilation, transposed, output_padding, groups = geometry
    choice: Any = torch._C._select_conv_backend(
        x, weight, None, list(stride), list(padding), list(dilation), transposed, list(output_padding), groups
    )
    name = str(choice).rsplit(".", 1)[-1]
    if name not in _ON_CUDNN:
        return f"PyTorch computes it by {name}, not by cuDNN"
    flat = x.dim() == 3
    if flat:  # PyTorch makes two dimensions of one, and the input dense
        x, weight = torch.empty_like(x, device="meta").contiguous().unsqueeze(2), weight.unsqueeze(2)
    found: torch.memory_format = torch._C._conv_determine_backend_memory_format(x, weight, choice)
    if flat and found is not torch.contiguous_format:
        return "of one dimension, with a weight whose channels are last"
    return found
