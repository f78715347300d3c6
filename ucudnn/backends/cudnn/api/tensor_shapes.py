"""A problem's sizes and strides as cuDNN takes them: in the order N, C, spatial, in two or three spatial dimensions."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from ucudnn.problem import ConvolutionProblem

Dimensions = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShapes:
    """Sizes and strides of the three tensors, and the parameters of the convolution.

    cuDNN has no 1-D convolutions, so they become 2-D convolutions of height 1. Sizes are N, C, spatial of x, K,
    C / groups, kernel of w, N, K, output of y, and 1, K, ones of the bias. Strides are in elements; those of the bias
    are dense and in the layout of y. There is zero padding before x and, as post_padding, after it.
    """

    x: Dimensions
    w: Dimensions
    y: Dimensions
    bias: Dimensions
    padding: tuple[int, ...]
    post_padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]


def shapes_of(problem: ConvolutionProblem) -> TensorShapes:
    """Return a problem's sizes and strides as cuDNN takes them."""
    flat = len(problem.spatial) == 1
    one, zero = ((1,), (0,)) if flat else ((), ())
    last = problem.layout.channels_last
    x = (problem.batch, problem.channels, *one, *problem.spatial)
    w = (problem.filters, problem.channels // problem.groups, *one, *problem.kernel)
    y = (problem.batch, problem.filters, *one, *problem.output)
    bias = (1, problem.filters, *(1,) * (len(y) - 2))
    return TensorShapes(
        x=(x, (problem.x_batch_stride, *_inner_strides(x[1:], last, problem.x_channel_stride))),
        w=(w, (problem.w_sample, *_inner_strides(w[1:], last))),
        y=(y, (problem.y_batch_stride, *_inner_strides(y[1:], last, problem.y_channel_stride))),
        bias=(bias, (problem.filters, *_inner_strides(bias[1:], last))),
        padding=(*zero, *problem.padding),
        post_padding=(*zero, *(after for _, after in problem.paddings)),
        stride=(*one, *problem.stride),
        dilation=(*one, *problem.dilation),
    )


def _inner_strides(sizes: Sequence[int], channels_last: bool, channel_stride: int = 0) -> tuple[int, ...]:
    """Return the strides of channels and spatial dimensions, dense in the layout's order but for channel gaps."""
    channels, *spatial = sizes
    ordered = [*spatial, channels] if channels_last else [channels, *spatial]
    strides = list(accumulate(reversed(ordered[1:]), mul, initial=1))[::-1]
    return (strides[-1], *strides[:-1]) if channels_last else (channel_stride or strides[0], *strides[1:])
