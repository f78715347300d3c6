"""Candidates: the algorithms of cuDNN that a plan may choose from, measured now or recorded."""

from enum import Enum

from ucudnn.problem import ConvolutionProblem, DataType, MathMode

_TRANSFORMS = frozenset({"FFT", "FFT_TILING", "WINOGRAD_NONFUSED"})

GATHERED = "+gathered"
"""The end of the name of an algorithm that convolves a copy of those samples of x that strides read."""


class Candidates(Enum):
    """Which algorithms of cuDNN are candidates.

    GRAPH: engine configurations of cuDNN's graph API, on x or on a copy of what strides read of x.
    LEGACY: algorithms of `cudnnConvolution*`. LEGACY_FMA: the same without TF32.
    EVERY: all algorithms of cuDNN that the problem's math mode allows.
    BEST: GRAPH, and for float32 without TF32 also the legacy algorithms that transform their operands (FFT, Winograd).
    The graph API lacks these. They are up to twice as fast there, and slower than tensor cores.
    GRAPH_PLAIN, BEST_PLAIN: the same without copies.
    """

    BEST = "best"
    GRAPH = "graph"
    LEGACY = "legacy"
    LEGACY_FMA = "legacy-fma"
    EVERY = "every"
    BEST_PLAIN = "best-plain"
    GRAPH_PLAIN = "graph-plain"

    def offers(self, api: str, problem: ConvolutionProblem, algorithm: str | None = None) -> bool:
        """Whether an algorithm of an API is a candidate for a problem; for None, whether any algorithm may be."""
        if not self.gathers and algorithm is not None and algorithm.endswith(GATHERED):
            return False
        if self is Candidates.EVERY:
            return True
        if self not in (Candidates.BEST, Candidates.BEST_PLAIN):
            return api == str(self.value).partition("-")[0]
        if api == "graph":
            return True
        without_tf32 = problem.dtype is DataType.FLOAT32 and problem.math is MathMode.FMA
        return without_tf32 and (algorithm is None or algorithm.removesuffix(GATHERED) in _TRANSFORMS)

    @property
    def gathers(self) -> bool:
        """Whether algorithms that convolve a copy are candidates."""
        return self in (Candidates.BEST, Candidates.GRAPH)

    @property
    def plain(self) -> "Candidates":
        """The same candidates without algorithms that convolve a copy."""
        return Candidates(f"{self.value}-plain") if self.gathers else self
