"""Bundles: kernels that run one after another share a segment, so they are chosen for together."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from ucudnn.configuration import Configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A configuration for each of several kernels that share a segment; time = sum, workspace = maximum.

    Attributes:
        parts: the configurations, in the order of the kernels.
        time_ms: milliseconds of all, one after another.
        workspace_bytes: bytes of the segment.
    """

    parts: tuple[Configuration, ...]
    time_ms: float
    workspace_bytes: int


def bundled(fronts: Sequence[Sequence[Configuration]]) -> tuple[Bundle, ...]:
    """Return the desirable set of kernels that share a segment, in order of workspace; no kernel's set is empty.

    Exact: within a segment, each kernel is best off with its own fastest configuration that fits, and the set changes
    only where one more configuration fits.
    """
    least = max(front[0].workspace_bytes for front in fronts)
    levels = sorted({each.workspace_bytes for front in fronts for each in front if each.workspace_bytes >= least})
    at = [0] * len(fronts)
    bundles = []
    for level in levels:
        for kernel, front in enumerate(fronts):
            while at[kernel] + 1 < len(front) and front[at[kernel] + 1].workspace_bytes <= level:
                at[kernel] += 1
        parts = tuple(front[index] for front, index in zip(fronts, at, strict=True))
        bundles.append(Bundle(parts=parts, time_ms=fsum(part.time_ms for part in parts), workspace_bytes=level))
    return tuple(bundles)
