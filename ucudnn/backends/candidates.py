"""Candidates: which of cuDNN's algorithms a plan may choose from, live or replayed."""

from enum import Enum

from ucudnn.problem import ConvolutionProblem, DataType, MathMode

_TRANSFORMS = frozenset({"FFT", "FFT_TILING", "WINOGRAD_NONFUSED"})

GATHERED = "+gathered"
"""How algorithms are named that convolve a copy of what strides read of x, see `backends.cudnn.gathered`."""


class Candidates(Enum):
    """Where algorithms may come from.

    GRAPH: engine configurations of cuDNN's graph API, of x or of a copy of what strides read of it; LEGACY: algorithms
    of `cudnnConvolution*`; LEGACY_FMA: the same without TF32; EVERY: all of cuDNN that the problem's math mode allows;
    BEST: those of GRAPH and, for float32 without TF32, those of LEGACY that transform their operands, by Fourier's or
    Winograd's method. The graph API does not offer them, and they are up to twice as fast there; to tensor cores they
    lose. GRAPH_PLAIN, BEST_PLAIN: the same without copies.
    """

    BEST = "best"
    GRAPH = "graph"
    LEGACY = "legacy"
    LEGACY_FMA = "legacy-fma"
    EVERY = "every"
    BEST_PLAIN = "best-plain"
    GRAPH_PLAIN = "graph-plain"

    def offers(self, api: str, problem: ConvolutionProblem, algorithm: str | None = None) -> bool:
        """Whether an algorithm of an API is a candidate for a problem; without a name, whether any may be."""
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
        """Whether algorithms may convolve a copy of what strides read."""
        return self in (Candidates.BEST, Candidates.GRAPH)

    @property
    def plain(self) -> "Candidates":
        """The same without those."""
        return Candidates(f"{self.value}-plain") if self.gathers else self
