"""What regions of backward compute again of forward, rather than reading it: then forward need not save it.

Of all that they read, the activations are saved that separate it from what cannot be computed again, in the fewest
bytes: a minimum cut. Whatever another operation of backward reads is saved anyway, and costs next to nothing.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, final

from ucudnn.memory.step.graph import Phase, Role
from ucudnn.memory.torch.compiling.fusible_calls import is_cheap, is_fusible
from ucudnn.memory.torch.compiling.norms import is_norm, norm_output
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.memory.torch.subject.traced_values import TracedCall
from ucudnn.memory.torch.tracing.assemble import writes

Version = tuple[int, int]
"""A storage, and a number of its versions as in `StepGraph`."""

MOST_REMATERIALIZED = 32
"""Calls of forward that a region may run again."""
_DEEPEST = 16  # of them one behind the other
_ANYWAY = 1024  # bytes of an activation that is saved anyway for each that it costs to read it once more
_FIRST = -1_000_000  # storages of what is computed again count down from here


@final
@dataclass(frozen=True, slots=True)
class Rematerialized:
    """What a region of backward computes again.

    Attributes:
        calls: the calls that run again, which make storages of their own.
        storages: by each storage that the region need not read any more, the one that takes its place.
        reads: storages that these calls read.
    """

    members: tuple[int, ...]
    calls: tuple[TracedCall, ...]
    storages: Mapping[int, int]
    reads: frozenset[int]


@final
class Rematerialization:
    """Decides by given sizes what regions of backward compute again; each region is given by its operations."""

    def __init__(self, program: StepProgram, regions: Sequence[Sequence[int]], sizes: Sequence[int]) -> None:
        self._program, self._graph, self._sizes = program, program.graph, sizes
        self._numbers = count(_FIRST, -1)
        self._elsewhere = {each.storage for _, call in program.uncounted for each in (*call.inputs, *call.outputs)}
        members = {each for region in regions for each in region}
        self._forward = [0] * len(self._graph.storages)  # versions of each storage that forward makes
        self._versions = [0] * len(self._graph.storages)  # that are made before the optimizer updates anything
        self._anyway = set[int]()
        for index, operation in enumerate(self._graph.operations[: self._graph.optimizer_begins]):
            is_forward = operation.phase is Phase.FORWARD
            for storage in operation.writes:
                self._forward[storage] += is_forward
                self._versions[storage] += 1
            if not is_forward and index not in members:
                self._anyway.update(operation.reads)
        self._endless = 1 + 2 * sum(sizes)
        self._saved = self._cut([each for region in regions for each in self._read(region)], self._price)

    def of(self, region: Sequence[int]) -> Rematerialized | None:
        """Return what a region computes again; None for nothing, or for more than a region may.

        Of what is saved it reads the fewest bytes.
        """
        read = [*self._read(region)]
        sizes = self._sizes
        saved = self._cut(read, lambda each: 1 + sizes[each[0]] if self._is_there(each) else self._endless)
        if not all(map(self._is_there, saved)):
            return None

        def is_rematerialized(version: Version) -> bool:
            return version not in saved and not self._graph.exists_before[version[0]]

        wanted = [*filter(is_rematerialized, read)]
        again, todo = set[int](), [*wanted]
        while todo:
            maker = self._maker(todo.pop())
            if maker not in again:
                again.add(maker)
                todo += filter(is_rematerialized, self._inputs(maker))
        if not again or len(again) > MOST_REMATERIALIZED:
            return None
        calls, own, reads = [], dict[int, int](), set[int]()
        for index in sorted(again):
            inputs = [*self._inputs(index)]
            renamed = {each[0]: own[each[0]] for each in inputs if is_rematerialized(each)}
            reads |= {storage for storage, _ in inputs} - renamed.keys()
            call = self._call(index).with_storages(renamed)
            made = {each.storage: next(self._numbers) for each in call.outputs if each.storage >= 0}
            own.update(made)
            calls.append(call.with_storages(made))
        return Rematerialized(tuple(region), tuple(calls), {each: own[each] for each, _ in wanted}, frozenset(reads))

    def _cut(self, wanted: Sequence[Version], price: Callable[[Version], int]) -> frozenset[Version]:
        """Return the cheapest versions that separate some others, or are these, from what is not computed again."""
        import networkx  # which PyTorch brings along; it takes long to import, and other steps do without it

        network: Any = networkx.DiGraph()
        network.add_nodes_from(("source", "sink"))
        depths, todo = dict.fromkeys(wanted, 0), deque(dict.fromkeys(wanted))
        for each in depths:
            network.add_edge((each, "made"), "sink", capacity=self._endless)
        while todo:
            version = todo.popleft()
            network.add_edge((version, "needed"), (version, "made"), capacity=price(version))
            maker, depth = self._maker(version), depths[version] + 1
            is_made = version[0] in {each.storage for each in self._call(maker).outputs}  # no norm's mean
            if not is_made or depth > _DEEPEST or not self._is_repeated(maker):
                network.add_edge("source", (version, "needed"), capacity=self._endless)
                continue
            for each in self._inputs(maker):
                if not self._graph.exists_before[each[0]]:
                    network.add_edge((each, "made"), (version, "needed"), capacity=self._endless)
                    if each not in depths:
                        depths[each] = depth
                        todo.append(each)
        _, (_, near) = networkx.minimum_cut(network, "source", "sink")  # of several cuts that nearest to the sink
        return frozenset(each for each in depths if (each, "made") in near and (each, "needed") not in near)

    def _price(self, version: Version) -> int:
        """Return the bytes that it takes to save a version; too many where it is not there in backward."""
        if not self._ends_forward(version):
            return self._endless
        size = self._sizes[version[0]]
        return 1 + (size // _ANYWAY if version[0] in self._anyway else size)

    def _is_there(self, version: Version) -> bool:
        return version in self._saved or (version[0] in self._anyway and self._ends_forward(version))

    def _ends_forward(self, version: Version) -> bool:
        return self._stays(version[0]) and version[1] == self._forward[version[0]]

    def _stays(self, storage: int) -> bool:
        """Whether a storage is an activation that nobody changes after forward."""
        is_own = self._graph.storages[storage].role is Role.ACTIVATION and storage not in self._elsewhere
        return is_own and self._versions[storage] == self._forward[storage] > 0

    def _read(self, region: Sequence[int]) -> Iterator[Version]:
        versions = (each for index in region for each in self._graph.recompute_reads[index])
        yield from (each for each in dict.fromkeys(versions) if self._stays(each[0]))

    def _maker(self, version: Version) -> int:
        storage, number = version
        return self._graph.writers[storage][number - 1]

    def _call(self, index: int) -> TracedCall:
        call = self._program.calls[index]
        return norm_output(call) if is_norm(call) else call

    def _inputs(self, index: int) -> Iterator[Version]:
        # Of a norm, mean and deviation are read, which it made itself.
        versions = dict(self._graph.makes[index]) | dict(self._graph.recompute_reads[index])
        for storage in dict.fromkeys(each.storage for each in self._call(index).inputs):
            yield storage, versions.get(storage, 0)

    def _is_repeated(self, index: int) -> bool:
        """Whether a call may run again in backward: it is cheap there, and what it reads is as it was."""
        graph, call = self._graph, self._program.calls[index]
        operation = graph.operations[index]
        if operation.phase is not Phase.FORWARD or not operation.repeatable or index in self._program.functions:
            return False
        if not is_fusible(call, len(graph.storages)) or not (is_norm(call) or is_cheap(call)):
            return False
        written = {each.storage for each in writes(self._call(index))}
        if not written <= {*operation.reads} or any(graph.exists_before[each] for each in written):
            return False
        roles = Role.PARAMETER, Role.BUFFER
        return all(
            graph.storages[storage].role in roles and self._versions[storage] == version
            for storage, version in self._inputs(index)
            if graph.exists_before[storage]
        )


def with_rematerialized(program: StepProgram, regions: Iterable[Rematerialized]) -> StepProgram:
    """Return a step in which operations of regions read what is needed to compute the rest again, and not the rest."""
    operations = [*program.graph.operations]
    for rematerialized in regions:
        for index in rematerialized.members:
            own = operations[index]
            more = rematerialized.reads if index == rematerialized.members[0] else frozenset[int]()
            reads = ({*own.reads} - rematerialized.storages.keys()) | more
            operations[index] = replace(own, reads=tuple(sorted(reads)))
    return replace(program, graph=replace(program.graph, operations=tuple(operations)))
