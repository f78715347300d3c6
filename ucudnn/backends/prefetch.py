"""What a backend is told to begin with, before it is asked for it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from ucudnn.problem import ConvolutionProblem

Promises = Callable[[str], bool]
"""Whether an algorithm is worth compiling, by its name; `bool` where all are. Threads ask it, too."""


@final
class Ahead(NamedTuple):
    """What measuring a problem will ask for.

    Attributes:
        problem: the mini-batch.
        sizes: micro-batch sizes.
        limit_bytes: workspace.
        promises: of its algorithms.
    """

    problem: ConvolutionProblem
    sizes: Sequence[int]
    limit_bytes: int
    promises: Promises = bool
