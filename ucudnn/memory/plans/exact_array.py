"""Arrays of bytes whose sums are exact, however large a file says that its storages are."""

from collections.abc import Sequence
from typing import Any

_MOST = 2**61  # so that a sum of two such sums has 64 bits


def exact_array(values: Sequence[int]) -> Any:
    """Return an array of whole numbers: of 64 bits where no sum of them can exceed these, else of Python's own."""
    import numpy as np  # commands that plan nothing do without it

    return np.array(values, dtype=np.int64 if sum(map(abs, values)) < _MOST else object)
