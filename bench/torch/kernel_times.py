"""Times of a program's kernels, by marks around their calls. Not a script."""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from bench.torch.network_times import Clock
from ucudnn.problem import ConvolutionProblem
from ucudnn.torch.calls.fused_call import FusedCall
from ucudnn.torch.calls.kernel_call import KernelCall


class KernelTimes:
    """Times each kernel that a program computes by a plan in Python, in the steps that are taken here.

    Attributes:
        calls: number of calls of each kernel in a step, once a step was timed.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: dict[ConvolutionProblem, list[tuple[Any, Any]]] = {}
        self._is_on = False
        self._called: Callable[[ConvolutionProblem, float], None] | None = None
        self._seen: set[ConvolutionProblem] = set()
        self.calls: dict[ConvolutionProblem, int] = {}
        KernelCall.run = self._timed(KernelCall.run)  # type: ignore[method-assign]
        FusedCall.run = self._timed(FusedCall.run)  # type: ignore[method-assign]

    def take(self, step: Callable[[], Any], steps: int) -> dict[ConvolutionProblem, float]:
        """Take steps, and return the milliseconds of each kernel in a step, by the median of its calls."""
        self._marks.clear()
        self._is_on = True
        for _ in range(steps):
            step()
        self._is_on = False
        self.calls = {problem: len(marks) // steps for problem, marks in self._marks.items()}
        return {
            problem: median(self._clock.between_ms(list(pair))[0] for pair in marks) * len(marks) / steps
            for problem, marks in self._marks.items()
        }

    def first_calls(self, step: Callable[[], Any], called: Callable[[ConvolutionProblem, float], None]) -> None:
        """Take a step, and tell how many milliseconds the first call of each kernel takes, before the next call.

        It computes twice, because the first time may load code.
        """
        self._seen.clear()
        self._called = called
        try:
            step()
        finally:
            self._called = None

    def _timed(self, run: Callable[..., bool]) -> Callable[..., bool]:
        def timed(call: KernelCall | FusedCall, *tensors: torch.Tensor) -> bool:
            if self._called is not None and call.problem not in self._seen:
                self._seen.add(call.problem)
                return run(call, *tensors) and self._again(self._called, run, call, *tensors)
            if not self._is_on:
                return run(call, *tensors)
            begin = self._clock.mark()
            done = run(call, *tensors)
            if done:
                self._marks.setdefault(call.problem, []).append((begin, self._clock.mark()))
            return done

        return timed

    def _again(
        self,
        called: Callable[[ConvolutionProblem, float], None],
        run: Callable[..., bool],
        call: KernelCall | FusedCall,
        *tensors: torch.Tensor,
    ) -> bool:
        """Compute a call once more, and tell how long that takes; return whether it was done."""
        begin = self._clock.mark()
        done = run(call, *tensors)
        if done:
            (time_ms,) = self._clock.between_ms([begin, self._clock.mark()])
            called(call.problem, time_ms)
        return done
