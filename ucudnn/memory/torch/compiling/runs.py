"""Runs: which operations of a step become a region."""

from collections.abc import Iterator, Sequence
from typing import final

from ucudnn.memory.step.graph import Phase, Role, StepGraph
from ucudnn.memory.torch.compiling.fusible_calls import is_fusible, may_come_first
from ucudnn.memory.torch.subject.step_program import StepProgram

MOST_CALLS = 64
"""Calls of a region: Inductor's time grows with them, and a region of many is recomputed whole."""


@final
class Runs:
    """Finds runs of fusible calls that follow each other in one phase of a step.

    The storages that others access too are all there while a region runs, which can be more than any operation of the
    step as it is has. So their bytes, by given sizes, are bounded by a share, which may be above 1, of what its largest
    operation accesses.

    What prepares a gather and what ends an average are in no run, so that collectives may run beside runs. A gather
    between two operations of a run comes before the run if it does not depend on it.
    """

    def __init__(self, program: StepProgram, share: float, sizes: Sequence[int]) -> None:
        self._program, graph, self.sizes = program, program.graph, sizes
        self._gathers, self._averages = _around_collectives(graph)
        self._elsewhere = {each.storage for _, call in program.uncounted for each in (*call.inputs, *call.outputs)}
        self._elsewhere |= {each.storage for each in (*program.outputs, *program.grad_outputs)}
        self._elsewhere |= {each.storage for each in program.gradients if each is not None}
        self._turns = {at for at, _ in program.uncounted}
        accessed = (self._bytes({*each.reads, *each.writes}) for each in graph.operations)
        self._most = int(share * max(accessed, default=0))

    def inner(self, members: Sequence[int]) -> frozenset[int]:
        """Return the storages that only some operations access, and that nobody keeps."""
        graph, own = self._program.graph, {*members}
        found = {each for index in members for each in graph.operations[index].writes}
        return frozenset(
            each
            for each in found - self._elsewhere
            if graph.storages[each].role is Role.ACTIVATION and own.issuperset(graph.accesses[each])
        )

    def last_read(self, members: Sequence[int]) -> frozenset[int]:
        """Return the storages that exist before some operations, and that nobody accesses after them."""
        graph = self._program.graph
        found = {each for index in members for each in graph.operations[index].reads} - self._elsewhere
        return frozenset(
            each
            for each in found
            if graph.storages[each].role is Role.ACTIVATION
            and graph.accesses[each][0] < members[0]
            and graph.accesses[each][-1] <= members[-1]
        )

    def find(self) -> Iterator[list[int]]:
        """Yield the operations of each run.

        Between two of them may stand others that draw random numbers or gather parameters, and do not depend on the
        run: these come first.
        """
        run: list[int] = []
        for index, call in enumerate(self._program.calls):
            if run and (may_come_first(call) or index in self._gathers) and not self._is_bound_to(run, index):
                continue
            fits = self.may_be_one(index) and is_fusible(call, len(self._program.graph.storages))
            if run and not (fits and self._joins(run, index)):
                yield run
                run = []
            if fits:
                run.append(index)
        if run:
            yield run

    def _is_bound_to(self, run: Sequence[int], index: int) -> bool:
        graph = self._program.graph
        operation, others = graph.operations[index], [graph.operations[each] for each in run]
        written = {storage for each in others for storage in each.writes}
        read = {storage for each in others for storage in each.reads}
        meets = written & {*operation.reads, *operation.writes} or read & {*operation.writes}
        return bool(meets) or index in self._turns or index in self._program.outside

    def may_be_one(self, index: int) -> bool:
        """Return whether a region may stand where an operation of the step does."""
        operation = self._program.graph.operations[index]
        return (
            operation.phase is not Phase.OPTIMIZER
            and operation.repeatable
            and index not in self._program.outside
            and index not in self._program.functions
            and index not in self._gathers
            and index not in self._averages
        )

    def _joins(self, run: Sequence[int], index: int) -> bool:
        graph = self._program.graph
        operation = graph.operations[index]
        if (
            not self._turns.isdisjoint(range(run[-1] + 1, index + 1))
            or len(run) >= MOST_CALLS
            or operation.phase is not graph.operations[run[0]].phase
        ):
            return False
        # A region that is recomputed leaves alone what is there before the step, so nothing else in it may read that.
        accessed = {*operation.reads, *operation.writes}
        for each in run:
            other = graph.operations[each]
            shared = accessed & {*other.reads, *other.writes} & ({*operation.writes} | {*other.writes})
            if any(graph.exists_before[storage] for storage in shared):
                return False
        members = [*run, index]
        everything = {each for i in members for each in (*graph.operations[i].reads, *graph.operations[i].writes)}
        return self.have_room_for(everything - self.inner(members))

    def have_room_for(self, storages: set[int]) -> bool:
        """Whether a region may access some storages."""
        return self._bytes(storages) <= self._most

    def _bytes(self, storages: set[int]) -> int:
        graph = self._program.graph
        return sum(self.sizes[each] for each in storages if not graph.exists_after[each])


def _around_collectives(graph: StepGraph) -> tuple[set[int], set[int]]:
    """Return the operations that gather parameters and those that average gradients, with what these need beside them.

    Parameters may be joined and cast before a gather, and are parted behind it. What is averaged is cast and parted.
    """
    gathers = {each for each in graph.collectives if graph.operations[each].kind.endswith(".all_gather")}
    averages, joining = {*graph.collectives} - gathers, [*gathers]
    parted = {each for index in gathers for each in graph.operations[index].writes}
    while joining:
        index = joining.pop()
        makers = {each for read in graph.operations[index].reads for each in graph.writers[read] if each < index}
        joining += makers - gathers
        gathers |= makers
    averaged = {each for index in averages for each in graph.operations[index].writes}
    for index, each in enumerate(graph.operations[: graph.optimizer_begins]):
        if each.kind == "aten.split_with_sizes_copy" and parted.issuperset(each.reads):
            gathers.add(index)
        elif not averaged.isdisjoint(each.reads):
            averages.add(index)
            averaged.update(each.writes)
    return gathers, averages
