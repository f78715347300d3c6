"""Segment: a run of forward, and the run of backward that reads what it makes, which are computed part by part.

    forward    whole calls, then for each part: calls of the segment; borders of parts are copied into whole tensors
    backward   whole calls, then for each part: what forward made and backward reads is computed again, then its calls

A result that is a sum over samples is whole when all parts have been added. What reads it and tells samples apart needs
another pass over the parts, in which what it reads of earlier passes is computed again.

Slabs share rows, so what changes a whole tensor in place changes a copy of the rows of each slab instead.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from typing import Self, final

import torch

from ucudnn.errors import StepGraphError
from ucudnn.memory.torch.division.part_axes import CutCall, PartAxes
from ucudnn.memory.torch.division.part_rules import OWN, SUM, Cut, PartRule
from ucudnn.memory.torch.division.windows import Rows
from ucudnn.memory.torch.subject.traced_values import TracedCall, TracedTensor, listed
from ucudnn.memory.torch.tracing.assemble import writes

_CONVERTS = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
"""What converts a sum before its parts are added: gradients of 16 bits become those of parameters in 32."""
_MOST_PASSES = 3  # each computes again what it reads, so more than two batch norms cost more than they save


@final
@dataclass(frozen=True, slots=True)
class StepSegment:
    """What is divided.

    Attributes:
        parts: number of parts; some may have a row more than others.
    """

    forward: range
    backward: range
    parts: int

    @property
    def runs(self) -> tuple[range, range]:
        """The runs of forward and backward."""
        return self.forward, self.backward

    def rows(self, count: int, number: int) -> Rows:
        """Return those of a number of rows that are a part's own: each is one part's."""
        return -(-count * number // self.parts), -(-count * (number + 1) // self.parts)


def results_of(call: TracedCall, rule: PartRule) -> Iterator[tuple[TracedTensor, Cut | str | None]]:
    """Yield each tensor that a call makes, with what becomes of it in parts."""
    for each, kind in zip(listed(call.results), rule.results, strict=True):
        if isinstance(each, TracedTensor):
            yield each, kind


@final
class SegmentOrder:
    """In which order the calls of a segment run.

    Attributes:
        rules: of the calls that run in parts.
        level: the pass in which each of them runs, from 0 in forward and from 0 in backward.
        before: for forward and backward the calls that run whole before the parts.
        after: for forward and backward the calls that run whole after a pass.
        inner: for each storage that parts have of their own, the calls that write it.
        borders: those among them that become whole, because others read them.
        sums: for each storage that is a sum over samples, its call.
        converted: those of them that are only read by calls that convert them.
        copied: whole storages of which parts change copies of their rows.

    Raises:
        StepGraphError: if the segment cannot be divided.
    """

    def __init__(self, axes: PartAxes, segment: StepSegment) -> None:
        self.segment, self.axes, self._program = segment, axes, axes.program
        self._calls, self._counted = axes.program.calls, len(axes.program.graph.storages)
        self.rules: dict[int, PartRule] = {}
        self.level: dict[int, int] = {}
        self.before: tuple[list[int], list[int]] = [], []
        self.after: tuple[dict[int, list[int]], dict[int, list[int]]] = defaultdict(list), defaultdict(list)
        self.inner: dict[int, list[int]] = {}
        self.sums: dict[int, int] = {}
        self.copied = set[int]()
        self._own = set[int]()
        self._known: dict[tuple[int, int], tuple[list[int], set[int]]] = {}  # calls of passes
        ends = (*self._program.outputs, *self._program.grad_outputs, *self._program.gradients)
        read = {each.storage for each in ends if each is not None}
        self._read = read | {each.storage for _, call in self._program.uncounted for each in call.inputs}
        self._check_norms()
        for phase, calls in enumerate(segment.runs):
            self._sort(phase, calls)
        graph, inside = self._program.graph, {*segment.forward, *segment.backward}
        known = self._read | {each for each in self.inner if not inside.issuperset(graph.accesses[each])}
        self.borders = frozenset(self.inner.keys() & known - self.copied)
        converting = {call for call, rule in self.rules.items() if not rule.cuts}
        self.converted = frozenset(
            each
            for each in self.sums.keys() - self._read
            if {*graph.readers[each]} and converting.issuperset(graph.readers[each])
        )
        self._counts = {cut.rows(each) for rule in self.rules.values() for each, cut in rule.cuts.items()}
        self._check_rows()
        self._check()

    def in_parts(self, parts: int) -> Self:
        """Return the same segment in another number of parts."""
        found = copy(self)
        found.segment = replace(self.segment, parts=parts)
        return found

    @property
    def most_parts(self) -> int:
        """The fewest rows that are divided."""
        return min(self._counts, default=1)

    @property
    def most_rows(self) -> int:
        """The most rows that are divided."""
        return max(self._counts, default=1)

    def phase(self, call: int) -> int:
        """Return 0 for a call of forward, 1 for one of backward."""
        return int(call not in self.segment.forward)

    def passes(self, phase: int) -> int:
        """Return how often the parts of forward or backward are gone through."""
        levels = [level for call, level in self.level.items() if self.phase(call) == phase]
        return max([-1, *levels, *self.after[phase]]) + 1

    def calls_of(self, phase: int, level: int) -> tuple[list[int], set[int]]:
        """Return the calls that a pass runs for each part, in order, and those among them that run again."""
        if (phase, level) in self._known:
            return self._known[phase, level]
        direct = [call for call, own in self.level.items() if own == level and self.phase(call) == phase]
        found, todo = {*direct}, [*direct]
        while todo:
            call = todo.pop()
            for storage in self._reads_inner(call):
                writers = {each for each in self.inner[storage] if each < call}
                if self.last_writer(storage, call) in writers and (
                    writers <= found or not self.is_whole(storage, call, phase, level)
                ):
                    todo += writers - found
                    found |= writers
        self._known[phase, level] = sorted(found), found - {*direct}
        return self._known[phase, level]

    def cut_call(self, index: int) -> CutCall:
        """Return what a call has in rows; it is found once for all segments of a step."""
        rule, call, axes = self.rules[index], self._calls[index], self.axes
        is_shared = rule is axes.rules[index]
        if is_shared and index in axes.cut_calls:
            return axes.cut_calls[index]
        made = [tensor for tensor, kind in results_of(call, rule) if isinstance(kind, Cut)]
        made += [each for each in writes(call) if each in rule.cuts]
        count = next((axes.rows(each.storage) for each in made), 0)
        count = count or next((cut.rows(each) for each, cut in rule.cuts.items() if each not in rule.fine), 0)
        storages = ((each.storage, each in rule.fine) for each in rule.cuts)
        cut = tuple((each, self.last_writer(each, index), fine, axes.rows(each)) for each, fine in storages)
        found = CutCall(tuple(each.storage for each in made), bool(made) and made[0] in rule.fine, count, cut)
        axes.cut_calls.update({index: found} if is_shared else {})
        return found

    def last_writer(self, storage: int, reader: int) -> int:
        """Return the call, of the segment or not, that made the version of a storage that a call reads."""
        return max((each for each in self._program.graph.writers[storage] if each < reader), default=-1)

    def is_whole(self, storage: int, reader: int, phase: int, level: int) -> bool:
        """Whether a storage of parts is whole before a pass begins, and as a call reads it while the pass runs."""
        done = all((self.phase(each), self.level[each]) < (phase, level) for each in self.inner[storage])
        late = any(reader < each < self.segment.runs[phase].stop for each in self._program.graph.writers[storage])
        return storage in self.borders and done and not late and self.inner[storage][-1] < reader

    def _check_norms(self) -> None:
        split = self.axes.split
        held = [{norm.start in run and norm[-1] in run for run in self.segment.runs} for norm in split.norms]
        for number, norm in enumerate(split.norms):
            ends = any(norm.start < end < norm.stop for run in self.segment.runs for end in (run.start, run.stop))
            if ends or (True in held[number] and True not in held[split.backward_of.get(number, number)]):
                raise self._refused(norm.start, "is a batch norm of which only a part is in the segment")

    def _sort(self, phase: int, calls: range) -> None:
        ready: dict[int, int] = {}  # of storages that are whole only behind a pass: its number
        changed: dict[int, int] = {}  # of whole storages that a pass changes part by part: its number
        for index in calls:
            call = self._calls[index]
            rule = None if index in self._program.outside else self.axes.rules[index]
            reads, written = self.axes.reads[index], self.axes.writes[index]
            own = [each for each in reads if each in self.inner and self.phase(self.inner[each][0]) == phase]
            outer = written - {*self.inner}
            waits = [ready[each] for each in reads | written if each in ready]
            turns = [changed[each] for each in reads | written if each in changed]
            if rule is None and self._converts(call, reads, ready):
                self._run_in_parts(index, PartRule(cuts={}, results=(SUM,)), max(waits), ready)
            elif rule is None or (outer and not phase and not own):
                gathered = [self.level[writer] for each in own for writer in self.inner[each]]
                if own and index not in self.axes.split.gathers:
                    raise self._refused(index, "is computed whole, and reads what is there for one part at a time")
                behind = max([-1, *waits, *turns, *gathered])
                self._run_whole(index, phase, behind, written)
                ready |= dict.fromkeys(written | (_storages(call.outputs) - reads) if behind >= 0 else (), behind)
            else:
                levels = (self.level[writer] for each in own for writer in self.inner[each])
                level = max([0, *(each + 1 for each in waits), *turns, *levels])
                if level >= _MOST_PASSES:
                    raise self._refused(index, f"would need more than {_MOST_PASSES} passes over the parts")
                if self.axes.slabs:
                    self.copied |= outer
                    self.inner |= {each: [] for each in outer}
                elif outer:
                    self._check_changes(index, outer, phase, level)
                    changed |= dict.fromkeys(outer, level)
                self._run_in_parts(index, rule, level, ready)

    def _check_changes(self, index: int, outer: set[int], phase: int, level: int) -> None:
        in_place = _storages(self._calls[index].outputs) <= outer
        later = [each for each, own in self.level.items() if self.phase(each) == phase and own > level]
        later += [each for behind, calls in self.after[phase].items() if behind >= level for each in calls]
        disturbs = any(self._touches(each, outer) for each in later)
        if not phase or not in_place or disturbs or not all(map(self.axes.rows, outer)):
            raise self._refused(index, "changes what is there before the segment")

    def _converts(self, call: TracedCall, reads: set[int], ready: dict[int, int]) -> bool:
        tensors = (*call.inputs, *call.outputs)
        return (
            call.func in _CONVERTS
            and all(each in ready and each in self.sums and self.rules[self.sums[each]].over is None for each in reads)
            and all(each.dtype.is_floating_point and each.storage < self._counted for each in tensors)
        )

    def _run_in_parts(self, index: int, rule: PartRule, level: int, ready: dict[int, int]) -> None:
        call = self._calls[index]
        self.rules[index], self.level[index] = rule, level
        for tensor, kind in results_of(call, rule):
            storage = tensor.storage
            if storage >= self._counted:
                raise self._refused(index, "makes a tensor on another device")
            if kind == SUM:
                self.sums[storage], ready[storage] = index, level
            elif storage not in self.axes.reads[index]:
                self.inner[storage] = []
                self._own |= {storage} if kind == OWN else set()
        for storage in (_storages(call.outputs) | self.axes.writes[index]) & self.inner.keys():
            self.inner[storage].append(index)

    def _run_whole(self, index: int, phase: int, behind: int, written: set[int]) -> None:
        """Note that a call runs whole, unless another one would read or write the wrong bytes then."""
        self._read |= self.axes.reads[index]
        later = [each for each, level in self.level.items() if self.phase(each) == phase and level > behind]
        later += [each for place, calls in self.after[phase].items() if place > behind for each in calls]
        if written & {*self.inner} or any(self._touches(each, written) for each in later):
            raise self._refused(index, "is computed whole, and writes what another call of the segment reads before")
        if behind >= 0 and self._calls[index].draws:
            raise self._refused(index, "would draw other random numbers, because it waits for a sum over samples")
        (self.before[phase] if behind < 0 else self.after[phase][behind]).append(index)

    def _touches(self, call: int, storages: set[int]) -> bool:
        return bool((self.axes.reads[call] | self.axes.writes[call]) & storages)

    def _check(self) -> None:
        """Check that what runs again computes the same again, and that borders can be put together."""
        graph, segment = self._program.graph, self.segment
        for storage in self.borders:
            if storage in self._own or len({*map(self.phase, self.inner[storage])}) > 1:
                raise StepGraphError(f"{graph.storage_name(storage)} is no border: parts keep or change it")
        if any(run.start < at < run.stop for at, _ in self._program.uncounted for run in segment.runs):
            raise StepGraphError("a call amid the segment works on another device")
        for phase, level in ((each, level) for each in (0, 1) for level in range(self.passes(each))):
            calls, again = self.calls_of(phase, level)
            for index, storage in ((call, each) for call in calls for each in self._reads_inner(call)):
                own = storage in self.copied or self.last_writer(storage, index) in self.inner[storage]
                if not own and not self.is_whole(storage, index, phase, level):
                    raise self._refused(index, "reads what is there for one part at a time as others leave it")
            for index in again:
                operation = graph.operations[index]
                changes = any(each not in self.inner and self.sums.get(each) != index for each in operation.writes)
                read = {*operation.reads} - {*self.inner}
                late = any(
                    index < each < segment.runs[phase].stop for storage in read for each in graph.writers[storage]
                )
                if changes or late or not operation.repeatable:
                    raise self._refused(index, "would have to run again, and would compute something else")

    def _check_rows(self) -> None:
        """Check that each part has rows, and that nobody reads copies of whole storages, whose rows slabs share."""
        graph, parts = self._program.graph, self.segment.parts
        if self.most_parts < parts:
            raise StepGraphError(f"{parts} parts are more than the {self.most_parts} rows that are divided")
        for storage in self.copied:
            first = self.inner[storage][0]
            run = self.segment.runs[self.phase(first)]
            is_read = any(first < each and each not in run for each in graph.accesses[storage])
            if is_read or storage in self._read or graph.storages[storage].role.exists_after:
                raise self._refused(first, "changes rows that slabs share, and that others read")

    def _reads_inner(self, call: int) -> set[int]:
        return self.axes.reads[call] & self.inner.keys()

    def _refused(self, index: int, why: str) -> StepGraphError:
        return StepGraphError(f"{self._program.graph.operation_name(index)} {why}")


def _storages(tensors: Iterable[TracedTensor]) -> set[int]:
    return {each.storage for each in tensors}
