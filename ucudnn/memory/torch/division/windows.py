"""Window: which rows of an operator's argument belong to rows of its result, where these differ."""

from dataclasses import dataclass
from typing import final

Rows = tuple[int, int]
"""The first row, and the one behind the last."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """How the rows of a coarse axis, as a convolution's output, belong to those of a fine one, as its input.

    Row o belongs to the rows from o * stride - padding to that + reach. An operator that is given the rows from o to p,
    with its own padding, has the rows from o * stride to p * stride + tail on the fine axis. The padding is that of the
    volume at its ends alone. Elsewhere it makes rows at the edges wrong, which nobody reads.

    Attributes:
        fine: rows of the fine axis.
        coarse: rows of the coarse axis.
        is_padded: whether rows of the fine axis beyond its ends are given as zeros, and the operator pads none.
    """

    fine: int
    coarse: int
    stride: int
    padding: int
    reach: int
    tail: int
    is_padded: bool = False

    def to_coarse(self, first: int, stop: int) -> tuple[Rows, Rows]:
        """Return the coarse and the fine rows of an operator that makes rows of the coarse axis right."""
        begin, end = first * self.stride - self.padding, (stop - 1) * self.stride - self.padding + self.reach + 1
        if self.is_padded:
            return (first, stop), (begin, end)
        return self._up_to(max(0, min(first, begin // self.stride)), stop, min(end, self.fine))

    def to_fine(self, first: int, stop: int) -> tuple[Rows, Rows]:
        """Return the coarse and the fine rows of an operator that makes rows of the fine axis right."""
        begin = max(0, min(first // self.stride, -((self.reach - self.padding - first) // self.stride)))
        return self._up_to(begin, max(begin + 1, min(self.coarse, (stop - 1 + self.padding) // self.stride + 1)), stop)

    def _up_to(self, begin: int, end: int, stop: int) -> tuple[Rows, Rows]:
        while end < self.coarse and end * self.stride + self.tail < stop:
            end += 1
        fine_end = self.fine if end == self.coarse else end * self.stride + self.tail
        return (begin, end), (begin * self.stride, fine_end)
