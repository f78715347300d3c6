"""The interceptor: takes PyTorch's convolutions to handles, one for each device, and leaves the rest to PyTorch."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, final

import torch

from ucudnn.backends.fork_locks import LockLevel, new_lock
from ucudnn.bounded import BoundedDict
from ucudnn.handle import Handle
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.reporting.report import Report
from ucudnn.torch.calls.aten_kernels import AtenKernels, Gradients
from ucudnn.torch.calls.call_cache import (
    ONE_DIMENSION,
    CachedCall,
    Flags,
    all_deterministic,
    backward_call,
    cpu_settings,
    cudnn_deterministic,
    cudnn_enabled,
    forward_call,
    precision_of,
)
from ucudnn.torch.calls.fallbacks import Fallbacks
from ucudnn.torch.calls.fused_call import FusedCall
from ucudnn.torch.calls.kernel_call import KernelCall, PlannedCall
from ucudnn.torch.calls.layer_owners import LayerNames, LayerOwners, shapes_of
from ucudnn.torch.calls.problem import Geometry
from ucudnn.torch.device.gpu import alias, on_default_stream, restrided

_MOST_CALLS = 1 << 14


@final
class Interceptor:
    """Takes PyTorch's convolutions to handles, one for each device.

    Args:
        open_handle: opens the handle of the current GPU, given its number; of the CPU, given -1.
        device_type: 'cuda' or 'cpu'.
        aten: PyTorch's own kernels, which compute what is left to PyTorch.
        fallbacks: counts what is left to PyTorch; None for one that leaves every failure to PyTorch.

    Attributes:
        names: names of layers.
        has_unlent: whether there are calls or plans that `cached_calls` and `KernelCall.direct` have not been asked
            about since this was set to False.
    """

    def __init__(
        self,
        open_handle: Callable[[int], Handle],
        device_type: str,
        aten: AtenKernels,
        fallbacks: Fallbacks | None = None,
    ) -> None:
        self.device_type = device_type
        self.aten = aten
        self.names = LayerNames()
        self.fallbacks = Fallbacks() if fallbacks is None else fallbacks
        self.has_unlent = False
        self._owners = LayerOwners()
        self._open_handle = open_handle
        self._handles: dict[int, Handle] = {}
        self._lock = new_lock(LockLevel.FACE)
        self._calls: BoundedDict[tuple[Any, ...], CachedCall] = BoundedDict(_MOST_CALLS)
        # By the arguments that tell calls apart.
        self._kernel_calls: BoundedDict[tuple[ConvolutionProblem, str, int, int], KernelCall] = BoundedDict(_MOST_CALLS)
        self._fused_calls: BoundedDict[tuple[ConvolutionProblem, str, int], FusedCall] = BoundedDict(_MOST_CALLS)

    def operators(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return what computes forward and backward: methods of this object, because a wrapper would take time."""
        return self.forward, self.backward

    def handles(self) -> dict[torch.device, Handle]:
        """Return the handles that were opened so far, by device."""
        with self._lock:
            handles = dict(self._handles)
        return {torch.device("cpu") if at < 0 else torch.device("cuda", at): each for at, each in handles.items()}

    def reports(self, *, repeats: int = 0) -> dict[torch.device, Report]:
        """Return the report of each device's handle; see `Handle.report`."""
        found = {}
        for device, handle in self.handles().items():
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                found[device] = handle.report(repeats=repeats)
        return found

    def problems(self) -> list[ConvolutionProblem]:
        """Return each problem that a program has asked for so far."""
        fused = [call.problem for call in list(self._fused_calls.values()) if call.looked_up]
        return list(dict.fromkeys([*(call.problem for call in list(self._kernel_calls.values())), *fused]))

    def owners(self) -> dict[str, tuple[str, ...]]:
        """Return the layers that asked for each convolution, by its shapes, as far as they are known without names."""
        filters: dict[str, set[int]] = {}
        for call in self._all_calls():
            known = filters.setdefault(shapes_of(call.problem), set())
            if call.problem.operation is not Operation.BACKWARD_FILTER:  # a gradient lies elsewhere than the filters
                known |= call.filters
        return self._owners.names(filters)

    def bound_calls(self) -> int:
        """Return how many kernels ran on addresses that recurred, with nothing left to look up."""
        calls = self._all_calls()
        native = {id(each.native_calls): each.native_calls[0] for each in calls if each.native_calls is not None}
        return sum(each.bound for each in calls) + sum(native.values())

    def on_default_streams(self) -> bool:
        """Return whether this thread's current stream is the default one on each GPU that was used."""
        return all(on_default_stream(ordinal) for ordinal in list(self._handles))

    def cached_calls(self) -> dict[tuple[Any, ...], CachedCall]:
        """Return what becomes of calls, by all that it depends on, with the layer's name at the end."""
        return dict(list(self._calls.items()))

    def looked_up_calls(self) -> int:
        """Return how many kernels ran in the longer way, which looks their plan up."""
        return sum(each.looked_up for each in self._all_calls())

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
        """Return what aten::_convolution returns.

        It is one long function because each call of another one takes time.
        """
        name = self.names.of(weight) if self.names.any else ""
        geometry = (tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)
        ordinal = x.get_device()
        # All that the outcome depends on. Strides tell the memory format.
        key = (
            x.shape, x.stride(), x.dtype, ordinal, weight.shape, weight.stride(), weight.dtype, weight.get_device(),
            None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.get_device()),
            geometry, deterministic, enabled if ordinal >= 0 else cpu_settings(), allow_tf32, name,
        )  # fmt: skip
        call = self._calls.get(key)
        if call is None:
            flags = Flags(allow_tf32, deterministic, enabled)
            kernel_call_of = partial(self._kernel_call, name, ordinal)
            fused_call_of = None if ordinal < 0 else partial(self._fused_call, name, ordinal)
            call = forward_call(x, weight, bias, Geometry(*geometry), flags, kernel_call_of, fused_call_of)
            if call.output is not None:
                self._owners.note(call.output.problem)
            self._keep(key, call)
        kernel = call.output
        if kernel is not None:
            near, filters = x, weight
            if call.format is not None:
                near, filters = x.contiguous(memory_format=call.format), weight.contiguous(memory_format=call.format)
            out, fused = kernel.form.new(), call.fused
            if fused is not None and fused.run(near, filters, out, bias):
                return out if call.output_strides is None else restrided(out, call.output_strides)
            if kernel.run(out, filters, near) if transposed else kernel.run(near, filters, out):
                if bias is not None:
                    out.add_(alias(bias, *call.bias_as))
                return out if call.output_strides is None else restrided(out, call.output_strides)
            del out, near, filters  # the kernel may have failed because memory is short
        else:
            self._leave(call)
        baseline = partial(
            self.aten.forward, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups,
            benchmark, deterministic, enabled, allow_tf32,
        )  # fmt: skip
        return baseline() if kernel is None else self.fallbacks.run(ordinal, baseline)

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
        now: list[bool] | None = None,
    ) -> Gradients:
        """Return what aten::convolution_backward returns; with `now`, only these of the gradients in the mask.

        A gradient has the same plan whether or not the others are computed in the same call.
        """
        name = self.names.of(weight) if self.names.any else ""
        geometry = (tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)
        ordinal = x.get_device()
        deterministic = cudnn_deterministic() or all_deterministic()
        enabled, precision = cudnn_enabled(), precision_of("cuda", "conv")
        key = (
            grad.shape, grad.stride(), grad.dtype, grad.get_device(), x.shape, x.stride(), x.dtype, ordinal,
            weight.shape, weight.stride(), weight.dtype, weight.get_device(),
            geometry, tuple(output_mask), deterministic, enabled if ordinal >= 0 else cpu_settings(), precision, name,
        )  # fmt: skip
        call = self._calls.get(key)
        if call is None:
            flags = Flags(precision == "tf32", deterministic, enabled)
            kernel_call_of = partial(self._kernel_call, name, ordinal)
            call = backward_call(grad, x, weight, Geometry(*geometry), output_mask, flags, kernel_call_of)
            self._keep(key, call)
        if call.reason:
            self._leave(call)
        else:
            found = _gradients(call, grad, x, weight, transposed, output_mask if now is None else now)
            if found is not None:
                return found
        baseline = partial(
            self.aten.backward,
            *(grad, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups),
            output_mask if now is None else now,
        )
        return baseline() if call.reason else self.fallbacks.run(ordinal, baseline)

    def _all_calls(self) -> list[PlannedCall]:
        return [*list(self._kernel_calls.values()), *list(self._fused_calls.values())]

    def _keep(self, key: tuple[Any, ...], call: CachedCall) -> None:
        self._calls[key] = call
        if not call.reason and call.lies_as_computed:  # the gate takes no others
            self.has_unlent = True

    def _leave(self, call: CachedCall) -> None:
        """Count a call that is left to PyTorch as it is; refuse it if PyTorch would compute it past the limit."""
        if call.reason == ONE_DIMENSION:  # by cuDNN
            self.fallbacks.refuse(call.reason)
        self.fallbacks.add(call.reason)

    def _kernel_call(self, layer: str, ordinal: int, problem: ConvolutionProblem, later_bytes: int) -> KernelCall:
        key, known = (problem, layer, ordinal, later_bytes), self._kernel_calls
        # Another thread may be faster.
        return known.get(key) or known.setdefault(key, KernelCall(problem, layer, ordinal, self, later_bytes))

    def _fused_call(self, layer: str, ordinal: int, problem: ConvolutionProblem) -> FusedCall:
        key, known = (problem, layer, ordinal), self._fused_calls
        return known.get(key) or known.setdefault(key, FusedCall(*key, self))

    def handle(self, ordinal: int) -> Handle:
        """Return the handle of the current GPU, given its number, which is opened first if necessary."""
        handle = self._handles.get(ordinal)
        if handle is None:
            with self._lock:
                handle = self._handles.get(ordinal) or self._open_handle(ordinal)
                self._handles[ordinal] = handle
        return handle


def _gradients(
    call: CachedCall, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, transposed: bool, wanted: list[bool]
) -> Gradients | None:
    """Return those gradients of input, weight and bias that are wanted, or None if a kernel fails."""
    form = call.format
    grad_bias = grad.sum(dim=[0, *range(2, grad.dim())]) if wanted[2] else None
    if form is not None:
        grad = grad.contiguous(memory_format=form)
    grad_x, grad_weight = None, None
    kernel, later = call.weight_gradient, call.input_gradient
    # This one is first, because its workspace may use the memory that the other gradient gets afterwards.
    if kernel is not None and wanted[1]:
        near = x if form is None else x.contiguous(memory_format=form)
        grad_weight = kernel.form.new()
        if not (kernel.run(grad, grad_weight, near) if transposed else kernel.run(near, grad_weight, grad)):
            return None
    if later is not None and wanted[0]:
        grad_x = later.form.new()
        near = weight if form is None else weight.contiguous(memory_format=form)
        if not (later.run(grad, near, grad_x) if transposed else later.run(grad_x, near, grad)):
            return None
    of_x, of_weight = call.gradient_strides
    return (
        grad_x if grad_x is None or of_x is None else restrided(grad_x, of_x),
        grad_weight if grad_weight is None or of_weight is None else restrided(grad_weight, of_weight),
        grad_bias,
    )
