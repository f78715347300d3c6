"""The program of a step with some of its segments computed part by part."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch

from ucudnn.memory.step.graph import Affine, Phase
from ucudnn.memory.torch.division.part_rules import SUM, Cut, PartRule
from ucudnn.memory.torch.division.program_writer import Divided, ProgramWriter
from ucudnn.memory.torch.division.sample_axes import SampleAxes
from ucudnn.memory.torch.division.segment import SegmentOrder, results_of
from ucudnn.memory.torch.subject.traced_values import TracedCall, TracedTensor, mapped
from ucudnn.memory.torch.tracing.assemble import writes

aten = torch.ops.aten
_PHASES = (Phase.FORWARD, Phase.BACKWARD)


def divided(axes: SampleAxes, orders: Sequence[SegmentOrder]) -> Divided:
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
    """Writes the calls of segments, and of batch norms outside of them as they are."""

    def __init__(self, axes: SampleAxes) -> None:
        super().__init__(axes.program, len(axes.undivided.graph.storages))
        self._axes = axes

    def origin(self, index: int, share: float) -> tuple[int, float]:
        """Return of which call of the undivided step a call comes."""
        call, own = self._axes.split.origins[index]
        return call, own * share

    def whole_norm(self, begin: int) -> None:
        """Write a batch norm, whose calls begin at one, as the call that it is undivided."""
        index, step = self._axes.split.origins[begin][0], self._axes.undivided
        self.calls.append(step.calls[index])
        self._operations.append(step.graph.operations[index])
        self.origins.append((index, 1.0))

    def segment(self, order: SegmentOrder, phase: int) -> None:
        """Write the calls of a segment in forward or backward."""
        self.phase = _PHASES[phase]
        for index in order.before[phase]:
            self.whole(index)
        for level in range(order.passes(phase)):
            calls, again = order.calls_of(phase, level)
            sums: dict[int, TracedTensor] = {}
            start = 0
            for number, samples in enumerate(order.segment.sizes(self._axes.batch)):
                part = _Part(self, order, self._axes.batch, (number, start, samples), sums)
                for index in calls:
                    part.write(index, is_again=index in again)
                start += samples
            for index in calls:
                if index not in again:
                    self._end_sums(index, order.rules[index], sums)
            for index in order.after[phase].get(level, ()):
                self.whole(index)

    def _end_sums(self, index: int, rule: PartRule, sums: Mapping[int, TracedTensor]) -> None:
        """Make what the parts of a call have added what the call makes of the whole mini-batch."""
        found = [tensor for tensor, kind in results_of(self.of.calls[index], rule) if kind == SUM]
        found = [tensor for tensor in found if tensor.storage in sums]
        for position, tensor in enumerate(found):
            added = sums[tensor.storage]
            if rule.over is not None and not position:
                by: Any = rule.over or sums[found[1].storage]
                self.add(index, aten.div_.Scalar if rule.over else aten.div_.Tensor, (added, by), added)
            if added.storage != tensor.storage:
                self.add(index, aten.copy_.default, (tensor, added), tensor)

    def add_part(self, index: int, call: TracedCall, storages: Mapping[int, int], samples: int) -> None:
        """Write a call of a part, of which the storages are given in which it finds and leaves those of the whole."""
        like, batch = self._graph.operations[index], self._axes.batch

        def share(whole: Affine) -> Affine:
            return Affine(whole.at(batch) * samples // batch)

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
            problem_batch=share(like.problem_batch) if like.problem else like.problem_batch,
        )
        self.append(index, replace(call, flops=call.flops * samples // batch), operation, samples / batch)


@final
class _Part:
    """Writes the calls of one part of a segment in one pass.

    A part has a number, a first sample and a number of samples. `sums` holds what parts before have added.
    """

    def __init__(
        self,
        writer: _Writer,
        order: SegmentOrder,
        batch: int,
        part: tuple[int, int, int],
        sums: dict[int, TracedTensor],
    ) -> None:
        self._writer, self._order, self._batch, self._sums = writer, order, batch, sums
        self._number, self._start, self._samples = part
        self._own: dict[int, int] = {}  # storages of the part
        self._latest: dict[int, int] = {}  # the calls that have written them last

    def write(self, index: int, *, is_again: bool) -> None:
        """Write a call of the part; one that runs again adds no sum and fills no border."""
        writer, order = self._writer, self._order
        call, rule = writer.of.calls[index], order.rules[index]
        given = self._given(index, call, rule)
        results: dict[TracedTensor, TracedTensor] = {}
        storages = {each.storage: given[each].storage for each in call.inputs}
        added: list[tuple[TracedTensor, TracedTensor]] = []
        for tensor, kind in results_of(call, rule):
            if tensor.storage in storages:
                results[tensor] = self._cut(tensor, kind, storages[tensor.storage])
            elif kind == SUM:
                results[tensor] = self._sum(tensor, is_again=is_again or tensor.storage in order.converted)
                if not is_again and tensor.storage not in order.converted:
                    added.append((tensor, results[tensor]))
            else:
                size, share = writer.of.sizes[tensor.storage], self._samples if isinstance(kind, Cut) else self._batch
                own = self._own[tensor.storage] = writer.storage(tensor.storage, size * share // self._batch)
                results[tensor] = self._cut(tensor, kind, own)
        storages |= {tensor.storage: found.storage for tensor, found in results.items()}
        arguments = self._arguments(index, call, rule, given)
        kwargs = mapped(dict(call.kwargs), TracedTensor, given.__getitem__)
        made = mapped(call.results, TracedTensor, results.__getitem__)
        part = replace(call, func=rule.func or call.func, args=arguments, kwargs=kwargs, results=made)
        writer.add_part(index, part, storages, self._samples)
        changed = {each.storage: each.dtype for each in (*call.outputs, *writes(call)) if each.storage in order.inner}
        for storage, dtype in changed.items():
            self._latest[storage] = index
            if not is_again and storage in order.borders and index == order.inner[storage][-1]:
                self._fill(index, storage, dtype)
        for tensor, found in added:
            self._add(index, tensor, found)

    def _given(self, index: int, call: TracedCall, rule: PartRule) -> dict[TracedTensor, TracedTensor]:
        """Return what the call of the part is given for each argument of the whole one."""
        found = {}
        for tensor in call.inputs:
            storage = tensor.storage
            last = self._order.last_writer(storage, index)
            is_own = storage in self._order.inner and self._latest.get(storage) == last
            cut = rule.cuts.get(tensor)
            if is_own:
                found[tensor] = self._cut(tensor, cut, self._own[storage])
            elif storage in self._order.converted or (storage in self._sums and not rule.cuts):
                found[tensor] = replace(tensor, storage=self._own[storage])
            elif cut is None:
                found[tensor] = tensor
            else:
                offset = tensor.offset + self._start * cut.entries * tensor.stride[cut.dim]
                found[tensor] = replace(self._cut(tensor, cut, storage), offset=offset)
        return found

    def _cut(self, tensor: TracedTensor, cut: Cut | str | None, storage: int) -> TracedTensor:
        """Return the tensor of a part in a storage."""
        if not isinstance(cut, Cut):
            return replace(tensor, storage=storage)
        shape = [*tensor.shape]
        shape[cut.dim] = cut.entries * self._samples
        return replace(tensor, storage=storage, shape=tuple(shape))

    def _sum(self, tensor: TracedTensor, *, is_again: bool) -> TracedTensor:
        """Return where the sum of a part goes: the first one is there to be added to, unless it has 16 bits.

        Some operators write a sum into the storage of one of its terms, and here that storage belongs to one part.
        """
        size, dense = self._writer.of.sizes[tensor.storage], tensor.bytes_touched
        if not is_again and not self._number and not _is_short(tensor) and size == dense:
            self._own[tensor.storage] = tensor.storage
            return tensor
        size = size if size == dense else size * self._samples // self._batch
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

    def _fill(self, index: int, storage: int, dtype: torch.dtype) -> None:
        """Copy the part of a border into the whole one."""
        own = self._own[storage]
        entries = self._writer.of.sizes[storage] // dtype.itemsize // self._batch
        whole = TracedTensor(storage, (entries * self._samples,), (1,), entries * self._start, dtype)
        part = replace(whole, storage=own, offset=0)
        self._writer.add(index, aten.copy_.default, (whole, part), whole)

    def _arguments(
        self, index: int, call: TracedCall, rule: PartRule, given: Mapping[TracedTensor, TracedTensor]
    ) -> tuple[Any, ...]:
        """Return the arguments of the call of the part."""
        arguments = [mapped(each, TracedTensor, given.__getitem__) for each in call.args]
        for argument in call.func._schema.arguments[len(arguments) : max(rule.constants, default=-1) + 1]:
            arguments.append(argument.default_value)
        for position, value in rule.constants.items():
            arguments[position] = value
        for position, at, entries in rule.sizes:
            size, sizes = entries * self._samples, arguments[position]
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
