"""PassRows: which rows each call of a pass computes for one part, from those that its readers need, back to the first.

A part of the mini-batch has the same samples everywhere. Slabs of the results of a segment do not overlap, but the rows
that they depend on do, the more the farther they are from the results.
"""

from typing import final

from ucudnn.memory.torch.division.segment import SegmentOrder
from ucudnn.memory.torch.division.windows import Rows
from ucudnn.memory.torch.subject.traced_values import TracedTensor


@final
class PassRows:
    """The rows of one part in a pass.

    Attributes:
        calls: the calls of the pass, in order.
        again: those among them that run again.
        held: for each storage that the part has of its own, the rows that are there.
    """

    def __init__(self, order: SegmentOrder, phase: int, level: int, number: int) -> None:
        self._order, self._number = order, number
        self.calls, self.again = order.calls_of(phase, level)
        self.held: dict[int, Rows] = {}
        self._rows: dict[int, tuple[Rows, Rows]] = {}  # of each call on the coarse and on the fine axis
        self._shares: dict[int, float] = {}
        needed: dict[int, Rows] = {}
        members = {*self.calls}
        for index in reversed(self.calls):
            self._place(index, needed, members)

    def of(self, index: int, tensor: TracedTensor) -> Rows:
        """Return the rows of an argument or result that a call is given or makes."""
        return self._rows[index][tensor in self._order.rules[index].fine]

    def axis(self, index: int, *, fine: bool) -> Rows:
        """Return the rows of a call on an axis of its window, or those of all of its tensors if it has none."""
        return self._rows[index][fine]

    def share(self, index: int) -> float:
        """Return how much of a call the part computes."""
        return self._shares[index]

    def held_share(self, storage: int) -> float:
        """Return how much of a storage the part has of its own; all of one without rows."""
        first, stop = self.held.get(storage, (0, 0))
        return (stop - first) / self._order.axes.rows(storage) if stop else 1.0

    def _place(self, index: int, needed: dict[int, Rows], members: set[int]) -> None:
        order, rule = self._order, self._order.rules[index]
        call = order.cut_call(index)
        # Sums, and results that nobody needs, take the part's own rows.
        own = order.segment.rows(call.count, self._number)
        wanted = None
        for storage in call.made:
            if index not in self.again and storage in order.borders and index == order.inner[storage][-1]:
                _add(needed, storage, own)
            if storage in needed:
                wanted = _hull(wanted, needed[storage])
        first, stop = wanted or own
        rows = (first, stop), (first, stop)
        if rule.window is not None:
            rows = rule.window.to_fine(first, stop) if call.on_fine else rule.window.to_coarse(first, stop)
        self._rows[index] = rows
        begin, end = rows[call.on_fine]
        self._shares[index] = (end - begin) / call.count if call.count else 1.0 / order.segment.parts
        for storage in call.made:
            self.held[storage] = begin, end  # the first call that writes a storage comes last
        for storage, writer, fine, count in call.cut:
            begin, end = rows[fine]
            if writer in members and storage in order.inner:
                _add(needed, storage, (max(0, begin), min(end, count)))


def _add(needed: dict[int, Rows], storage: int, rows: Rows) -> None:
    needed[storage] = _hull(needed.get(storage), rows)


def _hull(one: Rows | None, other: Rows) -> Rows:
    return other if one is None else (min(one[0], other[0]), max(one[1], other[1]))
