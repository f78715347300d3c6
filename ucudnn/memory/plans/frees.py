"""Where a plan frees: after the last access to bytes that nothing reads any more, or that are made or fetched again."""

from collections.abc import Sequence
from enum import Enum

from ucudnn.memory.plans.actions import Action, ActionKind, free
from ucudnn.memory.step.graph import StepGraph


class _Use(Enum):
    KEEP = 0  # needs or replaces bytes that are there: no free before it
    SEND = 1  # copies them to the host: no free before it either
    MAKE = 2  # a recomputation makes them whole
    FETCH = 3  # a prefetch brings them


_ANY = -1
_Access = tuple[int, _Use, int]  # index of the action, what it does, the version that it reads or makes


def with_frees(graph: StepGraph, actions: Sequence[Action]) -> tuple[Action, ...]:
    """Return actions without frees with all frees that they allow.

    Activations are freed after their last access, and after the last access before a prefetch or a recomputation brings
    their bytes back. A storage that the program writes anew stays, as it does in the program.
    """
    frees: list[list[int]] = [[] for _ in actions]
    for storage, accesses in enumerate(_accesses(graph, actions)):
        if not graph.exists_after[storage]:
            for index in _free_points(accesses):
                frees[index].append(storage)
    with_them: list[Action] = []
    for action, storages in zip(actions, frees, strict=True):
        with_them.append(action)
        with_them += [free(storage) for storage in storages]
    return tuple(with_them)


def _accesses(graph: StepGraph, actions: Sequence[Action]) -> list[list[_Access]]:
    found: list[list[_Access]] = [[] for _ in graph.storages]
    for index, (kind, target) in enumerate(actions):
        if kind is ActionKind.RUN or kind is ActionKind.RECOMPUTE:
            operation = graph.operations[target]
            again = _Use.MAKE if kind is ActionKind.RECOMPUTE else _Use.KEEP
            for storage, version in zip(operation.reads, graph.read_versions[target], strict=True):
                found[storage].append((index, _Use.KEEP, version))
            for storage, version in graph.makes[target]:
                if storage not in operation.reads:
                    found[storage].append((index, again, version))
        elif kind is ActionKind.PREFETCH or kind is ActionKind.OFFLOAD:
            found[target].append((index, _Use.FETCH if kind is ActionKind.PREFETCH else _Use.SEND, _ANY))
        elif kind is not ActionKind.SYNCHRONIZE:
            found[target].append((index, _Use.KEEP, _ANY))
    return found


def _free_points(accesses: Sequence[_Access]) -> list[int]:
    points = []
    needed = False  # by the next access; the walk is from the last one to the first
    wanted = fetched = _ANY  # versions: the one that is read next, and the one that the next prefetch must bring
    for index, use, version in reversed(accesses):
        if use is _Use.MAKE and needed and wanted not in (_ANY, version):
            continue  # a newer version is there and is read later: what is made here is dropped at once
        if not needed:
            points.append(index)
        needed = use in (_Use.KEEP, _Use.SEND)
        if use is _Use.FETCH:
            fetched, wanted = wanted, _ANY
        elif use is _Use.SEND and fetched != _ANY:
            fetched, wanted = _ANY, fetched
        elif version != _ANY:
            wanted = version
    return points
