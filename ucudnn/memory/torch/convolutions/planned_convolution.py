"""A convolution of a fitted step, computed with exactly the configuration that a plan chose for it."""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from ucudnn.backends.base import Buffer, ComputeBackend
from ucudnn.bounded import BoundedDict
from ucudnn.errors import BackendError
from ucudnn.execution.plan import Plan
from ucudnn.memory.torch.convolutions.step_kernel import StepKernel
from ucudnn.torch.calls.kernel_call import array_of

_PLACES = {None: ((0, 1), (0, 1, 2)), 0: ((0, 2), (2, 1, 0)), 1: ((0, 1), (1, 2, 0))}
"""By the result: which arguments a kernel is given, and where x, w and y of the problem are among these and the output.

For a transposed convolution x and y change places.
"""
_MOST_BOUND = 32  # a step gives the same few addresses again


@final
class PlannedConvolution:
    """Takes the arguments of PyTorch's operator and returns what it returns; recomputation calls the same object.

    The workspace is allocated for each call, by PyTorch, and freed at its end. No other algorithm ever takes the place
    of the plan's, because neither the workspace nor the bits would be those of the plan.
    """

    def __init__(self, kernel: StepKernel, plan: Plan, backend: ComputeBackend, device: torch.device) -> None:
        self.kernel, self.plan = kernel, plan
        self.calls = 0
        self._backend = backend
        self._on_gpu = device.type == "cuda"
        self._copies, self._format = bool(kernel.copied), kernel.memory_format
        self._form = kernel.output.shape, kernel.output.stride
        self._options: dict[str, Any] = {"dtype": kernel.output.dtype, "device": device}
        spatial = len(kernel.output.shape) - 2
        self._bias_shape = -1, *[1] * spatial
        self._summed = None if kernel.bias is None else [0, *range(2, 2 + spatial)]
        self._alignment = kernel.problem.alignment - 1
        self._bound: BoundedDict[tuple[int, ...], tuple[Callable[[], None], ...]] = BoundedDict(_MOST_BOUND)
        self._given, places = _PLACES[kernel.result]
        self._places = places[::-1] if kernel.transposed else places

    def __str__(self) -> str:
        """Return the name that generated code gives it."""
        return f"ucudnn.{self.kernel.name}"

    def __call__(self, *args: Any) -> Any:
        """Compute the operation from the arguments of aten::convolution or aten::convolution_backward.

        Raises:
            BackendError: if the configuration fails.
            MemoryError: if the device has no room for its workspace.
        """
        self.calls += 1
        first, second = self._given
        tensors = args[first], args[second]
        if self._copies:
            tensors = tuple(each.contiguous(memory_format=self._format) for each in tensors)
        out = torch.empty_strided(*self._form, **self._options)
        operands = *tensors, out
        x, w, y = self._places
        self._compute(operands[x], operands[w], operands[y])
        result = self.kernel.result
        if result is None:
            return out if args[2] is None else out.add_(args[2].view(self._bias_shape))
        if result == 0:
            return out, None, None
        return None, out, None if self._summed is None else tensors[0].sum(dim=self._summed)

    def _compute(self, x: Tensor, w: Tensor, y: Tensor) -> None:
        if self._on_gpu:
            self._launch(x.data_ptr(), w.data_ptr(), y.data_ptr())
            return
        workspace = torch.empty_strided((self.plan.workspace_bytes,), (1,), dtype=torch.uint8)
        array_x, array_w, array_y = (array_of(each, self.kernel.problem) for each in (x, w, y))
        with self._backend.lock:
            self.plan.launch(array_x, array_w, array_y, workspace.numpy())

    def _launch(self, x: int, w: int, y: int) -> None:
        if (x | w | y) & self._alignment:
            raise BackendError(
                f"{self.kernel.name}: an address is no multiple of {self._alignment + 1} bytes, as those of the sample"
                " were: fit the step again"
            )
        backend, plan = self._backend, self.plan
        with backend.lock:
            queue = backend.queue()
            workspace: Buffer = backend.allocate(plan.workspace_bytes)
            if queue and backend.capturing(queue):  # the null stream cannot be captured
                plan.launch(x, w, y, workspace)
                return
            key = x, w, y, workspace.address, queue
            calls = self._bound.get(key)
            if calls is None:
                calls = self._bound[key] = plan.bind(x, w, y, backend.without_owner(workspace))
            for call in calls:
                call()
