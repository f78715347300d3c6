"""Unfolded steps: what runs again is an operation of its own, so policies that know no recomputation plan beside it.

A policy such as `spill` walks operations, each of which runs once, and storages, each of which exists from its first
write to its last access. In an unfolded step both hold although operations run again: each run again is one more
operation, and the bytes that it recomputes are one more storage. What the policy plans for that step is a plan for the
step itself, once both have their own names again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ucudnn.memory.plans.actions import Action, ActionKind
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import Phase, Role, StepGraph, StepOperation, Storage

_COPIES_OF_STORAGES = (ActionKind.OFFLOAD, ActionKind.PREFETCH, ActionKind.WAIT, ActionKind.FREE)


class UnfoldedStep:
    """A step with the operations that run again in a plan without copies.

    Attributes:
        graph: the unfolded step. Operations stand in the order of the plan. Those that run again belong to the phase of
            what ran before them. What they make only to drop it at once is a storage that nothing else accesses.
        costs: its costs; no convolution of it has a choice.
    """

    def __init__(self, graph: StepGraph, costs: Costs, actions: Sequence[Action]) -> None:
        self._computes = [each for each in actions if each.kind is not ActionKind.FREE]
        self._storages: list[Storage] = list(graph.storages)
        self._owners = [*range(len(graph.storages))]
        self._spares = set[int]()  # what operations make again beside what they run for, and drop at once
        self._step = graph
        self.graph = replace(graph, operations=tuple(self._operations(graph, actions)), storages=tuple(self._storages))
        numbers = [operation for _, operation in self._computes]
        self.costs = replace(
            costs,
            time_ms=tuple(costs.time_ms[each] for each in numbers),
            scratch_bytes=tuple(costs.scratch_bytes[each] for each in numbers),
            issue_ms=tuple(costs.issue_ms[each] for each in numbers) if costs.issue_ms else (),
            configurations={},
            scratch_pieces={
                at: costs.scratch_pieces[each] for at, each in enumerate(numbers) if each in costs.scratch_pieces
            },
        )

    def folded(self, actions: Iterable[Action]) -> tuple[Action, ...]:
        """Return the actions of a plan for the unfolded step as those of the step itself."""
        found: list[Action] = []
        present = {each for each, exists in enumerate(self._step.exists_before) if exists}
        strays = set[int]()  # storages that were away when an operation made them again beside what it ran for
        for kind, target in actions:
            if kind is ActionKind.RUN:
                action = self._computes[target]
                spares = {self._owners[each] for each in self.graph.operations[target].writes if each in self._spares}
                strays |= spares - present
                present |= {self._owners[each] for each in self.graph.operations[target].writes}
                found.append(action)
            elif kind in _COPIES_OF_STORAGES:
                owner = self._owners[target]
                if target not in self._spares or (kind is ActionKind.FREE and owner in strays):
                    found.append(Action(kind, owner))
                    strays.discard(owner)
                    if kind is ActionKind.FREE:
                        present.discard(owner)
                    elif kind is ActionKind.PREFETCH:
                        present.add(owner)
            else:
                found.append(Action(kind, target))
        return tuple(found)

    def _operations(self, graph: StepGraph, actions: Iterable[Action]) -> Iterable[StepOperation]:
        """Yield the operations with their own storages; storages that are recomputed join the others meanwhile."""
        present = {each: each for each, exists in enumerate(graph.exists_before) if exists}
        versions = dict.fromkeys(present, 0)
        untouched = {*range(len(graph.storages))} - {*present}
        phase = Phase.FORWARD
        for at, (kind, target) in enumerate(actions):
            if kind is ActionKind.FREE:
                present.pop(target)
                continue
            operation, again = graph.operations[target], kind is ActionKind.RECOMPUTE
            read = [each for each, _ in graph.recompute_reads[target]] if again else operation.reads
            reads, writes = [present[each] for each in read], []
            for storage, version in graph.makes[target]:
                if again and graph.left_alone[storage]:
                    continue
                if storage in present and again and versions[storage] >= version:
                    writes.append(self._another(graph, storage))
                    self._spares.add(writes[-1])
                    continue
                if storage not in present:
                    present[storage] = storage if storage in untouched else self._another(graph, storage)
                    untouched.discard(storage)
                versions[storage] = version
                writes.append(present[storage])
            phase = phase if again else operation.phase
            if again or (*reads, *writes) != (*operation.reads, *operation.writes):
                name = f"{operation.name} again at {at}" if again else operation.name
                accessed = tuple(sorted(reads)), tuple(sorted(writes))
                operation = replace(operation, name=name, phase=phase, reads=accessed[0], writes=accessed[1])
            yield operation

    def _another(self, graph: StepGraph, storage: int) -> int:
        """Return one more storage, with the bytes of one that is recomputed."""
        number = len(self._storages)
        name = f"{graph.storages[storage].name} again {number}"
        self._storages.append(replace(graph.storages[storage], name=name, role=Role.ACTIVATION, aliases=()))
        self._owners.append(storage)
        return number
