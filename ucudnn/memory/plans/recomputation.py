"""Recomputation: which operations must run again, and in which order, to make freed bytes again."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ucudnn.memory.plans.actions import Action, recompute, run
from ucudnn.memory.plans.frees import with_frees
from ucudnn.memory.step.graph import StepGraph


class Recomputation(NamedTuple):
    """How freed storages come back.

    Attributes:
        operations: what runs again, in order; all in-place writers of a version are among them.
        impossible: those that no operations could make: an operation on the way is not repeatable, or reads bytes that
            are there only in another version. They must stay, so ask again without them before `operations` is used.
    """

    operations: tuple[int, ...]
    impossible: frozenset[int]


def recomputation(
    graph: StepGraph,
    candidates: Sequence[int],
    wanted: Iterable[tuple[int, int]],
    absent: Callable[[int], bool],
    version: Callable[[int], int],
) -> Recomputation:
    """Return how to make versions of storages again.

    The operations run again in the order of the candidates, so each reads the versions that it read the first time:
    those of absent storages are recomputed before it, those of present ones must be there.

    Args:
        graph: the step.
        candidates: operations that may run again, in the order in which they ran.
        wanted: (storage, version) of what is to be made; all are absent.
        absent: says whether the bytes of a storage are gone.
        version: says which version of a storage is there, if it is not absent.
    """
    wanted = set(wanted)
    makeable: set[tuple[int, int]] = set()
    stays: set[int] = set()  # wanted storages that turn out to be impossible: what reads them later finds them there
    runnable = []
    for index in candidates:
        if graph.operations[index].repeatable and all(
            (storage, number) in makeable if absent(storage) and storage not in stays else version(storage) == number
            for storage, number in graph.recompute_reads[index]
        ):
            makeable.update(graph.makes[index])
            runnable.append(index)
        else:
            stays.update(storage for storage, _ in wanted.intersection(graph.makes[index]))
    needed = wanted & makeable
    chosen = []
    for index in reversed(runnable):
        if not needed.isdisjoint(graph.makes[index]):
            chosen.append(index)
            needed.update(each for each in graph.recompute_reads[index] if absent(each[0]))
    return Recomputation(tuple(reversed(chosen)), frozenset(storage for storage, _ in wanted - makeable))


def actions_with(graph: StepGraph, again: Mapping[int, Sequence[int]]) -> tuple[Action, ...]:
    """Return the actions of a step, with all frees that they allow; before some operations others run again."""
    actions: list[Action] = []
    for operation in range(len(graph.operations)):
        actions += [*map(recompute, again.get(operation, ())), run(operation)]
    return with_frees(graph, actions)


def extra_bytes(
    graph: StepGraph,
    sizes: Sequence[int],
    scratch_bytes: Sequence[int],
    operations: Sequence[int],
    absent: Callable[[int], bool],
    stays: Iterable[int],
) -> int:
    """Return the most bytes that operations take while they run again, beside all that exists before them.

    Args:
        graph: the step.
        sizes: bytes of each storage.
        scratch_bytes: scratch of each operation.
        operations: what runs again, in order.
        absent: says whether the bytes of a storage are gone before.
        stays: storages that are still there when all have run.
    """
    last = {
        storage: index
        for index, operation in enumerate(operations)
        for storage in (*graph.operations[operation].reads, *graph.operations[operation].writes)
    }
    last.update(dict.fromkeys(stays, len(operations)))
    present: set[int] = set()
    live = most = 0
    for index, operation in enumerate(operations):
        accessed = graph.operations[operation]
        passing = scratch_bytes[operation]
        for storage in accessed.writes:
            if absent(storage):
                live += sizes[storage] if storage not in present else 0
                present.add(storage)
            elif storage not in accessed.reads:
                passing += sizes[storage]  # made beside the bytes that are there, and dropped
        most = max(most, live + passing)
        for storage in {*accessed.reads, *accessed.writes} & present:
            if last[storage] == index:
                present.remove(storage)
                live -= sizes[storage]
    return most
