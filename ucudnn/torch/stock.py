"""PyTorch's own convolution kernels, timed beside ours, with the memory that they take (on GPUs)."""

from collections.abc import Callable
from statistics import median
from typing import Any, final

import torch

from ucudnn.problem import ConvolutionProblem, MathMode, Operation
from ucudnn.torch.kernels import keys_of
from ucudnn.torch.problems import DTYPES, format_of, shapes_of

_WARMUP = 2  # torch.backends.cudnn.benchmark measures in the first call


@final
class Stock:
    """PyTorch's own kernels on the current GPU.

    Args:
        forward: that of aten::_convolution.
        backward: that of aten::convolution_backward.
    """

    def __init__(self, forward: Any, backward: Any) -> None:
        self._forward = forward
        self._backward = backward

    def measure(self, problem: ConvolutionProblem, repeats: int) -> tuple[float, int]:
        """Return the median milliseconds of a call, and the bytes that it takes besides its output.

        That is under what `torch.backends.cudnn.benchmark` says now. It resets PyTorch's statistics of peak memory.

        Raises:
            RuntimeError: if PyTorch cannot compute it, or memory has no room for it.
        """
        run = self._call(problem)
        with torch.no_grad():
            for _ in range(_WARMUP):
                run()
            torch.cuda.reset_peak_memory_stats()
            output = run()
            held = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
            del output
            return median(_elapsed_ms(run) for _ in range(repeats)), held

    def _call(self, problem: ConvolutionProblem) -> Callable[[], Any]:
        x, w, y = (self._operand(problem, *shape) for shape in shapes_of(problem))
        keys, groups = keys_of("CUDA"), problem.groups
        lists = [list(each) for each in (problem.stride, problem.padding, problem.dilation)]
        geometry = (*lists, False, [0] * len(problem.spatial), groups)
        if problem.operation is Operation.FORWARD:
            flags = (
                torch.backends.cudnn.benchmark,
                problem.deterministic,
                True,
                problem.math is MathMode.TF32,
            )
            return lambda: self._forward.call_boxed(keys, x, w, None, *geometry, *flags)
        data = problem.operation is Operation.BACKWARD_DATA
        mask = [data, not data, False]
        return lambda: self._backward.call_boxed(keys, y, x, w, None, *geometry, mask)

    @staticmethod
    def _operand(problem: ConvolutionProblem, *shape: int) -> torch.Tensor:
        made = torch.empty(shape, dtype=DTYPES[problem.dtype], device="cuda", memory_format=format_of(problem))
        return made.uniform_(-0.5, 0.5)


def _elapsed_ms(run: Callable[[], Any]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
