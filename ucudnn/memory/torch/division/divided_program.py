"""The program of a step with some of its segments computed part by part."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch

from ucudnn.memory.step.graph import Affine, Phase
from ucudnn.memory.torch.division.part_axes import PartAxes
from ucudnn.memory.torch.division.part_rows import PassRows
from ucudnn.memory.torch.division.part_rules import SUM, Cut, PartRule
from ucudnn.memory.torch.division.program_writer import Divided, ProgramWriter
from ucudnn.memory.torch.division.segment import SegmentOrder, results_of
from ucudnn.memory.torch.subject.traced_values import TracedCall, TracedTensor, mapped
from ucudnn.memory.torch.tracing.assemble import writes

aten = torch.ops.aten
_PHASES = (Phase.FORWARD, Phase.BACKWARD)
_WITHOUT_GAPS = ("_log_softmax_backward_data", "_softmax_backward_data")
"""Operators that write as if a tensor that they are given for their result had no gaps."""


def divided(axes: PartAxes, orders: Sequence[SegmentOrder]) -> Divided:
    """Return the program of a step whose segments are computed part by part.

    What a segment's parts share, and what others read, has the storages that it has in the step as it is.
    """
    writer = _Writer(axes)
    begins = {run.start: (order, phase) for order in orders for phase, run in enumerate(order.segment.runs) if run}
    norms = {norm.start: norm for norm in axes.split.norms}
    positions: list[int] = []
    while len(positions) < len(axes.program.calls):
        at, here = len(positions), len(writer.calls)
        if at in begins:
            order, phase = begins[at]
            positions += [here] * len(order.segment.runs[phase])
            writer.segment(order, phase)
        elif at in norms:
            positions += [here] * len(norms[at])
            writer.whole_norm(at)
        else:
            positions.append(here)
            writer.whole(at)
    return Divided(writer.program([*positions, len(writer.calls)]), tuple(writer.origins))


@final
class _Writer(ProgramWriter):
    def __init__(self, axes: PartAxes) -> None:
        super().__init__(axes.program, len(axes.undivided.graph.storages))
        self._axes = axes

    def origin(self, index: int, share: float) -> tuple[int, float]:
        call, own = self._axes.split.origins[index]
        return call, own * share

    def whole_norm(self, begin: int) -> None:
        """Write a batch norm, whose calls begin at one, as the call that it is undivided."""
        index, step = self._axes.split.origins[begin][0], self._axes.undivided
        self.calls.append(step.calls[index])
        self._operations.append(step.graph.operations[index])
        self.origins.append((index, 1.0))

    def segment(self, order: SegmentOrder, phase: int) -> None:
        self.phase = _PHASES[phase]
        for index in order.before[phase]:
            self.whole(index)
        for level in range(order.passes(phase)):
            sums: dict[int, TracedTensor] = {}
            for number in range(order.segment.parts):
                rows = PassRows(order, phase, level, number)
                part = _Part(self, order, rows, number, sums)
                for index in rows.calls:
                    part.write(index, is_again=index in rows.again)
            for index in rows.calls:
                if index not in rows.again:
                    self._end_sums(index, order.rules[index], sums)
            for index in order.after[phase].get(level, ()):
                self.whole(index)

    def _end_sums(self, index: int, rule: PartRule, sums: Mapping[int, TracedTensor]) -> None:
        found = [tensor for tensor, kind in results_of(self.of.calls[index], rule) if kind == SUM]
        found = [tensor for tensor in found if tensor.storage in sums]
        for position, tensor in enumerate(found):
            added = sums[tensor.storage]
            if rule.over is not None and not position:
                by: Any = rule.over or sums[found[1].storage]
                self.add(index, aten.div_.Scalar if rule.over else aten.div_.Tensor, (added, by), added)
            if added.storage != tensor.storage:
                self.add(index, aten.copy_.default, (tensor, added), tensor)

    def add_part(self, index: int, call: TracedCall, storages: Mapping[int, int], part: float) -> None:
        """Write a call of a part, of which the storages are given in which it finds and leaves those of the whole."""
        like, batch, slabs = self._graph.operations[index], self._graph.batch, self._axes.slabs

        def share(whole: Affine) -> Affine:
            return Affine(round(whole.at(batch) * part))

        written = {storages.get(each, each) for each in like.writes}
        reads = {storages.get(each, each) for each in like.reads}
        reads |= {each for each in written if each >= 0 and each in {given.storage for given in call.inputs}}
        reads |= {each.storage for each in call.inputs if each.storage < 0} - written
        operation = replace(
            like,
            reads=tuple(reads),
            writes=tuple(written),
            flops=share(like.flops),
            traffic=share(like.traffic),
            problem=None if slabs else like.problem,
            problem_batch=share(like.problem_batch) if like.problem and not slabs else like.problem_batch,
        )
        self.append(index, replace(call, flops=round(call.flops * part)), operation, part)


@final
class _Part:
    """Writes the calls of one part of a segment in one pass.

    A part has a number and rows. `sums` holds what parts before have added.
    """

    def __init__(
        self, writer: _Writer, order: SegmentOrder, rows: PassRows, number: int, sums: dict[int, TracedTensor]
    ) -> None:
        self._writer, self._order, self._rows, self._number, self._sums = writer, order, rows, number, sums
        self._own: dict[int, int] = {}  # storages of the part
        self._latest: dict[int, int] = {}  # the calls that have written them last

    def write(self, index: int, *, is_again: bool) -> None:
        """Write a call of the part; one that runs again adds no sum and fills no border."""
        writer, order = self._writer, self._order
        call, rule = writer.of.calls[index], order.rules[index]
        self._copy_rows(index, call, rule)
        given = {each: self._given(index, each, rule) for each in call.inputs}
        gaps = self._without_gaps(index, call, given)
        results, added = self._results(index, given, is_again=is_again)
        storages = {each.storage: given[each].storage for each in call.inputs}
        storages |= {tensor.storage: found.storage for tensor, found in results.items()}
        arguments = self._arguments(index, call, rule, given)
        if call.func is aten.new_empty_strided.default:
            arguments = (*arguments[:2], [*results[call.results].stride], *arguments[3:])
        kwargs = mapped(dict(call.kwargs), TracedTensor, given.__getitem__)
        made = mapped(call.results, TracedTensor, results.__getitem__)
        part = replace(call, func=rule.func or call.func, args=arguments, kwargs=kwargs, results=made)
        writer.add_part(index, part, storages, self._rows.share(index))
        for tensor, own in gaps:
            writer.add(index, aten.copy_.default, (tensor, own), tensor)
        for tensor, found in results.items():
            if (places := self._places(index, rule)) and not tensor.dtype.is_floating_point:
                writer.add(index, aten.add_.Scalar, (found, places), found)
        changed = {each.storage: each for each in (*call.outputs, *writes(call)) if each.storage in order.inner}
        for storage, tensor in changed.items():
            self._latest[storage] = index
            if not is_again and storage in order.borders and index == order.inner[storage][-1]:
                self._fill(index, tensor)
        for tensor, found in added:
            self._add(index, tensor, found)

    def _results(
        self, index: int, given: Mapping[TracedTensor, TracedTensor], *, is_again: bool
    ) -> tuple[dict[TracedTensor, TracedTensor], list[tuple[TracedTensor, TracedTensor]]]:
        order, rule, results = self._order, self._order.rules[index], dict[TracedTensor, TracedTensor]()
        storages = {each.storage: own.storage for each, own in given.items()}
        added: list[tuple[TracedTensor, TracedTensor]] = []
        for tensor, kind in results_of(self._writer.of.calls[index], rule):
            if tensor in given:
                results[tensor] = given[tensor]
            elif tensor.storage in storages:
                results[tensor] = self._cut(index, tensor, kind, storages[tensor.storage])
            elif kind == SUM:
                results[tensor] = self._sum(index, tensor, is_again=is_again or tensor.storage in order.converted)
                if not is_again and tensor.storage not in order.converted:
                    added.append((tensor, results[tensor]))
            else:
                own = self._new(tensor.storage, is_cut=isinstance(kind, Cut))
                results[tensor] = self._cut(index, tensor, kind, own)
        return results, added

    def _without_gaps(
        self, index: int, call: TracedCall, given: dict[TracedTensor, TracedTensor]
    ) -> list[tuple[TracedTensor, TracedTensor]]:
        """Give copies to operators that cannot write between gaps; return what is copied back, and to where."""
        found = []
        for tensor in writes(call) if call.func._opname in _WITHOUT_GAPS else ():
            if not given[tensor].is_dense:
                found.append((given[tensor], self._changed(index, aten.clone.default, (given[tensor],), tensor)))
                given[tensor] = found[-1][1]
        return found

    def _copy_rows(self, index: int, call: TracedCall, rule: PartRule) -> None:
        for tensor in writes(call):
            storage = tensor.storage
            if storage in self._order.copied and storage not in self._own:
                whole, cut = self._order.axes.flat(storage, tensor)
                rows = self._rows.held[storage]
                own = self._order.axes.part(whole, cut, self._new(storage, is_cut=True), rows, rows)
                whole = self._order.axes.part(whole, cut, storage, (0, self._order.axes.rows(storage)), rows)
                self._writer.add(index, aten.copy_.default, (own, whole), own)
                self._latest[storage] = self._order.last_writer(storage, index)

    def _new(self, storage: int, *, is_cut: bool) -> int:
        size = self._writer.of.sizes[storage]
        if is_cut:
            first, stop = self._rows.held[storage]
            size = size * (stop - first) // self._order.axes.rows(storage)
        own = self._own[storage] = self._writer.storage(storage, size)
        return own

    def _given(self, index: int, tensor: TracedTensor, rule: PartRule) -> TracedTensor:
        storage = tensor.storage
        last = self._order.last_writer(storage, index)
        cut = rule.cuts.get(tensor)
        is_own = storage in self._order.inner and self._latest.get(storage) == last
        if not is_own and (storage in self._order.converted or (storage in self._sums and not rule.cuts)):
            return replace(tensor, storage=self._own[storage])
        found = self._cut(index, tensor, cut, self._own[storage] if is_own else storage)
        if cut is None or rule.window is None:
            return found
        first, stop = self._rows.of(index, tensor)
        before, behind = max(0, -first), max(0, stop - self._order.axes.rows(storage))
        if before or behind:  # zeros beyond the ends of the volume
            pad = [*[0] * (2 * (len(tensor.shape) - 1 - cut.dim)), before, behind]
            return self._changed(index, aten.constant_pad_nd.default, (found, pad), tensor)
        places = self._places(index, rule)
        if places and not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
            return self._changed(index, aten.sub.Scalar, (found, places), tensor)
        return found

    def _places(self, index: int, rule: PartRule) -> int:
        return rule.places * self._rows.axis(index, fine=True)[0]

    def _changed(self, index: int, func: Any, args: tuple[Any, ...], tensor: TracedTensor) -> TracedTensor:
        axes, rows = self._order.axes, self._rows.of(index, tensor)
        size = self._writer.of.sizes[tensor.storage] * (rows[1] - rows[0]) // axes.rows(tensor.storage)
        cut = self._order.rules[index].cuts[tensor]
        own = axes.part(replace(tensor, offset=0), cut, self._writer.storage(tensor.storage, size), rows, rows)
        self._writer.add(index, func, args, own)
        return own

    def _cut(self, index: int, tensor: TracedTensor, cut: Cut | str | None, storage: int) -> TracedTensor:
        if not isinstance(cut, Cut):
            return replace(tensor, storage=storage)
        axes, (first, stop) = self._order.axes, self._rows.of(index, tensor)
        count = cut.rows(tensor)
        held = (0, count) if storage == tensor.storage else self._rows.held[tensor.storage]
        return axes.part(tensor, cut, storage, held, (max(0, first), min(count, stop)))

    def _sum(self, index: int, tensor: TracedTensor, *, is_again: bool) -> TracedTensor:
        """Return where the sum of a part goes: the first one is there to be added to, unless it has 16 bits.

        Some operators write a sum into the storage of one of its terms, and here that storage belongs to one part.
        """
        size, dense = self._writer.of.sizes[tensor.storage], tensor.bytes_touched
        if not is_again and not self._number and not _is_short(tensor) and size == dense:
            self._own[tensor.storage] = tensor.storage
            return tensor
        size = size if size == dense else round(size * self._rows.share(index))
        own = self._own[tensor.storage] = self._writer.storage(tensor.storage, size)
        return replace(tensor, storage=own)

    def _add(self, index: int, tensor: TracedTensor, found: TracedTensor) -> None:
        """Add the sum of a part, in float32 where it has 16 bits."""
        if self._number:
            held = self._sums[tensor.storage]
            self._writer.add(index, aten.add_.Tensor, (held, found), held)
            return
        self._sums[tensor.storage] = held = tensor
        if _is_short(tensor):
            size = tensor.bytes_touched // tensor.dtype.itemsize * torch.float32.itemsize
            held = replace(tensor, storage=self._writer.storage(tensor.storage, size), dtype=torch.float32)
            self._sums[tensor.storage] = held
            self._writer.add(index, aten._to_copy.default, (found,), held, dtype=torch.float32)
        elif found.storage != tensor.storage:
            self._writer.add(index, aten.copy_.default, (tensor, found), tensor)

    def _fill(self, index: int, tensor: TracedTensor) -> None:
        axes, storage = self._order.axes, tensor.storage
        whole, cut = axes.flat(storage, tensor)
        count = axes.rows(storage)
        rows = self._order.segment.rows(count, self._number)
        part = axes.part(whole, cut, self._own[storage], self._rows.held[storage], rows)
        whole = axes.part(whole, cut, storage, (0, count), rows)
        self._writer.add(index, aten.copy_.default, (whole, part), whole)

    def _arguments(
        self, index: int, call: TracedCall, rule: PartRule, given: Mapping[TracedTensor, TracedTensor]
    ) -> tuple[Any, ...]:
        arguments = [mapped(each, TracedTensor, given.__getitem__) for each in call.args]
        for argument in call.func._schema.arguments[len(arguments) : max(rule.constants, default=-1) + 1]:
            arguments.append(argument.default_value)
        for position, value in rule.constants.items():
            arguments[position] = value
        for position, at, entries, fine in rule.sizes:
            first, stop = self._rows.axis(index, fine=fine)
            size, sizes = entries * (stop - first), arguments[position]
            arguments[position] = size if at < 0 else [*sizes[:at], size, *sizes[at + 1 :]]
        if rule.scaled is not None:
            position, number = rule.scaled
            whole: TracedTensor = arguments[position]
            like = call.args[position].storage
            own = replace(whole, storage=self._writer.storage(like, whole.dtype.itemsize), offset=0)
            self._writer.add(index, aten.div.Scalar, (whole, number), own)
            arguments[position] = own
        return tuple(arguments)


def _is_short(tensor: TracedTensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize == 2
