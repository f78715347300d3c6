"""What a backend is told to begin with, before it is asked for it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from ucudnn.problem import ConvolutionProblem


@final
class Ahead(NamedTuple):
    """What measuring a problem will ask for.

    Attributes:
        problem: the mini-batch.
        sizes: micro-batch sizes.
        limit_bytes: workspace.
        promises: whether an algorithm is worth compiling; asked by other threads, too.
    """

    problem: ConvolutionProblem
    sizes: Sequence[int]
    limit_bytes: int
    promises: Callable[[str], bool] = bool
