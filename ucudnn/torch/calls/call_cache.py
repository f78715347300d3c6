"""What becomes of PyTorch's calls, decided once for all calls that look the same: which kernels, or which fallback."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch._prims_common import suggest_memory_format

from ucudnn.problem import ConvolutionProblem, MathMode
from ucudnn.torch.calls.fused_call import FusedCall
from ucudnn.torch.calls.kernel_call import KernelCall
from ucudnn.torch.calls.problem import Geometry, TorchConvolution, convolution_of
from ucudnn.torch.device.gpu import Sizes


@final
class ChosenForm:
    """PyTorch's own choice for one call.

    The rule is asked from PyTorch and not written down here, because it depends on the version, the processor and, on
    a CPU, `cpu_settings()`: oneDNN follows the order of the input or the filters, PyTorch's own kernels of three
    dimensions and all of float64 but those of two put channels first. From this format follow the strides:

    * PyTorch's own kernels on a CPU have no groups. It computes group by group and joins the results; a part that
      could be of both formats, with one channel say, is joined as contiguous. Two of them return the filters' gradient
      in the format of the filters.
    * cuDNN's gradients ask again, each from the two tensors that it reads, of which one could be of both formats.
    * All others return tensors in this format.

    Attributes:
        backend: name of PyTorch's kernels.
        on_cudnn: whether they are cuDNN's.
        memory_format: the format into which they bring the tensors first; of one dimension, with a second of size 1.
    """

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> None:
        lists = [[*geometry.stride], [*geometry.padding], [*geometry.dilation]]
        arguments = (*lists, geometry.transposed, [*geometry.output_padding], geometry.groups)
        self._choice: Any = torch._C._select_conv_backend(x, weight, None, *arguments)
        self.backend = str(self._choice).rsplit(".", 1)[-1]
        self.on_cudnn = self.backend in ("Cudnn", "CudnnTranspose")
        self._parts = geometry.groups if self.backend.startswith("Slow") else 1
        self._flat = x.dim() == 3
        x, weight = self._given(x).contiguous() if self._flat else self._given(x), self._given(weight)
        if self._flat:  # PyTorch makes the input contiguous, and adds a dimension of size 1
            x, weight = x.unsqueeze(2), weight.unsqueeze(2)
        self.memory_format = self._format_of(x, weight)
        self._x, self._weight = (each.contiguous(memory_format=self.memory_format) for each in (x, weight))

    def output_strides(self, shape: Sizes) -> Sizes:
        """Return the strides of the output, which has this shape."""
        shape = (*shape[:2], 1, *shape[2:]) if self._flat else shape
        return self._strides(shape, 1, self._part_format())

    def gradient_strides(self, grad: torch.Tensor) -> tuple[Sizes, Sizes]:
        """Return the strides of the gradients of input and weight, given the gradient of the output."""
        of_x = of_weight = self._part_format()
        if self.backend in ("Slow2d", "SlowTranspose2d"):
            of_weight = suggest_memory_format(_part(self._weight, 0, self._parts))
        if self.on_cudnn:
            grad = self._given(grad).unsqueeze(2) if self._flat else self._given(grad)
            grad = grad.contiguous(memory_format=self.memory_format)
            grad = grad.contiguous(memory_format=suggest_memory_format(self._x))
            of_x, of_weight = self._format_of(grad, self._weight), self._format_of(self._x, grad)
        return self._strides(self._x.shape, 1, of_x), self._strides(self._weight.shape, 0, of_weight)

    @staticmethod
    def _given(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    def _format_of(self, x: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
        # Some of PyTorch's rules ask whether the device is a CPU; memory that nothing touches costs nothing there.
        like = partial(torch.empty_strided, dtype=x.dtype, device="meta" if self.on_cudnn else "cpu")
        x, weight = (like(each.shape, each.stride()) for each in (x, weight))
        found: torch.memory_format = torch._C._conv_determine_backend_memory_format(x, weight, self._choice)
        return found

    def _part_format(self) -> torch.memory_format:
        return self._format_of(_part(self._x, 1, self._parts), _part(self._weight, 0, self._parts))

    def _strides(self, shape: Sizes, dimension: int, memory_format: torch.memory_format) -> Sizes:
        sizes = [size // self._parts if at == dimension else size for at, size in enumerate(shape)]
        made = torch.empty(sizes, device="meta", memory_format=memory_format)
        if self._parts > 1:
            made = torch.cat([made] * self._parts, dimension)
        return (made.squeeze(2) if self._flat else made).stride()


def cpu_settings() -> tuple[bool, bool, int]:
    """Return PyTorch's settings on which its choice among a CPU's kernels depends."""
    return torch._C._get_mkldnn_enabled(), torch._C._get_nnpack_enabled(), torch.get_num_threads()


def _part(whole: torch.Tensor, dimension: int, parts: int) -> torch.Tensor:
    """Return one group of a tensor, as PyTorch copies it."""
    if parts == 1:
        return whole
    part = whole.narrow(dimension, 0, whole.shape[dimension] // parts)
    return part.contiguous(memory_format=suggest_memory_format(whole))


ONE_DIMENSION = "of one dimension, with a weight whose channels are last"
"""A reason to leave a convolution to PyTorch, which then computes it by cuDNN."""

_NATIVE = ("CudaDepthwise2d", "CudaDepthwise3d")


@final
class Flags(NamedTuple):
    """PyTorch's flags, as they are when a convolution is called."""

    tf32: bool
    deterministic: bool
    enabled: bool


# Read for each gradient; the properties of torch.backends take three times as long to say the same.
cudnn_deterministic: Callable[[], bool] = torch._C._get_cudnn_deterministic
all_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
cudnn_enabled: Callable[[], bool] = torch._C._get_cudnn_enabled
# This one counts if two settings differ, and then torch.backends.cudnn.allow_tf32 cannot be read.
precision_of: Callable[[str, str], str] = torch._C._get_fp32_precision_getter


def present_flags() -> Flags:
    """Return PyTorch's flags as they are now."""
    is_deterministic = cudnn_deterministic() or all_deterministic()
    return Flags(precision_of("cuda", "conv") == "tf32", is_deterministic, cudnn_enabled())


KernelCallOf = Callable[[ConvolutionProblem, int], KernelCall]
"""Returns the call of a problem's kernel, given its `later_bytes`, for the layer and the device that call now."""

FusedCallOf = Callable[[ConvolutionProblem], FusedCall]
"""Returns the call of a problem with a bias, for the layer and the GPU that call now."""


@final
@dataclass(slots=True, eq=False)
class CachedCall:
    """What becomes of calls that look the same.

    Attributes:
        reason: why they are left to PyTorch; '' if they are not.
        format: memory format into which inputs must be brought first; None if all of them have it.
        output: computes the output; None for a backward call.
        input_gradient: computes the gradient of the input; None if it is not wanted.
        weight_gradient: computes the gradient of the weight; None if it is not wanted.
        bias_as: sizes and strides with which the bias is added to the output.
        fused: computes the output with its bias, if it is on; None without a bias, or where no engine can add it.
        output_strides: PyTorch's, where the kernel writes in another order of dimensions; None where it does not.
        gradient_strides: the same, of the gradients of input and weight.
    """

    reason: str = ""
    _: KW_ONLY
    format: torch.memory_format | None = None
    output: KernelCall | None = None
    input_gradient: KernelCall | None = None
    weight_gradient: KernelCall | None = None
    bias_as: tuple[Sizes, Sizes] = ((), ())
    fused: FusedCall | None = None
    output_strides: Sizes | None = None
    gradient_strides: tuple[Sizes | None, Sizes | None] = (None, None)

    @property
    def lies_as_computed(self) -> bool:
        """Whether nothing is copied to another memory format, neither before nor behind its kernels."""
        return self.format is None and self.output_strides is None and not any(self.gradient_strides)


def forward_call(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    geometry: Geometry,
    flags: Flags,
    kernel_call_of: KernelCallOf,
    fused_call_of: FusedCallOf | None = None,
) -> CachedCall:
    """Return what becomes of calls of aten::_convolution that look like this one."""
    call = asked_convolution(x, weight, geometry, flags, bias=bias)
    if isinstance(call, str):
        return CachedCall(call)
    biased = biased_problem(bias, call)
    return CachedCall(
        format=missing_format(call, x, weight),
        output=kernel_call_of(call.forward, 0),
        bias_as=bias_form(bias, x.dim()),
        fused=None if biased is None or fused_call_of is None else fused_call_of(biased),
        output_strides=_other(ChosenForm(x, weight, geometry).output_strides(call.out_shape), call.out_shape, call),
    )


def backward_call(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    geometry: Geometry,
    output_mask: Sequence[bool],
    flags: Flags,
    kernel_call_of: KernelCallOf,
) -> CachedCall:
    """Return what becomes of calls of aten::convolution_backward that look like this one."""
    call = asked_gradients(grad, x, weight, geometry, flags)
    if isinstance(call, str):
        return CachedCall(call)
    input_gradient = kernel_call_of(call.backward_input, 0) if output_mask[0] else None
    later_bytes = 0 if input_gradient is None else input_gradient.form.size_bytes
    return CachedCall(
        format=missing_format(call, grad, x, weight),
        input_gradient=input_gradient,
        weight_gradient=kernel_call_of(call.backward_weight, later_bytes) if output_mask[1] else None,
        gradient_strides=backward_strides(grad, x, weight, geometry, call),
    )


def backward_strides(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry, call: TorchConvolution
) -> tuple[Sizes | None, Sizes | None]:
    """Return the strides of PyTorch's gradients of input and weight where they are not those of our kernels."""
    of_x, of_weight = ChosenForm(x, weight, geometry).gradient_strides(grad)
    return _other(of_x, x.shape, call), _other(of_weight, weight.shape, call)


def _other(strides: Sizes, shape: Sizes, call: TorchConvolution) -> Sizes | None:
    same = torch.empty(shape, device="meta", memory_format=call.memory_format).stride() == strides
    return None if same else strides


def biased_problem(bias: torch.Tensor | None, call: TorchConvolution) -> ConvolutionProblem | None:
    """Return the problem of a forward call with its bias; None without a bias, or if no engine can add it."""
    can_fuse = bias is not None and bias.is_contiguous() and not call.transposed
    return replace(call.forward, biased=True) if can_fuse else None


def bias_form(bias: torch.Tensor | None, dimensions: int) -> tuple[Sizes, Sizes]:
    """Return the sizes and strides with which a bias is added to an output of that many dimensions."""
    ones = (1,) * (dimensions - 2)
    return ((), ()) if bias is None else ((*bias.shape, *ones), (*bias.stride(), *ones))


def missing_format(call: TorchConvolution, *tensors: torch.Tensor) -> torch.memory_format | None:
    """Return the memory format of a convolution if one of the tensors does not have it."""
    there = all(each.is_contiguous(memory_format=call.memory_format) for each in tensors)
    return None if there else call.memory_format


def asked_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    geometry: Geometry,
    flags: Flags,
    *,
    bias: torch.Tensor | None = None,
    native: bool = False,
) -> TorchConvolution | str:
    """Return the convolution that is asked for, or why it is left to PyTorch.

    With `native`, convolutions count that PyTorch computes by its own depth-wise kernels.
    """
    if x.dtype is not weight.dtype or x.device != weight.device:
        return "input and weight differ in type or device"

    def made(memory_format: torch.memory_format) -> TorchConvolution | None:
        return convolution_of(
            tuple(x.shape),
            tuple(weight.shape),
            x.dtype,
            *geometry,
            memory_format=memory_format,
            math=MathMode.TF32 if flags.tf32 else MathMode.FMA,
            deterministic=flags.deterministic,
        )

    call = made(torch.contiguous_format)
    if call is None:
        kind = f"{str(x.dtype).removeprefix('torch.')} of {x.dim() - 2} dimensions"
        return f"{kind}: empty, of a type that cuDNN has not, or of shapes that PyTorch refuses"
    if x.is_cuda and not flags.enabled:
        return "torch.backends.cudnn.enabled is False"
    chosen = ChosenForm(x, weight, geometry)
    found = _format_on_cudnn(x, weight, chosen, native=native) if x.is_cuda else chosen.memory_format
    if isinstance(found, str):
        return found
    call = made(found if x.dim() > 3 else torch.contiguous_format) or call
    has_form = bias is None or (bias.shape == call.out_shape[1:2] and bias.dtype is x.dtype and bias.device == x.device)
    return call if has_form else "the bias does not fit"


def asked_gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry, flags: Flags, *, native: bool = False
) -> TorchConvolution | str:
    """Return the convolution whose gradients are asked for, or why it is left to PyTorch; see `asked_convolution`."""
    call = asked_convolution(x, weight, geometry, flags, native=native)
    if isinstance(call, str) or (grad.shape == call.out_shape and grad.dtype is x.dtype and grad.device == x.device):
        return call
    return "the gradient is of another shape or type"


def _format_on_cudnn(
    x: torch.Tensor, weight: torch.Tensor, chosen: ChosenForm, *, native: bool
) -> torch.memory_format | str:
    """Return the memory format in which PyTorch would let cuDNN compute, or why it would not."""
    if native and chosen.backend in _NATIVE and x.is_contiguous() and weight.is_contiguous():
        return torch.contiguous_format
    if not chosen.on_cudnn:
        return f"PyTorch computes it by {chosen.backend}, not by cuDNN"
    if x.dim() == 3 and chosen.memory_format is not torch.contiguous_format:
        return ONE_DIMENSION
    return chosen.memory_format
