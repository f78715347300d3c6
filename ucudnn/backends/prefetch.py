"""What a backend is told to begin in the background, before measurements ask for it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from ucudnn.problem import ConvolutionProblem

Promises = Callable[[str], bool]
"""Returns whether an algorithm, given by its name, is worth compiling; `bool` if all are. Several threads call it."""


@final
class PrefetchRequest(NamedTuple):
    """The measurements of one problem that will follow."""

    problem: ConvolutionProblem
    sizes: Sequence[int]
    limit_bytes: int
    promises: Promises = bool
