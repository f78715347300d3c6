"""Calls that take arrays: the problem is read from their shapes, and the one that takes a problem computes it."""

from abc import ABC, abstractmethod
from typing import Unpack

from ucudnn.arrays import ArrayLike, BiasedFilters, Parameters, ProblemCache, with_bias
from ucudnn.backends.base import Spare, Tensor
from ucudnn.errors import InvalidProblemError
from ucudnn.problem import ConvolutionProblem, Operation

__all__ = ["ArrayCalls"]


class ArrayCalls(ABC):
    """The three operations on arrays, for whatever computes problems."""

    _problems: ProblemCache

    @abstractmethod
    def convolve(
        self,
        problem: ConvolutionProblem,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        layer: str = "",
        spare: Spare | None = None,
        fresh: bool = False,
    ) -> None:
        """Compute out = alpha * conv + beta * out for a problem; see `ucudnn.Handle.convolve`."""

    def forward(
        self,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        layer: str = "",
        bias: ArrayLike | None = None,
        **parameters: Unpack[Parameters],
    ) -> None:
        """Compute y = alpha * conv(x, w) + beta * y, or alpha * conv(x, w) + bias (cudnnConvolutionForward).

        Args:
            x: input, shape (N, C, spatial...), or (N, spatial..., C) for a channels-last layout such as 'NHWC'.
            w: filters, shape (K, C / groups, kernel...), or (K, kernel..., C / groups).
            y: output, shape (N, K, output...), or (N, output..., K).
            alpha: factor of the convolution.
            beta: factor of what y holds; at 0, y is not read.
            layer: name of the layer.
            bias: one number for each filter, of the type of y; None for none. Algorithms that add it themselves are
                measured beside those after which another kernel adds it.
            **parameters: padding, stride, dilation, groups, layout, math ('tf32' or 'fma'), deterministic.

        Raises:
            InvalidProblemError: if the arrays do not fit together, or if there is a bias and beta is not 0.
            UcudnnError: as `convolve`.
        """
        problem = self._problems.problem_of(Operation.FORWARD, x, w, y, **parameters)
        if bias is not None:
            if beta:
                raise InvalidProblemError(f"beta is {beta}, but a bias is not added to what y holds: leave one out")
            problem, w = with_bias(problem, bias), BiasedFilters(w, bias)
        self.convolve(problem, x, w, y, alpha=alpha, beta=beta, layer=layer)

    def backward_data(
        self,
        w: Tensor,
        dy: Tensor,
        dx: Tensor,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        layer: str = "",
        **parameters: Unpack[Parameters],
    ) -> None:
        """Compute dx = alpha * (gradient of the input) + beta * dx (cudnnConvolutionBackwardData).

        Args:
            w: filters, shaped as in `forward`.
            dy: gradient of the output, shaped as y.
            dx: gradient of the input, shaped as x.
            alpha: factor of the convolution.
            beta: factor of what dx holds; at 0, dx is not read.
            layer: name of the layer.
            **parameters: as in `forward`.

        Raises:
            InvalidProblemError: if the arrays do not fit together.
            UcudnnError: as `convolve`.
        """
        problem = self._problems.problem_of(Operation.BACKWARD_DATA, dx, w, dy, **parameters)
        self.convolve(problem, dx, w, dy, alpha=alpha, beta=beta, layer=layer)

    def backward_filter(
        self,
        x: Tensor,
        dy: Tensor,
        dw: Tensor,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        layer: str = "",
        **parameters: Unpack[Parameters],
    ) -> None:
        """Compute dw = alpha * (gradient of the filters) + beta * dw (cudnnConvolutionBackwardFilter).

        Args:
            x: input, shaped as in `forward`.
            dy: gradient of the output, shaped as y.
            dw: gradient of the filters, shaped as w.
            alpha: factor of the convolution.
            beta: factor of what dw holds, applied once; at 0, dw is not read.
            layer: name of the layer.
            **parameters: as in `forward`.

        Raises:
            InvalidProblemError: if the arrays do not fit together.
            UcudnnError: as `convolve`.
        """
        problem = self._problems.problem_of(Operation.BACKWARD_FILTER, x, dw, dy, **parameters)
        self.convolve(problem, x, dw, dy, alpha=alpha, beta=beta, layer=layer)
