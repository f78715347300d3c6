"""Where a plan frees: after the last access to bytes that nothing reads any more, or that are made or fetched again."""

from collections.abc import Sequence

from ucudnn.memory.plans.actions import COMPUTES, Action, ActionKind, free
from ucudnn.memory.step.graph import StepGraph

_ANY = -1
_Accessed = tuple[tuple[int, int, bool], ...]  # storage, version that is read or else made, whether it is read
_ACCESSED = "_freed_accesses"  # of a step, beside its fields


def with_frees(graph: StepGraph, actions: Sequence[Action]) -> tuple[Action, ...]:
    """Return actions without frees with all frees that they allow.

    Activations are freed after their last access, and after the last access before a prefetch or a recomputation brings
    their bytes back. A storage that the program writes anew stays, as it does in the program.
    """
    accessed, stays, count = _accessed(graph), graph.exists_after, len(graph.storages)
    needed = [False] * count  # by the next access, because the walk is from the last action to the first
    wanted, fetched = [_ANY] * count, [_ANY] * count  # versions: read next, and by the next prefetch
    found: list[Action] = []
    for action in reversed(actions):
        kind, target = action
        freed: list[int] = []
        if kind in COMPUTES:
            runs = kind is ActionKind.RUN
            for storage, version, is_read in accessed[target]:
                keeps = is_read or runs  # bytes that are there
                if not keeps and needed[storage] and wanted[storage] not in (_ANY, version):
                    continue  # a newer version is there and is read later: what is made here is dropped at once
                if not needed[storage]:
                    freed.append(storage)
                needed[storage], wanted[storage] = keeps, version
        elif kind is not ActionKind.SYNCHRONIZE and not stays[target]:
            freed = [] if needed[target] else [target]
            needed[target] = kind is not ActionKind.PREFETCH
            if kind is ActionKind.PREFETCH:
                fetched[target], wanted[target] = wanted[target], _ANY
            elif kind is ActionKind.OFFLOAD and fetched[target] != _ANY:
                fetched[target], wanted[target] = _ANY, fetched[target]
        found += map(free, sorted(freed, reverse=True))
        found.append(action)
    return tuple(reversed(found))


def _accessed(graph: StepGraph) -> Sequence[_Accessed]:
    """Return for each operation what it accesses that does not stay after the step."""
    known: Sequence[_Accessed] | None = vars(graph).get(_ACCESSED)
    if known is None:  # a step never changes
        stays = graph.exists_after
        known = vars(graph)[_ACCESSED] = [
            (
                *(
                    (each, version, True)
                    for each, version in zip(operation.reads, read, strict=True)
                    if not stays[each]
                ),
                *((each, made, False) for each, made in makes if each not in operation.reads and not stays[each]),
            )
            for operation, read, makes in zip(graph.operations, graph.read_versions, graph.makes, strict=True)
        ]
    return known
