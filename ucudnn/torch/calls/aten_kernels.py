"""PyTorch's own convolution kernels: they compute what is left to them, and are timed beside ours on GPUs."""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, final

import torch

from ucudnn.errors import BackendUnavailableError
from ucudnn.problem import ConvolutionProblem, MathMode, Operation
from ucudnn.torch.calls.problem import DTYPES, format_of, shapes_of

OPERATORS = ("_convolution", "convolution_backward")
"""The operators of aten to which all convolutions of PyTorch come, also those of TorchScript."""

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Of input, weight and bias; None if a gradient is not wanted."""

_WARMUP = 2  # torch.backends.cudnn.benchmark measures in the first call


@final
class AtenKernels:
    """PyTorch's own kernels of OPERATORS, for the dispatch key 'CUDA' or 'CPU'.

    Raises:
        BackendUnavailableError: if PyTorch is too old.
    """

    def __init__(self, key: str) -> None:
        if not hasattr(torch.library, "get_kernel"):
            raise BackendUnavailableError(f"PyTorch {torch.__version__} is too old: 2.10 is the first that will do")
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        forward, backward = (torch.library.get_kernel(f"aten::{name}", key) for name in OPERATORS)
        self.forward: Callable[..., torch.Tensor] = partial(forward.call_boxed, keys)
        self.backward: Callable[..., Gradients] = partial(backward.call_boxed, keys)

    def measure(self, problem: ConvolutionProblem, repeats: int) -> tuple[float, int]:
        """Return the median time of a call on the current GPU in milliseconds, and its memory besides the output.

        The call obeys the present value of `torch.backends.cudnn.benchmark`. It resets PyTorch's statistics of peak
        memory.

        Raises:
            RuntimeError: if PyTorch cannot compute the problem, or has not enough memory.
        """
        run = self._call(problem)
        with torch.no_grad():
            for _ in range(_WARMUP):
                run()
            torch.cuda.reset_peak_memory_stats()
            output = run()
            held = held_bytes()
            del output
            return median(_elapsed_ms(run) for _ in range(repeats)), held

    def _call(self, problem: ConvolutionProblem) -> Callable[[], Any]:
        made = partial(torch.empty, dtype=DTYPES[problem.dtype], device="cuda", memory_format=format_of(problem))
        x, w, y = (made(shape).uniform_(-0.5, 0.5) for shape in shapes_of(problem))
        lists = [list(each) for each in (problem.stride, problem.padding, problem.dilation)]
        geometry = (*lists, False, [0] * len(problem.spatial), problem.groups)
        if problem.operation is Operation.FORWARD:
            flags = (torch.backends.cudnn.benchmark, problem.deterministic, True, problem.math is MathMode.TF32)
            bias = x.new_zeros(problem.filters) if problem.biased else None
            return lambda: self.forward(x, w, bias, *geometry, *flags)
        data = problem.operation is Operation.BACKWARD_DATA
        mask = [data, not data, False]
        return lambda: self.backward(y, x, w, None, *geometry, mask)


def held_bytes() -> int:
    """Return by how many bytes the peak of requested memory exceeds what is requested now.

    The peak counts since it was last reset. Requested bytes are exact; an allocated block may be up to 1 MiB larger.
    """
    stats = torch.cuda.memory_stats()
    return int(stats["requested_bytes.all.peak"] - stats["requested_bytes.all.current"])


def _elapsed_ms(run: Callable[[], Any]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
