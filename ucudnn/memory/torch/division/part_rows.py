"""PassRows: which rows each call of a pass computes for one part, from those that its readers need, back to the first.

A part of the mini-batch has the same samples everywhere. Slabs of the results of a segment do not overlap, but the rows
that they depend on do, the more the farther they are from the results.
"""

from typing import final

from ucudnn.memory.torch.division.part_rules import Cut
from ucudnn.memory.torch.division.segment import SegmentOrder, results_of
from ucudnn.memory.torch.division.windows import Rows
from ucudnn.memory.torch.subject.traced_values import TracedTensor
from ucudnn.memory.torch.tracing.assemble import writes


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
        order, axes = self._order, self._order.axes
        call, rule = axes.program.calls[index], order.rules[index]
        made = [tensor for tensor, kind in results_of(call, rule) if isinstance(kind, Cut)]
        made += [each for each in writes(call) if each in rule.cuts]  # which it need not return
        on_fine = bool(made) and made[0] in rule.fine
        # Sums, and results that nobody needs, take the part's own rows.
        count = next((axes.rows(each.storage) for each in made), 0)
        count = count or next((cut.rows(each) for each, cut in rule.cuts.items() if each not in rule.fine), 0)
        own = order.segment.rows(count, self._number)
        wanted = None
        for tensor in made:
            storage = tensor.storage
            if index not in self.again and storage in order.borders and index == order.inner[storage][-1]:
                _add(needed, storage, own)
            if storage in needed:
                wanted = _hull(wanted, needed[storage])
        first, stop = wanted or own
        rows = (first, stop), (first, stop)
        if rule.window is not None:
            rows = rule.window.to_fine(first, stop) if on_fine else rule.window.to_coarse(first, stop)
        self._rows[index] = rows
        begin, end = rows[on_fine]
        self._shares[index] = (end - begin) / count if count else 1.0 / order.segment.parts
        for tensor in made:
            self.held[tensor.storage] = begin, end  # the first call that writes a storage comes last
        for tensor in rule.cuts:
            begin, end = rows[tensor in rule.fine]
            if order.last_writer(tensor.storage, index) in members and tensor.storage in order.inner:
                _add(needed, tensor.storage, (max(0, begin), min(end, axes.rows(tensor.storage))))


def _add(needed: dict[int, Rows], storage: int, rows: Rows) -> None:
    needed[storage] = _hull(needed.get(storage), rows)


def _hull(one: Rows | None, other: Rows) -> Rows:
    return other if one is None else (min(one[0], other[0]), max(one[1], other[1]))
