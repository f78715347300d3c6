"""Divides the parameters, gradients and optimizer state of a step among ranks, and times its collectives.

With n ranks in a ring, a collective of so many bytes, those of the whole tensor, takes

    T = latency * (n - 1) + (n - 1) / n * bytes / bandwidth

Collectives run one after another, and take nothing from compute and copies beside them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, final

from ucudnn.errors import InvalidValueError
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import RANKS, Affine, Phase, Role, StepGraph, StepOperation, Storage

_Value = TypeVar("_Value")
_SCALAR = 8  # bytes at most of what is whole on each rank
_DIVIDED = (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE)


@final
@dataclass(frozen=True, kw_only=True)
class RankLink:
    """The link between ranks.

    Attributes:
        latency_ms: milliseconds from one rank to the next.
        bytes_per_ms: bandwidth of each rank.
        source: where both are from.
    """

    ranks: int
    latency_ms: float = 0.01
    bytes_per_ms: float = 2e8
    source: str = "assumed"

    def time_ms(self, size: int) -> float:
        """Return how long a collective takes of a tensor of so many bytes, which all ranks together hold."""
        others = self.ranks - 1
        return self.latency_ms * others + others / self.ranks * size / self.bytes_per_ms

    def costs(self, graph: StepGraph, costs: Costs) -> Costs:
        """Return the costs of a step with the times of its collectives, which need no scratch of the allocator."""
        times = [
            self.time_ms(size) if (size := gathered_bytes(graph, index)) else time
            for index, time in enumerate(costs.time_ms)
        ]
        scratch = (0 if index in graph.collectives else size for index, size in enumerate(costs.scratch_bytes))
        return replace(costs, time_ms=tuple(times), scratch_bytes=tuple(scratch))


def gathered_bytes(graph: StepGraph, operation: int) -> int:
    """Return the bytes of the whole tensor of a collective; 0 for any other operation."""
    found = graph.operations[operation]
    if operation not in graph.collectives:
        return 0
    return max(graph.sizes[each] for each in (*found.reads, *found.writes))


def sharded_step(graph: StepGraph, costs: Costs, link: RankLink) -> tuple[StepGraph, Costs]:
    """Return the step of each of several ranks as `fit(..., mesh=)` has it, with what it is predicted to take.

    Each rank has the mini-batch of the step. A parameter is gathered where forward or backward reads it first, and its
    gradient is averaged when it is whole. The optimizer takes as much less time as there are ranks.

    Raises:
        InvalidValueError: if gradients exist before the step, which then are no results of this one alone.
    """
    if graph.gradients_kept:
        raise InvalidValueError(f"{graph.name} keeps gradients, and those of several ranks are averaged: free them")
    writer = _ShardedWriter(graph, link.ranks)
    before = [each for operation in range(len(graph.operations)) for each in writer.operations_of(operation)]
    origins, operations = zip(*before, strict=True) if before else ((), ())
    found = replace(graph, operations=tuple(operations), storages=tuple(writer.storages))

    def moved(values: Sequence[_Value], none: _Value) -> tuple[_Value, ...]:
        return tuple(none if origin is None else values[origin] for origin in origins)

    parts = [link.ranks if each.phase is Phase.OPTIMIZER else 1 for each in operations]
    places = {origin: index for index, origin in enumerate(origins) if origin is not None}
    made = replace(
        costs,
        device=f"{link.ranks} ranks of {costs.device}",
        time_ms=tuple(time / part for time, part in zip(moved(costs.time_ms, 0.0), parts, strict=True)),
        scratch_bytes=tuple(-(-size // part) for size, part in zip(moved(costs.scratch_bytes, 0), parts, strict=True)),
        issue_ms=moved(costs.issue_ms, 0.0) if costs.issue_ms else (),
        configurations={places[each]: front for each, front in costs.configurations.items()},
        scratch_pieces={},
        modelled=True,
    )
    return found, link.costs(found, made)


class _ShardedWriter:
    """Writes the operations of a step for one of several ranks.

    Attributes:
        storages: the storages of the step, and behind them what is whole while the step runs.
    """

    def __init__(self, graph: StepGraph, ranks: int) -> None:
        self._graph, self._whole = graph, dict[int, int]()
        changed = {each for at in graph.operations[: graph.optimizer_begins] for each in at.writes}
        updates = set(range(graph.optimizer_begins, len(graph.operations)))
        self.storages: list[Storage] = []
        for index, each in enumerate(graph.storages):
            divided = each.role in _DIVIDED and graph.sizes[index] > _SCALAR
            divided &= each.role is not Role.PARAMETER or index not in changed
            temporary = each.role is Role.ACTIVATION and updates.issuperset(graph.accesses[index])
            part = Affine(*(-(-size // ranks) for size in (each.size.fixed, each.size.per_sample)))
            self.storages.append(replace(each, size=part) if divided or temporary else each)
            if divided and each.role is not Role.OPTIMIZER_STATE:
                self._whole[index] = -1
        self._last = {each: graph.writers[each][-1] for each in self._whole if graph.writers[each]}

    def operations_of(self, index: int) -> Iterator[tuple[int | None, StepOperation]]:
        """Yield an operation with its index, behind gathers of what it reads, and before the averages of gradients."""
        operation = self._graph.operations[index]
        if operation.phase is Phase.OPTIMIZER:
            yield index, operation
            return
        for storage in operation.reads:
            if self._whole.get(storage) == -1 and self._graph.storages[storage].role is Role.PARAMETER:
                yield None, self._collective("all_gather", operation, storage, self._whole_of(storage))
        reads, writes = (
            tuple(sorted(self._whole_of(each) for each in accessed)) for accessed in (operation.reads, operation.writes)
        )
        yield index, replace(operation, reads=reads, writes=writes)
        for storage in operation.writes:
            if self._last.get(storage) == index:
                yield None, self._collective("reduce_scatter", operation, self._whole[storage], storage)

    def _whole_of(self, storage: int) -> int:
        if self._whole.get(storage) == -1:
            own = self._graph.storages[storage]
            self._whole[storage] = len(self.storages)
            self.storages.append(Storage(name=f"whole {own.name}", role=Role.ACTIVATION, size=own.size))
        return self._whole.get(storage, storage)

    def _collective(self, kind: str, beside: StepOperation, source: int, target: int) -> StepOperation:
        return StepOperation(
            name=f"{kind} of {self.storages[source].name}",
            kind=f"{RANKS}.{kind}",
            phase=beside.phase,
            dtype=beside.dtype,
            reads=(source,),
            writes=(target,),
            module=beside.module,
        )
