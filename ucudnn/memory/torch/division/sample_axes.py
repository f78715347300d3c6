"""SampleAxes: where samples lie in the tensors of a step, and which calls can be computed in parts."""

from typing import final

from ucudnn.memory.step.graph import Phase
from ucudnn.memory.torch.division.batch_norms import split_norms
from ucudnn.memory.torch.division.part_rules import Cut, PartRule, part_rule
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.memory.torch.subject.traced_values import TracedCall, TracedTensor, listed


@final
class SampleAxes:
    """Where samples lie in the tensors of a program, in which batch norms are several calls.

    The samples of a storage lie one behind the other, so a part of the mini-batch is a range of its bytes, and tensors
    in it have the same strides in a part. Where the samples of a result lie otherwise, its call is not divided.

    Attributes:
        undivided: the step as it is.
        program: the step with batch norms as several calls each.
        split: what is known of these.
        batch: its mini-batch.
        rules: for each call how it is computed in parts; None for those that are computed whole.
    """

    def __init__(self, undivided: StepProgram) -> None:
        self.undivided, self.split = undivided, split_norms(undivided)
        self.program, self.batch = self.split.program, undivided.graph.batch
        program = self.program
        self._cut = {
            each.storage for each in program.inputs if each.storage in program.sizes and self._lies(each, first=True)
        }
        self.rules: list[PartRule | None] = []
        for index, call in enumerate(program.calls):
            is_whole = call.phase is Phase.OPTIMIZER or index in self.split.gathers
            self.rules.append(None if is_whole else self._rule(call))

    def cut(self, tensor: TracedTensor) -> Cut | None:
        """Return where a tensor is cut into samples; None if its storage has none, or it shows them otherwise."""
        return self._lies(tensor) if tensor.storage in self._cut else None

    def is_cut(self, storage: int) -> bool:
        """Whether samples lie one behind the other in a storage."""
        return storage in self._cut

    def _rule(self, call: TracedCall) -> PartRule | None:
        shows = all(self._lies(each) for each in call.inputs if each.storage in self._cut)
        rule = part_rule(call, self.cut, self.batch) if shows else None
        if rule is not None:
            pairs = zip(listed(call.results), rule.results, strict=True)
            made = [(each, kind) for each, kind in pairs if isinstance(each, TracedTensor) and isinstance(kind, Cut)]
            if all(self._lies(each) == kind for each, kind in made):
                self._cut.update(each.storage for each, _ in made)
                return rule
        if any(each.storage in self._cut for each in call.inputs):  # it is whole, and may be cut by those that read it
            self._cut.update(each.storage for each in call.outputs if self._lies(each, first=True))
        return None

    def _lies(self, tensor: TracedTensor, *, first: bool = False) -> Cut | None:
        """Return the dimension along which the samples of a tensor lie one behind the other in its storage."""
        size, rest = divmod(self.program.sizes[tensor.storage], self.batch * tensor.dtype.itemsize)
        if rest or not size or not tensor.is_plain:
            return None
        for dim, (entries, stride) in enumerate(zip(tensor.shape, tensor.stride, strict=True)):
            each, left = divmod(entries, self.batch)
            if left or not each or each * stride != size or (first and dim):
                continue
            extent = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
            within = tensor.offset + extent - (entries - each) * stride < size
            return Cut(dim, each) if within else None
        return None
