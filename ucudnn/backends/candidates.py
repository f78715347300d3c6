"""Candidates: which of cuDNN's algorithms a plan may choose from, live or replayed."""

from enum import Enum

from ucudnn.problem import ConvolutionProblem, DataType, MathMode

_TRANSFORMS = frozenset({"FFT", "FFT_TILING", "WINOGRAD_NONFUSED"})


class Candidates(Enum):
    """Where algorithms may come from.

    GRAPH: engine configurations of cuDNN's graph API; LEGACY: algorithms of `cudnnConvolution*`; LEGACY_FMA:
    the same without TF32; EVERY: all that the problem's math mode allows; BEST: the graph API's and, for float32
    without TF32, those of LEGACY that transform their operands, by Fourier's or Winograd's method. The graph API does
    not offer them, and they are up to twice as fast there; to tensor cores they lose.
    """

    BEST = "best"
    GRAPH = "graph"
    LEGACY = "legacy"
    LEGACY_FMA = "legacy-fma"
    EVERY = "every"

    def offers(self, api: str, problem: ConvolutionProblem, algorithm: str | None = None) -> bool:
        """Whether an algorithm of an API is a candidate for a problem; without a name, whether any may be."""
        if self is Candidates.EVERY:
            return True
        if self is not Candidates.BEST:
            return api == str(self.value).removesuffix("-fma")
        if api == "graph":
            return True
        without_tf32 = problem.dtype is DataType.FLOAT32 and problem.math is MathMode.FMA
        return without_tf32 and (algorithm is None or algorithm in _TRANSFORMS)
