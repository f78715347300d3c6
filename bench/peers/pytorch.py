"""PyTorch as a peer: its convolutions on tensors of a backend, on the stream of all measurements.

PyTorch chooses by `torch.backends.cudnn.benchmark`: at the first call of a problem, it measures the algorithms that
cuDNN's heuristics offer. It has no workspace limit. It allocates its outputs and workspaces itself, as in any program.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from ucudnn.problem import ConvolutionProblem, MathMode, Operation


class TorchPeer:
    """PyTorch on one device.

    Args:
        device: number of the GPU; None for the CPU.

    Raises:
        ImportError: if PyTorch is not installed.
        RuntimeError: if it cannot use the GPU.
    """

    def __init__(self, device: int | None) -> None:
        self._torch = torch = import_module("torch")
        self._device = torch.device("cpu") if device is None else torch.device("cuda", device)
        torch.backends.cudnn.benchmark = True
        # This call loads cuDNN and makes its handle, so that the first problem's planning time does not include that.
        torch.conv2d(torch.zeros(1, 8, 8, 8, device=self._device), torch.zeros(8, 8, 3, 3, device=self._device))

    def conditions(self) -> dict[str, str]:
        """Return the versions of PyTorch and of its cuDNN, and the largest number of algorithms that it tries."""
        cudnn = self._torch.backends.cudnn
        return {
            "torch": str(self._torch.__version__),
            "torch cudnn": str(cudnn.version()),
            "torch cudnn.benchmark_limit": str(cudnn.benchmark_limit),
        }

    @contextmanager
    def on_stream(self, address: int | None) -> Iterator[None]:
        """Queue on the stream at an address inside the block, without gradients.

        PyTorch adopts CuPy's current stream. So the work of both runs in order, and CuPy's events enclose PyTorch's
        kernels like all others. The address must not be 0, the null stream, for which ExternalStream gives another
        stream.

        Raises:
            ValueError: if the address is 0.
        """
        torch = self._torch
        with torch.inference_mode():
            if address is None:
                yield
                return
            if not address:
                raise ValueError("PyTorch cannot adopt the null stream")
            with torch.cuda.stream(torch.cuda.ExternalStream(address, device=self._device)):
                yield

    def call(self, problem: ConvolutionProblem, arrays: Sequence[Any]) -> Callable[[], Any]:
        """Return a function that computes a problem and returns its output, (N, C, spatial...) or (K, C, kernel...).

        Args:
            problem: the problem; its math mode is PyTorch's until the next call of this method.
            arrays: x, w and y in the problem's layout, of NumPy or CuPy; the output array is not used.
        """
        torch = self._torch
        torch.backends.cudnn.allow_tf32 = problem.math is MathMode.TF32
        x, w, y = (self._view(array, problem) for array in arrays)
        stride, padding, dilation = (list(each) for each in (problem.stride, problem.padding, problem.dilation))
        geometry = (stride, padding, dilation, False, [0] * len(stride), problem.groups)
        if problem.operation is Operation.FORWARD:
            return partial(torch.convolution, x, w, None, *geometry)
        wanted = 0 if problem.operation is Operation.BACKWARD_DATA else 1
        mask = [wanted == index for index in range(3)]
        backward = partial(torch.ops.aten.convolution_backward.default, y, x, w, None, *geometry, mask)
        return lambda: backward()[wanted]

    def arranged(self, output: Any, problem: ConvolutionProblem) -> Any:
        """Return an output in the problem's layout, dense, as NumPy and CuPy can take it."""
        return (output.movedim(1, -1) if problem.layout.channels_last else output).contiguous()

    def workspace_bytes(self, call: Callable[[], Any]) -> int | None:
        """Return the most bytes that a call holds besides its output, with copies; None on the CPU."""
        if self._device.type == "cpu":
            return None
        cuda = self._torch.cuda
        cuda.reset_peak_memory_stats()
        output = call()
        held_bytes = int(cuda.max_memory_allocated() - cuda.memory_allocated())
        del output
        return held_bytes

    def release(self) -> None:
        """Give unused memory of PyTorch back to the GPU."""
        if self._device.type == "cuda":
            self._torch.cuda.empty_cache()

    def _view(self, array: Any, problem: ConvolutionProblem) -> Any:
        """Return a tensor over an array's memory whose shape has the channels second, wherever they lie in memory."""
        tensor = self._torch.as_tensor(array, device=self._device)  # no copy, by __cuda_array_interface__ on a GPU
        interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
        if tensor.data_ptr() != interface["data"][0]:
            raise RuntimeError("PyTorch copied an operand, which was to stay where it is")
        if not problem.layout.channels_last:
            return tensor
        tensor = tensor.movedim(-1, 1)
        last = {4: self._torch.channels_last, 5: self._torch.channels_last_3d}.get(tensor.dim())
        if last is not None and not tensor.is_contiguous(memory_format=last):
            raise RuntimeError(f"a view of shape {tuple(tensor.shape)} is not channels_last")
        return tensor
