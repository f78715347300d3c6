"""A segment: the part of a divided workspace that one kernel, or one branch of kernels, owns (WD)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of the workspace.

    Segments of one set are disjoint, because its kernels may run at the same time. Segments of different sets overlap,
    because the sets take turns.

    Attributes:
        set_index: number of the set.
        branch: number of the branch in the set; the kernels of a branch run one after another in its segment.
        offset_bytes: where the segment begins.
        size_bytes: its size.
    """

    set_index: int
    branch: int
    offset_bytes: int
    size_bytes: int
