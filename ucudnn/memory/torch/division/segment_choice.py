"""SegmentChoice: which segments of a step are divided, and in how many parts, so that its floor falls below a budget.

The floor is set by the call with the largest working set. The segments around it are estimated, not built: what a part
has of its own counts by its share, borders count whole. The one that costs least and lowers the floor enough is taken,
and then the next call sets the floor.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from math import inf
from typing import final

from ucudnn.errors import StepGraphError
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import Role
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.torch.division.part_axes import PartAxes
from ucudnn.memory.torch.division.part_rows import PassRows
from ucudnn.memory.torch.division.program_writer import Divided, fastest
from ucudnn.memory.torch.division.segment import SegmentOrder, StepSegment
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.units import format_bytes

_PARTS = (2, 4, 8, 16, 32)
_NEAR = (0, 1, 2, 3, 5, 8, 12, 18, 28, 44, 68, 104, 160)  # borders that are tried, counted from the call
_BESIDE = 16  # calls of backward behind the last one that reads what forward made, among which the border is
_CALL_MS = 0.004  # of the host's for each call more
_STEP = 0.75  # of the floor, to which one segment brings it, so that the next one has room beside it
_GAIN = 0.98  # times the floor of now, above which a segment does not help


@final
@dataclass(frozen=True, slots=True)
class EstimatedSegment:
    """A segment that may be divided.

    Attributes:
        bytes: what exists at most while it runs.
        more_ms: how much longer it takes than undivided.
        sets_floor: the call that set the floor before it was divided.
    """

    order: SegmentOrder
    bytes: int
    more_ms: float
    sets_floor: int = 0


@final
class SegmentChoice:
    """Chooses segments of a step, which are divided into slabs or into parts of the mini-batch; costs are undivided.

    Attributes:
        axes: where samples, or rows of slabs, lie in the tensors of the step.
    """

    def __init__(self, program: StepProgram, costs: Costs, *, slabs: bool = False) -> None:
        self.axes = PartAxes(program, slabs=slabs)
        self._graph, split = self.axes.program.graph, self.axes.split
        self._bytes_per_ms = fastest(program.graph, costs)
        self._costs = Divided(split.program, split.origins).costs(program.graph, costs)
        liveness = measure_liveness(self._graph, self._costs)
        self._sizes, self._persistent = liveness.sizes, liveness.persistent_bytes
        parts = zip(liveness.persistent_bytes, liveness.working_bytes, liveness.scratch_bytes, strict=True)
        self._needs = [sum(each) for each in parts]
        for norm in split.norms:  # outside of segments it is one call
            index = split.origins[norm.start][0]
            accessed = {*program.graph.operations[index].reads, *program.graph.operations[index].writes}
            working = sum(self._sizes[each] for each in accessed if not self._graph.exists_after[each])
            self._needs[norm[-1]] = self._persistent[norm[-1]] + working + costs.scratch_bytes[index]
        self._turn, self._end = self._graph.backward_begins, self._graph.optimizer_begins
        self._crossing = self._crossing_bytes()
        self._blocks = [
            rule is None
            and index not in split.gathers
            and (index in split.program.outside or any(self.axes.rows(each.storage) for each in call.inputs))
            for index, (call, rule) in enumerate(zip(split.program.calls, self.axes.rules, strict=True))
        ]
        self._amid = {at: norm for norm in split.norms for at in norm[1:]}
        self._known: dict[tuple[int, int], list[SegmentOrder]] = {}
        self._estimates: dict[SegmentOrder, list[EstimatedSegment]] = {}

    def told(self, chosen: EstimatedSegment) -> str:
        """Return which segment runs in how many parts, and why, for people."""
        segment, origins, graph = chosen.order.segment, self.axes.split.origins, self.axes.undivided.graph
        calls = segment.forward[0], segment.forward[-1], chosen.sets_floor
        first, last, call = (graph.operation_name(origins[each][0]) for each in calls)
        axis = "depth" if self.axes.is_volume else "height"
        slabs = f"slabs of {axis} {-(-chosen.order.most_rows // segment.parts)}" if self.axes.slabs else "parts"
        return (
            f"divided: {first} to {last} and their backward in {segment.parts} {slabs}, because"
            f" {call} needs {format_bytes(self._needs[chosen.sets_floor])} undivided"
        )

    def within(self, target: int) -> list[EstimatedSegment]:
        """Return segments with which the floor is at most some bytes, or as low as they bring it."""
        chosen: list[EstimatedSegment] = []
        least, best, seen = inf, chosen, set[frozenset[StepSegment]]()
        while True:
            rest = [
                index
                for index in range(len(self._needs))
                if not any(index in run for each in chosen for run in each.order.segment.runs)
            ]
            call = max(rest, key=self._needs.__getitem__, default=0)
            largest = max(chosen, key=lambda each: each.bytes, default=None)
            floor = max(self._needs[call] if rest else 0, largest.bytes if largest else 0)
            if floor < least:
                least, best = floor, chosen
            key = frozenset(each.order.segment for each in chosen)
            if floor <= target or key in seen:  # one segment takes the place of another, and that of the first again
                return best
            seen.add(key)
            goal = max(target, int(_STEP * floor))
            if largest is not None and largest.bytes == floor:
                run = largest.order.segment.forward
                found = self._best(run.start, run.stop, None, goal, chosen)
            else:
                found = self._around(call, goal, chosen)
            if found is None or found.bytes > _GAIN * floor:
                return best
            met = [each for each in chosen if _meet(each.order.segment, found.order.segment)]
            cause = max([call, *(each.sets_floor for each in met)], key=self._needs.__getitem__)
            chosen = [*(each for each in chosen if each not in met), replace(found, sets_floor=cause)]

    def _around(self, call: int, target: int, chosen: Sequence[EstimatedSegment]) -> EstimatedSegment | None:
        if call < self._turn:
            return self._best(call, call + 1, call, target, chosen)
        near = sorted(range(self._turn, self._end), key=lambda each: abs(each - call))
        makers = next(filter(None, map(self._makers, near[: 2 * _BESIDE])), None)
        if makers is None or call >= self._end:
            return None
        return self._best(min(makers), max(makers) + 1, call, target, chosen)

    def _makers(self, call: int) -> list[int]:
        graph = self._graph
        return [
            max(each for each in graph.writers[storage] if each < self._turn)
            for storage in graph.operations[call].reads
            if self._is_saved(storage)
        ]

    def _is_saved(self, storage: int) -> bool:
        writers = self._graph.writers[storage]
        return self._graph.storages[storage].role is Role.ACTIVATION and bool(writers) and writers[0] < self._turn

    def _best(
        self, start: int, stop: int, call: int | None, target: int, chosen: Sequence[EstimatedSegment]
    ) -> EstimatedSegment | None:
        """Return the segment around a run of forward that costs least of those within a target, or has fewest bytes."""
        best: EstimatedSegment | None = None
        for run in self._runs(start, stop):
            time_ms = sum(self._costs.time_ms[run.start : run.stop])
            if best is not None and best.bytes <= target and time_ms >= best.more_ms:
                continue
            for order in self._orders(run):
                if call is not None and call not in run and call not in order.segment.backward:
                    continue
                met = [each for each in chosen if _meet(each.order.segment, order.segment)]
                if all({*each.order.segment.forward} <= {*run} for each in met):
                    if order not in self._estimates:  # runs around many calls have the same ones
                        self._estimates[order] = [*self._estimated(order)]
                    found = (*filter(None, [best]), *self._estimates[order])
                    best = min(found, key=lambda each: (max(each.bytes, target), each.more_ms))
        return best

    def _runs(self, start: int, stop: int) -> Iterator[range]:
        """Yield runs of forward around one, short ones first, whose borders have fewer bytes than the calls beside."""
        firsts, lasts = self._borders(start, -1), self._borders(stop, 1)
        found = {(first, last) for first in firsts for last in lasts}
        yield from sorted({self._with_norms(range(*each)) for each in found}, key=lambda each: (len(each), each.start))

    def _with_norms(self, run: range) -> range:
        begin, end = self._amid.get(run.start), self._amid.get(run.stop)
        return range(run.start if begin is None else begin.start, run.stop if end is None else end.stop)

    def _borders(self, begin: int, step: int) -> list[int]:
        found = []
        at = begin
        while 0 <= at <= self._turn:
            beside = [self._crossing[each] for each in (at - 1, at + 1) if 0 <= each <= self._turn]
            if at == begin or self._crossing[at] <= min(beside):
                found.append(at)
            call = at - 1 if step < 0 else at
            if not 0 <= call < self._turn or self._blocks[call]:
                break
            at += step
        return [found[each] for each in _NEAR if each < len(found)] + found[-1:]

    def _orders(self, run: range) -> list[SegmentOrder]:
        key = run.start, run.stop
        if key not in self._known:
            self._known[key] = found = []
            for backward in dict.fromkeys(map(self._with_norms, self._backward_of(run))):
                with suppress(StepGraphError):
                    found.append(SegmentOrder(self.axes, StepSegment(run, backward, 2)))
        return self._known[key]

    def _backward_of(self, run: range) -> Iterator[range]:
        """Yield runs of backward that read what only a run of forward has, the one with the smallest borders first."""
        readers = set[int]()
        for storage in {each for index in run for each in self._graph.operations[index].writes}:
            accesses = self._graph.accesses[storage]
            if self._is_saved(storage) and all(each in run for each in accesses if each < self._turn):
                readers.update(each for each in accesses if each >= self._turn)
        if not readers:
            yield range(self._turn, self._turn)
            return
        first, last = min(readers), max(readers) + 1
        before = range(first - 1, max(self._turn, first - _BESIDE) - 1, -1)
        behind = range(last, min(self._end, last + _BESIDE))
        starts = [first, *takewhile(lambda each: not self._blocks[each], before)]
        ends = [last, *(each + 1 for each in takewhile(lambda each: not self._blocks[each], behind))]
        crossing = self._crossing.__getitem__
        yield range(min(starts, key=crossing), min(ends, key=crossing))
        yield range(first, min(ends, key=crossing))
        yield range(first, last)

    def _crossing_bytes(self) -> list[int]:
        """Return for each place before a call the bytes that calls of the same part of the step hand over there."""
        changes = [0] * (len(self._needs) + 2)
        for storage, accesses in enumerate(self._graph.accesses):
            writers = self._graph.writers[storage]
            if self._graph.storages[storage].role is not Role.ACTIVATION or not writers:
                continue
            last = max(each for each in accesses if (each < self._turn) is (writers[0] < self._turn))
            changes[writers[0] + 1] += self._sizes[storage]
            changes[last + 1] -= self._sizes[storage]
        return [*accumulate(changes)]

    def _estimated(self, order: SegmentOrder) -> Iterator[EstimatedSegment]:
        most, needs, more_ms, count = order.most_parts, list[tuple[int, int]](), 0.0, 0
        for parts in (each for each in _PARTS if each <= most):
            divided = order.in_parts(parts)
            if self.axes.slabs:  # slabs amid a volume share rows on both sides
                needs, more_ms, count = self._needs_of(divided, parts // 2)
                held = max(fixed + own for fixed, own in needs)
            else:
                needs, more_ms, count = (needs, more_ms, count) if needs else self._needs_of(order.in_parts(1), 0)
                held = max(fixed + own * -(-most // parts) // most for fixed, own in needs)
            yield EstimatedSegment(divided, held, more_ms + count * (parts - 1) * _CALL_MS)

    def _needs_of(self, order: SegmentOrder, part: int) -> tuple[list[tuple[int, int]], float, int]:
        """Return for each pass bytes that stay whole and those of a part, how much longer it takes, and its calls."""
        more_ms, count = 2 * sum(self._sizes[each] for each in order.borders) / self._bytes_per_ms, 0
        needs = [(0, 0)]
        for phase, run in enumerate(order.segment.runs):
            base = max(self._persistent[run.start : run.stop], default=0)
            for level in range(order.passes(phase)):
                rows = PassRows(order, phase, level, part)
                whole, held = set[int](), [0.0]
                for index in rows.calls:
                    accessed = {*self._graph.operations[index].reads, *self._graph.operations[index].writes}
                    own = accessed & order.inner.keys()
                    whole |= {each for each in accessed - own if not self._graph.exists_after[each]}
                    whole |= own & {*order.borders, *order.copied}
                    share, time_ms = rows.share(index), self._costs.time_ms[index]
                    held.append(sum(self._sizes[each] * rows.held_share(each) for each in own))
                    held[-1] += self._costs.scratch_bytes[index] * share
                    more_ms += time_ms * (share * order.segment.parts - (index not in rows.again))
                needs.append((base + sum(self._sizes[each] for each in whole), int(max(held))))
                count += len(rows.calls)
        for calls in (*order.before, *order.after[0].values(), *order.after[1].values()):
            needs += [(self._needs[each], 0) for each in calls]
        return needs, more_ms, count


def _meet(one: StepSegment, other: StepSegment) -> bool:
    return any(a.start < b.stop and b.start < a.stop for a, b in zip(one.runs, other.runs, strict=True))
