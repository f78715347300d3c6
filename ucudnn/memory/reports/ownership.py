"""Who owns the memory of a step: by operation, by layer, by source line, and over time."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ucudnn.memory.step.graph import Phase, Role
from ucudnn.memory.step.liveness import Liveness

SAVED = "saved for backward"
GRADIENTS = "gradients of activations"
PASSING = "passing in forward"
SCRATCH = "scratch of the operation"
NO_LAYER = "the loss"
_MOST_OF_IT = 0.8
_THIN = 0.03  # of the peak
_NAMES = {
    Role.PARAMETER: "parameters",
    Role.BUFFER: "buffers",
    Role.INPUT: "inputs",
    Role.GRADIENT: "gradients of parameters",
    Role.OPTIMIZER_STATE: "optimizer state",
    Role.OUTPUT: "outputs",
}


@dataclass(frozen=True, slots=True)
class MemoryOwner:
    """A storage, or the scratch of an operation, at one time of a step.

    Attributes:
        name: name of the storage; '' for scratch.
        what: what it is: 'parameters', 'saved for backward' and so on.
        operation: kind of the operation that wrote it first, 'aten.convolution'; '' for what was there before.
        layer: module that called that operation; for parameters, their gradients and state the module that has them.
        source: line that called that operation; '' where none is known.
    """

    name: str
    what: str
    operation: str
    layer: str
    source: str
    size: int


def owners_at(liveness: Liveness, place: int) -> tuple[MemoryOwner, ...]:
    """Return who owns the memory while the operation at a place of the order runs, largest first."""
    graph = liveness.graph
    saved = frozenset(graph.saved)
    found = []
    for storage, size in liveness.owners(place):
        role, name = graph.storages[storage].role, graph.storages[storage].name
        if role is not Role.ACTIVATION:
            found.append(MemoryOwner(name, _NAMES[role], "", _owner(name), "", size))
            continue
        writer = graph.operations[graph.writers[storage][0]]
        what = SAVED if storage in saved else GRADIENTS if writer.phase is Phase.BACKWARD else PASSING
        found.append(MemoryOwner(name, what, writer.kind, writer.module, writer.source, size))
    if scratch := liveness.scratch_bytes[place]:
        running = graph.operations[liveness.order[place]]
        found.append(MemoryOwner("", SCRATCH, running.kind, running.module, running.source, scratch))
    return tuple(sorted(found, key=lambda each: -each.size))


def _owner(name: str) -> str:
    """Return the module of a parameter from its name, 'layer1.0.conv1' for 'layer1.0.conv1.weight.grad'."""
    parts = name.split(".")
    ends = [index for index, part in enumerate(parts) if part in ("weight", "bias", "running_mean", "running_var")]
    return ".".join(parts[: ends[-1]]) if ends else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerGroup:
    """Owners that have something in common."""

    name: str
    storages: int
    size: int


def group_owners(owners: Sequence[MemoryOwner], attribute: str, most: int) -> tuple[OwnerGroup, ...]:
    """Return owners by 'what', 'operation', 'layer' or 'source', largest first; what is over the most is one group.

    Layers are the deepest modules of which a few own most of the memory. Owners without the attribute are grouped by
    what they are.
    """
    depth = layer_depth(owners, most) if attribute == "layer" else 0
    counts, sizes = Counter[str](), Counter[str]()
    for owner in owners:
        name = _cut(owner.layer, depth) if depth else getattr(owner, attribute)
        name = name or (NO_LAYER if attribute == "layer" and owner.operation else owner.what)
        counts[name] += 1
        sizes[name] += owner.size
    groups = [OwnerGroup(name=name, storages=counts[name], size=size) for name, size in sizes.most_common()]
    if len(groups) <= most:
        return tuple(groups)
    rest = groups[most - 1 :]
    storages, size = sum(each.storages for each in rest), sum(each.size for each in rest)
    return (*groups[: most - 1], OwnerGroup(name=f"{len(rest)} others", storages=storages, size=size))


def layer_depth(owners: Sequence[MemoryOwner], most: int) -> int:
    """Return into how many parts names of layers are cut, so that few layers own most of the memory."""
    layers = [owner for owner in owners if owner.layer]
    total = sum(owner.size for owner in layers)
    for depth in range(max((owner.layer.count(".") for owner in layers), default=0) + 1, 1, -1):
        sizes = Counter[str]()
        for owner in layers:
            sizes[_cut(owner.layer, depth)] += owner.size
        if sum(size for _, size in sizes.most_common(most - 1)) >= _MOST_OF_IT * total:
            return depth
    return 1


def _cut(layer: str, depth: int) -> str:
    return ".".join(layer.split(".")[:depth])


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOverTime:
    """Bytes of each owner while each operation runs, in the order of the operations.

    Attributes:
        staying: what is there during the whole step.
        saved: what forward saves for backward, by layer; small layers are joined.
        rest: what comes and goes, and the gradients of parameters.
    """

    staying: Mapping[str, tuple[int, ...]]
    saved: Mapping[str, tuple[int, ...]]
    rest: Mapping[str, tuple[int, ...]]


def memory_over_time(liveness: Liveness, most: int) -> MemoryOverTime:
    """Return who owns how much memory during a step; what is saved for backward has at most so many owners."""
    graph, places = liveness.graph, len(liveness.order)
    kept = [each for each in owners_at(liveness, liveness.peak_place) if each.what == SAVED] if places else []
    depth = layer_depth(kept, most)
    layers = [group.name for group in group_owners(kept, "layer", most)]
    saved = frozenset(graph.saved)
    groups: tuple[dict[str, list[int]], ...] = ({}, {}, {})
    for storage, span in enumerate(liveness.spans):
        if span is None:
            continue
        role = graph.storages[storage].role
        if role is not Role.ACTIVATION:
            name, group = _NAMES[role], groups[2 if role is Role.GRADIENT else 0]
        else:
            writer = graph.operations[graph.writers[storage][0]]
            layer = _cut(writer.module, depth) or NO_LAYER
            name, group = PASSING if writer.phase is Phase.FORWARD else GRADIENTS, groups[2]
            if storage in saved:
                name, group = f"saved by {layer if layer in layers else 'other layers'}", groups[1]
        series = group.setdefault(name, [0] * (places + 2))
        series[max(span[0], 0)] += liveness.sizes[storage]
        series[span[1] + 1] -= liveness.sizes[storage]
    staying, own, rest = ({name: tuple(accumulate(each))[:places] for name, each in group.items()} for group in groups)
    rest[SCRATCH] = liveness.scratch_bytes
    least = _THIN * liveness.peak_bytes
    order = [*(f"saved by {layer}" for layer in layers), "saved by other layers"]
    return MemoryOverTime(
        staying=_joined(_ordered(staying, _NAMES.values()), least),
        saved=_ordered(own, order),
        rest=_ordered(rest, (_NAMES[Role.GRADIENT], PASSING, GRADIENTS, SCRATCH)),
    )


def _joined(series: Mapping[str, tuple[int, ...]], least: float) -> dict[str, tuple[int, ...]]:
    """Return series with those joined that are thin; the name of the joint one leaves out what is next to nothing."""
    thin = {name: each for name, each in series.items() if max(each) < least}
    joint = [sum(each) for each in zip(*thin.values(), strict=True)]
    seen = [name for name, each in thin.items() if max(each) > max(joint) / 10]
    found = {name: each for name, each in series.items() if name not in thin}
    return {**found, ", ".join(seen): tuple(joint)} if thin else found


def _ordered(series: Mapping[str, tuple[int, ...]], names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    return {name: series[name] for name in names if any(series.get(name, ()))}
