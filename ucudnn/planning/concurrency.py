"""Which kernels may run at the same time, and so need segments of their own."""

from collections.abc import Hashable, Iterable, Sequence

from ucudnn.errors import SettingsError
from ucudnn.kernel import Kernel
from ucudnn.problem import Operation
from ucudnn.settings import Settings

Groups = tuple[tuple[tuple[str, ...], ...], ...]
"""Groups of layers that may run at the same time. A group has branches; layers of a branch run one after another."""

Branches = tuple[tuple[int, ...], ...]
"""Branches of kernels, by index; the kernels of a branch run one after another and share a segment."""


def parse_groups(given: Sequence[Sequence[str | Sequence[str]]]) -> Groups:
    """Return groups from the names of layers; a branch of one layer may be just its name.

    A SettingsError names an entry that is no name, and a name that is given twice.
    """
    groups = []
    for group in _items(given, "are no groups: give a sequence of them"):
        branches = []
        for branch in _items(group, "is no group: give a sequence of branches"):
            names = (
                (branch,) if isinstance(branch, str) else _items(branch, "is no layer's name, nor a sequence of them")
            )
            for name in names:
                if not isinstance(name, str) or not name:
                    raise SettingsError(f"groups: {name!r} is no layer's name")
            branches.append(tuple(map(str, names)))
        groups.append(tuple(branches))
    _places(groups)
    return tuple(group for group in groups if group)


def groups_under(settings: Settings, given: Sequence[Sequence[str | Sequence[str]]] | None) -> Groups:
    """Return the groups of layers among which a handle divides its workspace; they need a total to divide."""
    groups = parse_groups(given or ())
    if groups and settings.total_workspace_bytes is None:
        raise SettingsError("groups say how a total is divided: give total_workspace, too")
    return groups


def _places(groups: Sequence[Sequence[Sequence[str]]]) -> dict[str, tuple[int, int]]:
    place: dict[str, tuple[int, int]] = {}
    for group, branches in enumerate(groups):
        for branch, layers in enumerate(branches):
            for layer in layers:
                if layer in place:
                    raise SettingsError(
                        f"groups: layer {layer!r} is named twice, but it can only run in one branch, once"
                    )
                place[layer] = group, branch
    return place


def _items(value: object, otherwise: str) -> tuple[object, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SettingsError(f"groups: {value!r} {otherwise}")
    return tuple(value)


def concurrent_sets(kernels: Sequence[Kernel], groups: Groups = ()) -> tuple[Branches, ...]:
    """Return sets of kernels that may run at the same time; kernels of different sets never do.

    Without groups, any two kernels may run at the same time, as in the paper, except for several shapes of one
    operation of one layer. With groups, the Forward kernels of a group are one set, its backward kernels are another,
    and every other kernel runs alone. A name in a group that no kernel has is ignored.

    Raises:
        SettingsError: if a layer is named twice, or stands in a group for several layers of its shape.
    """
    place = _places(groups)
    sets: dict[Hashable, dict[Hashable, list[int]]] = {}
    for index, kernel in enumerate(kernels):
        own: Hashable = (kernel.layer, kernel.operation, kernel.count) if kernel.layer else index
        if kernel.layer in place:
            if kernel.count > 1:
                raise SettingsError(f"groups: {kernel.layer!r} stands for {kernel.count} layers: name each of them")
            group, branch = place[kernel.layer]
            sets.setdefault((group, kernel.operation is Operation.FORWARD), {}).setdefault(branch, []).append(index)
        else:
            sets.setdefault(own if groups else "all", {}).setdefault(own, []).append(index)
    return tuple(tuple(map(tuple, branches.values())) for branches in sets.values())
