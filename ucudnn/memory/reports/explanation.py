"""Why a step needs the memory that it needs: its peak, who owns it, also over time, its floor, and what would fit."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from ucudnn.errors import StepGraphError
from ucudnn.memory.reports.comparison import step_title
from ucudnn.memory.reports.fits import CostsOf, floor_batch, largest_batch, least_budget
from ucudnn.memory.step.budget import check_budget
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import Phase, Role, StepGraph
from ucudnn.memory.step.liveness import Liveness, measure_liveness
from ucudnn.problem import MOST_SIZE
from ucudnn.units import format_bytes, format_ms

FLOOR = "floor"
"""The bound of every policy that offloads and recomputes, among the policies."""

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
_MOST_GROUPS = 10
_MOST_SAVED = 5  # colors that a reader can tell apart


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
        if role is not Role.ACTIVATION:  # 'layer1.0.conv1.weight.grad' belongs to layer1.0.conv1
            module = re.match(r"(?s)(.+)\.(weight|bias|running_mean|running_var)(\.|$)", name)
            found.append(MemoryOwner(name, _NAMES[role], "", module[1] if module else "", "", size))
            continue
        writer = graph.operations[graph.writers[storage][0]]
        what = SAVED if storage in saved else GRADIENTS if writer.phase is Phase.BACKWARD else PASSING
        found.append(MemoryOwner(name, what, writer.kind, writer.module, writer.source, size))
    if scratch := liveness.scratch_bytes[place]:
        running = graph.operations[liveness.order[place]]
        found.append(MemoryOwner("", SCRATCH, running.kind, running.module, running.source, scratch))
    return tuple(sorted(found, key=lambda each: -each.size))


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


@dataclass(frozen=True, kw_only=True)
class PeakExplanation:
    """Why a step needs its memory.

    Attributes:
        liveness: the step as the program runs it, on a device.
        owners: who owns the memory at the peak, largest first.
        least_budgets: the smallest budget that each policy keeps at the mini-batch, and the floor; None where it is not
            known.
        largest_batches: the largest mini-batch that each policy fits into the budget, and that the floor would; 0 where
            none fits, and at most MOST_SIZE, the largest that is tried. Of a step that was recorded at one mini-batch
            only, no other one is tried.
    """

    liveness: Liveness
    costs: Costs
    owners: tuple[MemoryOwner, ...]
    budget: int
    least_budgets: Mapping[str, int | None]
    largest_batches: Mapping[str, int]

    @property
    def _graph(self) -> StepGraph:
        return self.liveness.graph

    def groups(self, attribute: str) -> tuple[OwnerGroup, ...]:
        """Return the owners of the peak by 'what', 'operation', 'layer' or 'source', largest first."""
        return group_owners(self.owners, attribute, _MOST_GROUPS)

    def title(self) -> str:
        """Return what is explained, as one line."""
        return step_title(self._graph, self.costs)

    def lines(self) -> list[str]:
        """Return the peak, the floor and what would fit, a line each."""
        liveness = self.liveness
        least = ", ".join(
            f"{name} {'unknown' if size is None else format_bytes(size)}" for name, size in self.least_budgets.items()
        )
        batches = ", ".join(
            f"{name} {batch}{' or more' if batch == MOST_SIZE else ''}" for name, batch in self.largest_batches.items()
        )
        parts = {
            "that stay during the whole step": liveness.persistent_bytes,
            "that it reads and writes": liveness.working_bytes,
            f"of {SCRATCH.removesuffix(' of the operation')}": liveness.scratch_bytes,
        }
        sizes = {what: of_all[liveness.floor_place] for what, of_all in parts.items()}
        floor = ", ".join(f"{format_bytes(size)} {what}" for what, size in sizes.items() if size)
        if len(self._graph.recorded) == 1:
            batches += (
                f"; nothing is known of others than {self._graph.batch}, the only one at which the step was recorded"
            )
        return [
            f"peak {format_bytes(liveness.peak_bytes)} at {self._place(liveness.peak_place)}",
            f"floor {format_bytes(liveness.floor_bytes)}, set by {self._place(liveness.floor_place)}: {floor}",
            f"smallest budget: {least}",
            f"largest mini-batch within {format_bytes(self.budget)}: {batches}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON; sizes in bytes, times in milliseconds."""
        liveness = self.liveness
        return {
            "step": self._graph.name,
            "batch": self._graph.batch,
            "recorded_batches": list(self._graph.recorded),
            "device": self.costs.device,
            "time_ms": sum(self.costs.time_ms),
            "peak": {
                "bytes": liveness.peak_bytes,
                **self._operation(liveness.peak_place),
                "by": {
                    attribute: [_values(each) for each in self.groups(attribute)]
                    for attribute in ("what", "operation", "layer", "source")
                },
                "owners": [_values(each) for each in self.owners],
            },
            "floor": {
                "bytes": liveness.floor_bytes,
                **self._operation(liveness.floor_place),
                "persistent_bytes": liveness.persistent_bytes[liveness.floor_place],
                "working_bytes": liveness.working_bytes[liveness.floor_place],
                "scratch_bytes": liveness.scratch_bytes[liveness.floor_place],
            },
            "smallest_budgets": dict(self.least_budgets),
            "budget_bytes": self.budget,
            "largest_batches": dict(self.largest_batches),
        }

    @property
    def times_ms(self) -> tuple[float, ...]:
        """When each operation begins and the last one ends, in milliseconds."""
        return tuple(accumulate((self.costs.time_ms[each] for each in self.liveness.order), initial=0.0))

    def over_time(self) -> MemoryOverTime:
        """Return who owns the memory while each operation runs."""
        return memory_over_time(self.liveness, _MOST_SAVED)

    def phases(self) -> list[tuple[str, float]]:
        """Return the parts of the step and when they begin, in milliseconds."""
        found: dict[str, float] = {}
        for operation, begin in zip(self.liveness.order, self.times_ms, strict=False):
            found.setdefault(self._graph.operations[operation].phase.value, begin)
        return [*found.items()]

    def peak_text(self) -> str:
        """Return the peak and its operation in a few words."""
        operation = self._graph.operations[self.liveness.order[self.liveness.peak_place]]
        where = f" in {operation.module}" if operation.module else ""
        return f"peak {format_bytes(self.liveness.peak_bytes)}: {operation.name}{where}"

    def _place(self, place: int) -> str:
        index = self.liveness.order[place]
        operation = self._graph.operations[index]
        line = f", {operation.source}" if operation.source else ""
        when = f"{operation.phase.value}, {format_ms(self.times_ms[place])} of {format_ms(sum(self.costs.time_ms))}"
        return f"{self._graph.operation_name(index)}{line} ({when})"

    def _operation(self, place: int) -> dict[str, Any]:
        index = self.liveness.order[place]
        operation = self._graph.operations[index]
        return {
            "index": index,
            "operation": operation.name,
            "kind": operation.kind,
            "phase": operation.phase.value,
            "layer": operation.module,
            "source": operation.source,
        }


def explain(
    graph: StepGraph,
    costs_of: CostsOf,
    budget: int | None = None,
    policies: Sequence[str] = ("stock", "checkpoint"),
    progress: Callable[[str], None] = lambda _: None,
) -> PeakExplanation:
    """Return why a step needs its memory.

    Mini-batches are looked for within `budget` bytes, those of the device's memory by default, for the floor and for
    some policies. `progress` is called with what is about to be done.

    Raises:
        BudgetError, InvalidValueError, StepGraphError: if the budget is 0, there is no such policy, or no operation.
    """
    if not graph.operations:
        raise StepGraphError(f"{graph.name} has no operations, so that nothing can be explained")
    costs = costs_of(graph)
    if budget == 0:  # no mini-batch fits, whereas within any other budget a smaller one may
        check_budget(graph, costs, budget)
    liveness = measure_liveness(graph, costs)
    budget = costs.memory_bytes if budget is None else budget
    least, batches = dict[str, int | None](), dict[str, int]()
    for name in policies:
        progress(f"looking for the largest mini-batch of policy {name}")
        least[name] = least_budget(name, graph, costs)
        batches[name] = largest_batch(name, graph, costs_of, budget)
    return PeakExplanation(
        liveness=liveness,
        costs=costs,
        owners=owners_at(liveness, liveness.peak_place),
        budget=budget,
        least_budgets={FLOOR: liveness.floor_bytes, **least},
        largest_batches={FLOOR: floor_batch(graph, costs_of, budget), **batches},
    )


def _values(owner: MemoryOwner | OwnerGroup) -> dict[str, Any]:
    values = asdict(owner)
    values["bytes"] = values.pop("size")
    return values
