"""PartAxes: where rows, of which each part has some, lie in the tensors of a step, and which calls run in parts.

A row is a sample of the mini-batch or, for slabs, an index of the first spatial dimension.
"""

from dataclasses import dataclass, replace
from typing import final

from ucudnn.memory.step.graph import Phase
from ucudnn.memory.torch.division.batch_norms import split_norms
from ucudnn.memory.torch.division.part_rules import Cut, PartRule, part_rule
from ucudnn.memory.torch.division.slab_rules import slab_rule
from ucudnn.memory.torch.division.windows import Rows
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.memory.torch.subject.traced_values import TracedCall, TracedTensor, listed
from ucudnn.memory.torch.tracing.assemble import writes


@final
@dataclass(frozen=True, slots=True)
class CutCall:
    """What a call has in rows that runs in parts, whatever the segment.

    Attributes:
        made: storages that it writes and that have rows, whether it returns them or not.
        on_fine: whether the first of them lies on the fine axis of the call's window.
        count: number of rows of the first of them, or else of an argument; 0 if nothing has rows.
        cut: for each tensor with rows its storage, the call that wrote it before, whether it lies on the fine axis,
            and the number of rows of the storage.
    """

    made: tuple[int, ...]
    on_fine: bool
    count: int
    cut: tuple[tuple[int, int, bool, int], ...]


@final
class PartAxes:
    """Where rows lie in the tensors of a program, in which batch norms are several calls.

    The samples of a storage lie one behind the other, so a part of the mini-batch is a range of its bytes. The rows of
    slabs lie so within each channel, or where channels are last within the volume. Dimensions of a part's tensors have
    the order of the whole ones. Where the rows of a result lie otherwise, its call is not divided.

    Attributes:
        undivided: the step as it is.
        slabs: whether rows are those of slabs, not samples.
        is_volume: whether samples are volumes, whose rows lie along their depth.
        program: the step with batch norms as several calls each.
        rules: for each call how it is computed in parts; None for those that are computed whole.
        reads: for each call the storages that it is given.
        writes: for each call those of them that it writes.
        cut_calls: what calls have in rows, as far as segments have asked for it.
    """

    def __init__(self, undivided: StepProgram, *, slabs: bool = False) -> None:
        self.undivided, self.slabs, self.split = undivided, slabs, split_norms(undivided, slabs=slabs)
        self.program = program = self.split.program
        given = [each for each in program.inputs if each.storage in program.sizes]
        if slabs:  # the inputs of a recorded step have no shapes but those by which calls read them
            own = {each.storage for each in given}
            given += [each for call in program.calls for each in call.inputs if each.storage in own]
        self._volume = next((each.shape[2:] for each in given if len(each.shape) in (4, 5)), ())
        self.is_volume = len(self._volume) > 2
        self._rows: dict[int, tuple[int, int]] = {}  # rows of storages, and the bytes between two of them
        for each in given:
            if each.storage not in self._rows:
                self._begin_at(each)
        self.reads = [{each.storage for each in call.inputs} for call in program.calls]
        self.writes = [{each.storage for each in writes(call)} for call in program.calls]
        self.rules: list[PartRule | None] = []
        self.cut_calls: dict[int, CutCall] = {}
        for index, call in enumerate(program.calls):
            is_whole = call.phase is Phase.OPTIMIZER or index in self.split.gathers
            self.rules.append(None if is_whole else self._rule(call))

    def cut(self, tensor: TracedTensor) -> Cut | None:
        """Return where a tensor is cut into rows; None if its storage has none, or it shows them otherwise."""
        return self._lies(tensor, *self._rows[tensor.storage]) if tensor.storage in self._rows else None

    def rows(self, storage: int) -> int:
        """Return the number of rows that lie in a storage; 0 if none do."""
        return self._rows.get(storage, (0, 0))[0]

    def part(self, tensor: TracedTensor, cut: Cut, storage: int, held: Rows, rows: Rows) -> TracedTensor:
        """Return rows of a tensor in a storage that holds a range of the rows of its own.

        Where nobody knows rows of its storage, a whole tensor is cut all the same.
        """
        step = cut.entries * tensor.stride[cut.dim]
        shape, stride, offset = [*tensor.shape], [*tensor.stride], tensor.offset
        shape[cut.dim] = cut.entries * (rows[1] - rows[0])
        if tensor.storage in self._rows:
            block, own = self._rows[tensor.storage][0] * step, (held[1] - held[0]) * step
            for dim, each in enumerate(stride):
                outer, rest = divmod(each, block)
                stride[dim] = each if rest or dim == cut.dim else outer * own
            offset = offset // block * own + offset % block
        return replace(tensor, storage=storage, shape=tuple(shape), stride=tuple(stride),
                       offset=offset + (rows[0] - held[0]) * step)  # fmt: skip

    def flat(self, storage: int, like: TracedTensor) -> tuple[TracedTensor, Cut]:
        """Return a whole storage in the type of a tensor as two dimensions, and where its rows are cut."""
        count, step = self._rows[storage]
        step //= like.dtype.itemsize
        outer = self.program.sizes[storage] // (count * step * like.dtype.itemsize)
        return TracedTensor(storage, (outer, count * step), (count * step, 1), 0, like.dtype), Cut(1, step)

    def _begin_at(self, tensor: TracedTensor) -> None:
        """Note where the rows of a tensor lie that no rule tells of: any place is right that all who read it share."""
        dim, shape = 0, tensor.shape
        if self.slabs:
            leading = len(shape) - len(self._volume)
            if not self._volume or leading not in (1, 2) or (leading == 1 and shape[1:] != self._volume):
                return
            dim = leading
        rows = (shape[dim] if self.slabs else self.undivided.graph.batch) if shape else 0
        self._note(tensor, Cut(dim, shape[dim] // rows if rows else 0), rows)

    def _note(self, tensor: TracedTensor, cut: Cut, rows: int) -> bool:
        """Note the rows of a storage by a tensor in it; return whether they are told apart there."""
        if tensor.dtype.itemsize * rows * cut.entries == 0 or rows < 2:
            return False
        step = cut.entries * tensor.stride[cut.dim] * tensor.dtype.itemsize
        size = self.program.sizes[tensor.storage]
        fits = step and size % (rows * step) == 0 and (self.slabs or size == rows * step)
        if not fits or self._rows.get(tensor.storage, (rows, step)) != (rows, step):
            return False
        if self._lies(tensor, rows, step) != cut:
            return False
        self._rows[tensor.storage] = rows, step
        return True

    def _rule(self, call: TracedCall) -> PartRule | None:
        shows = all(self.cut(each) for each in call.inputs if each.storage in self._rows)
        rule: PartRule | None = None
        if shows:
            batch = self.undivided.graph.batch
            rule = slab_rule(call, self.cut) if self.slabs else part_rule(call, self.cut, batch)
        if rule is not None:
            pairs = zip(listed(call.results), rule.results, strict=True)
            made = [(each, kind) for each, kind in pairs if isinstance(each, TracedTensor) and isinstance(kind, Cut)]
            fresh = {each.storage for each, _ in made} - self._rows.keys()
            if all(self._note(each, kind, kind.rows(each)) for each, kind in made):
                return rule
            for storage in fresh:
                self._rows.pop(storage, None)
        if any(each.storage in self._rows for each in call.inputs):  # it is whole, and may be cut by those that read it
            for each in call.outputs:
                if each.storage not in self._rows:
                    self._begin_at(each)
        return None

    def _lies(self, tensor: TracedTensor, rows: int, step: int) -> Cut | None:
        """Return the dimension along which the rows of a tensor lie in its storage, which are some bytes apart."""
        step, rest = divmod(step, tensor.dtype.itemsize)
        if rest or not step or not tensor.is_plain:
            return None
        for dim, (entries, stride) in enumerate(zip(tensor.shape, tensor.stride, strict=True)):
            each, left = divmod(entries, rows)
            if left or not each or each * stride != step:
                continue
            others = [
                (size, own)
                for at, (size, own) in enumerate(zip(tensor.shape, tensor.stride, strict=True))
                if at != dim and size > 1
            ]
            inner = sum((size - 1) * own for size, own in others if own < step) + (each - 1) * stride
            is_outer = all(own % (rows * step) == 0 for _, own in others if own >= step)
            return Cut(dim, each) if is_outer and tensor.offset % (rows * step) + inner < step else None
        return None
