"""Candidates: which of cuDNN's algorithms a plan may choose from, live or replayed."""

from enum import Enum


class Candidates(Enum):
    """Where algorithms may come from.

    GRAPH: engine configurations of cuDNN's graph API; LEGACY: algorithms of `cudnnConvolution*`; LEGACY_FMA:
    the same without TF32; EVERY: all that the problem's math mode allows.
    """

    GRAPH = "graph"
    LEGACY = "legacy"
    LEGACY_FMA = "legacy-fma"
    EVERY = "every"

    @property
    def api(self) -> str | None:
        """The cuDNN API that candidates must come from, or None for any."""
        return None if self is Candidates.EVERY else self.value.removesuffix("-fma")
