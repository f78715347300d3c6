"""The switch: takes PyTorch's convolutions to handles, one for each device, and leaves the rest to PyTorch."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from threading import RLock
from typing import Any, final

import torch

from ucudnn.handle import Handle
from ucudnn.problem import ConvolutionProblem, MathMode
from ucudnn.reporting.report import Report
from ucudnn.torch.aten_kernels import AtenKernels, Gradients
from ucudnn.torch.call_cache import CachedCall, backward_call, forward_call
from ucudnn.torch.fast_tensors import alias
from ucudnn.torch.kernel_call import Fallbacks, KernelCall
from ucudnn.torch.layer_names import LayerNames

_MOST_ROUTES = 1 << 14

# Read for each gradient; what is in torch.backends takes three times as long to say the same.
_deterministic: Callable[[], bool] = torch._C._get_cudnn_deterministic
_all_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
_enabled: Callable[[], bool] = torch._C._get_cudnn_enabled
# Where both are set, this one counts, and torch.backends.cudnn.allow_tf32 cannot be read.
_precision: Callable[[str, str], str] = torch._C._get_fp32_precision_getter

OpenHandle = Callable[[int], Handle]
"""Opens the handle of a GPU by its number, while that is the current one; of the CPU by -1."""


@final
class Interceptor:
    """Takes PyTorch's convolutions to handles, one for each device.

    Args:
        open_handle: opens the handle of a device.
        device_type: 'cuda' or 'cpu'.
        stock: PyTorch's own kernels, for what is left to them.

    Attributes:
        device_type: the same.
        stock: the same.
        names: of layers.
        left: what was left to PyTorch.
    """

    def __init__(self, open_handle: OpenHandle, device_type: str, stock: AtenKernels) -> None:
        self.device_type = device_type
        self.stock = stock
        self.names = LayerNames()
        self.left = Fallbacks()
        self._open_handle = open_handle
        self._handles: dict[int, Handle] = {}
        self._lock = RLock()
        self._routes: dict[tuple[Any, ...], CachedCall] = {}
        self._lanes: dict[tuple[ConvolutionProblem, str, int], KernelCall] = {}

    def handles(self) -> dict[torch.device, Handle]:
        """Return the handles that were opened so far."""
        with self._lock:
            handles = dict(self._handles)
        return {torch.device("cpu") if at < 0 else torch.device("cuda", at): each for at, each in handles.items()}

    def reports(self, *, repeats: int = 0) -> dict[torch.device, Report]:
        """Return the report of each device's handle, see `Handle.report`."""
        found = {}
        for device, handle in self.handles().items():
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                found[device] = handle.report(repeats=repeats)
        return found

    def problems(self) -> list[ConvolutionProblem]:
        """Return what was asked for so far."""
        return [problem for problem, _, _ in list(self._lanes)]

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        transposed: bool,
        output_padding: list[int],
        groups: int,
        benchmark: bool,
        deterministic: bool,
        enabled: bool,
        allow_tf32: bool,
    ) -> torch.Tensor:
        """Return what aten::_convolution returns; all in one piece, for each call more costs time."""
        name = self.names.of(weight) if self.names.any else ""
        geometry = (tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)
        ordinal = x.get_device()
        # Whatever a route depends on. Strides say in which memory format a tensor is.
        key = (
            x.shape,
            x.stride(),
            x.dtype,
            ordinal,
            weight.shape,
            weight.stride(),
            weight.dtype,
            weight.get_device(),
            None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.get_device()),
            geometry,
            deterministic,
            enabled,
            allow_tf32,
            name,
        )
        route = self._routes.get(key)
        if route is None:
            math = MathMode.TF32 if allow_tf32 else MathMode.FMA
            kernel_call_of = partial(self._lane, name, ordinal)
            route = forward_call(
                x, weight, bias, geometry, kernel_call_of, math=math, deterministic=deterministic, enabled=enabled
            )
            self._keep(key, route)
        lane = route.output
        if lane is not None:
            near, filters = x, weight
            if route.format is not None:
                near, filters = x.contiguous(memory_format=route.format), weight.contiguous(memory_format=route.format)
            out = lane.new()
            if lane.run(out, filters, near) if transposed else lane.run(near, filters, out):
                return out if bias is None else out.add_(alias(bias, *route.bias_as))
            del out, near, filters  # memory may be what is missing
        else:
            self.left.add(route.reason)
        return self.stock.forward(
            x, weight, bias, stride, padding, dilation, transposed, output_padding, groups,
            benchmark, deterministic, enabled, allow_tf32,
        )  # fmt: skip

    def backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias_sizes: list[int] | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        transposed: bool,
        output_padding: list[int],
        groups: int,
        output_mask: list[bool],
    ) -> Gradients:
        """Return what aten::convolution_backward returns."""
        name = self.names.of(weight) if self.names.any else ""
        geometry = (tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)
        ordinal = x.get_device()
        deterministic = _deterministic() or _all_deterministic()
        enabled = _enabled()
        precision = _precision("cuda", "conv")
        key = (
            grad.shape,
            grad.stride(),
            grad.dtype,
            grad.get_device(),
            x.shape,
            x.stride(),
            x.dtype,
            ordinal,
            weight.shape,
            weight.stride(),
            weight.dtype,
            weight.get_device(),
            geometry,
            tuple(output_mask),
            deterministic,
            enabled,
            precision,
            name,
        )
        route = self._routes.get(key)
        if route is None:
            math = MathMode.TF32 if precision == "tf32" else MathMode.FMA
            kernel_call_of = partial(self._lane, name, ordinal)
            route = backward_call(
                grad, x, weight, geometry, output_mask, kernel_call_of,
                math=math, deterministic=deterministic, enabled=enabled,
            )  # fmt: skip
            self._keep(key, route)
        if route.reason:
            self.left.add(route.reason)
        else:
            found = _gradients(route, grad, x, weight, transposed, output_mask[2])
            if found is not None:
                return found
        return self.stock.backward(
            grad, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
        )

    def _keep(self, key: tuple[Any, ...], route: CachedCall) -> None:
        if len(self._routes) >= _MOST_ROUTES:
            self._routes.clear()
        self._routes[key] = route

    def _lane(self, name: str, ordinal: int, problem: ConvolutionProblem) -> KernelCall:
        key = problem, name, ordinal
        lane = self._lanes.get(key)
        if lane is None:
            lane = KernelCall(problem, name, ordinal, partial(self._handle, ordinal), self.left)
            lane = self._lanes.setdefault(key, lane)
        return lane

    def _handle(self, ordinal: int) -> Handle:
        handle = self._handles.get(ordinal)
        if handle is None:
            with self._lock:
                handle = self._handles.get(ordinal) or self._open_handle(ordinal)
                self._handles[ordinal] = handle
        return handle


def _gradients(
    route: CachedCall, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, transposed: bool, wants_bias: bool
) -> Gradients | None:
    """Return the gradients that a route computes, or None if one of them fails.

    Args:
        route: computes the gradients of input and weight.
        grad: gradient of the output.
        x: input of the convolution.
        weight: filters.
        transposed: whether the convolution is transposed.
        wants_bias: whether the gradient of the bias is wanted.
    """
    form = route.format
    grad_bias = grad.sum(dim=[0, *range(2, grad.dim())]) if wants_bias else None
    if form is not None:
        grad = grad.contiguous(memory_format=form)
    grad_x, grad_weight = None, None
    lane, later = route.weight_gradient, route.input_gradient
    if lane is not None:  # first: until the gradient of the input is allocated, its memory may serve as workspace
        near = x if form is None else x.contiguous(memory_format=form)
        grad_weight = lane.new()
        later_bytes = 0 if later is None else later.output_bytes
        first, last = (grad, near) if transposed else (near, grad)
        if not lane.run(first, grad_weight, last, later_bytes):
            return None
    if later is not None:
        grad_x = later.new()
        near = weight if form is None else weight.contiguous(memory_format=form)
        if not (later.run(grad, near, grad_x) if transposed else later.run(grad_x, near, grad)):
            return None
    return grad_x, grad_weight, grad_bias
