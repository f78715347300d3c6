"""Workspace reuse (WR): each kernel gets its fastest configuration within a limit of its own (paper, section 3.2)."""

from bisect import bisect_right
from collections.abc import Sequence

from ucudnn.configuration import Configuration


def fastest_within(desirable: Sequence[Configuration], limit_bytes: int) -> Configuration | None:
    """Return the fastest configuration whose workspace is within the limit, or None where none is.

    The paper's dynamic program for one limit is a look-up in the desirable set, which is in order of workspace and
    holds its answer for every limit.
    """
    index = bisect_right(desirable, limit_bytes, key=lambda configuration: configuration.workspace_bytes)
    return desirable[index - 1] if index else None
