"""The switch: which calls go through which handle, and what becomes of the rest."""

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from threading import RLock, local
from typing import Any, final

import torch

from ucudnn.errors import UcudnnError
from ucudnn.handle import Handle
from ucudnn.problem import ConvolutionProblem, MathMode
from ucudnn.report import Report
from ucudnn.torch.problems import Call, call_of

_LOG = logging.getLogger(__name__)
_MOST_NAMES = 1 << 14

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Of input, weight and bias."""

OpenHandle = Callable[[torch.device], Handle]
"""Opens the handle of a device."""


@final
class Switch:
    """Takes PyTorch's convolutions to handles, one for each device.

    Args:
        open_handle: opens the handle of a device.
        device_type: 'cuda' or 'cpu'.

    Attributes:
        calls: how many convolutions went through a handle: forward ones, and gradients one by one.
        left: how many were left to PyTorch, by reason.
    """

    def __init__(self, open_handle: OpenHandle, device_type: str) -> None:
        self.device_type = device_type
        self.calls = 0
        self.left: Counter[str] = Counter()
        self._open_handle = open_handle
        self._handles: dict[torch.device, Handle] = {}
        self._lock = RLock()
        self._names: dict[int, str] = {}
        self._current = local()

    @contextmanager
    def named(self, name: str) -> Any:
        """Name the convolutions that this thread calls within."""
        before = getattr(self._current, "name", "")
        self._current.name = name
        try:
            yield
        finally:
            self._current.name = before

    @property
    def inside(self) -> bool:
        """Whether this thread is within a layer that has a name."""
        return bool(getattr(self._current, "name", ""))

    def knows(self, weight: torch.Tensor) -> bool:
        """Whether a layer with this weight was called under a name."""
        return weight.data_ptr() in self._names

    def reports(self) -> dict[torch.device, Report]:
        """Return the report of each device's handle."""
        with self._lock:
            return {device: handle.report() for device, handle in self._handles.items()}

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
    ) -> torch.Tensor | None:
        """Return what aten::convolution returns, or None where it is left to PyTorch."""
        call = self._call(x, weight, stride, padding, dilation, transposed, output_padding, groups)
        if call is None:
            return None
        name = self._name(weight)
        memory_format = call.memory_format
        x = x.contiguous(memory_format=memory_format)
        weight = weight.contiguous(memory_format=memory_format)
        out = torch.empty(call.out_shape, dtype=x.dtype, device=x.device, memory_format=memory_format)
        given, result = (out, x) if call.transposed else (x, out)
        if not self._convolve(call.forward, given, weight, result, name):
            return None
        return out if bias is None else out.add_(bias.view(1, -1, *(1,) * (out.dim() - 2)))

    def backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        transposed: bool,
        output_padding: list[int],
        groups: int,
        output_mask: list[bool],
    ) -> Gradients | None:
        """Return what aten::convolution_backward returns, or None where it is left to PyTorch."""
        call = self._call(x, weight, stride, padding, dilation, transposed, output_padding, groups)
        if call is None:
            return None
        if tuple(grad.shape) != call.out_shape or grad.dtype is not x.dtype:
            self.left["the gradient is of another shape or type"] += 1
            return None
        name = self._name(weight)
        memory_format = call.memory_format
        grad = grad.contiguous(memory_format=memory_format)
        grad_x = grad_weight = grad_bias = None
        if output_mask[0]:
            near = weight.contiguous(memory_format=memory_format)
            grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=memory_format)
            given, result = (grad, grad_x) if call.transposed else (grad_x, grad)
            if not self._convolve(call.backward_input, given, near, result, name):
                return None
        if output_mask[1]:
            near = x.contiguous(memory_format=memory_format)
            grad_weight = torch.empty(weight.shape, dtype=x.dtype, device=x.device, memory_format=memory_format)
            given, result = (grad, near) if call.transposed else (near, grad)
            if not self._convolve(call.backward_weight, given, grad_weight, result, name):
                return None
        if output_mask[2]:
            grad_bias = grad.sum(dim=[0, *range(2, grad.dim())])
        return grad_x, grad_weight, grad_bias

    def _call(self, x: torch.Tensor, weight: torch.Tensor, *parameters: Any) -> Call | None:
        cudnn = torch.backends.cudnn
        if not cudnn.enabled and self.device_type == "cuda":
            self.left["torch.backends.cudnn.enabled is False"] += 1
            return None
        deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
        math = MathMode.TF32 if cudnn.allow_tf32 else MathMode.FMA
        call = call_of(x, weight, *parameters, math=math, deterministic=deterministic)
        if call is None:
            self.left[f"{str(x.dtype).removeprefix('torch.')} of {x.dim() - 2} dimensions is not computed here"] += 1
        return call

    def _name(self, weight: torch.Tensor) -> str:
        """Return the layer's name: autograd calls with the weight that the layer was called with, but with no name."""
        name: str = getattr(self._current, "name", "")
        address = weight.data_ptr()
        if not name:
            return self._names.get(address, "")
        if len(self._names) >= _MOST_NAMES and address not in self._names:
            self._names.clear()  # casts of autocast lie somewhere else in each step
        self._names[address] = name
        return name

    def _convolve(
        self, problem: ConvolutionProblem, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, name: str
    ) -> bool:
        try:
            handle = self._handle(x.device)
            handle.convolve(problem, *(_bound(each, problem) for each in (x, weight, y)), layer=name)
        except (UcudnnError, MemoryError) as error:
            reason = f"{type(error).__name__}: {error}"
            if not self.left[reason]:
                _LOG.warning("left to PyTorch: %s", reason)
            self.left[reason] += 1
            return False
        self.calls += 1
        return True

    def _handle(self, device: torch.device) -> Handle:
        handle = self._handles.get(device)
        if handle is None:
            with self._lock:
                handle = self._handles.get(device) or self._open_handle(device)
                self._handles[device] = handle
        return handle


def _bound(tensor: torch.Tensor, problem: ConvolutionProblem) -> Any:
    """Return a tensor as a handle takes it: its address, or an array in the problem's layout."""
    if tensor.is_cuda:
        return tensor.data_ptr()
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)  # NumPy has no such type; backends go by the problem's
    if problem.layout.channels_last:
        tensor = tensor.movedim(1, -1)
    return tensor.numpy()
