"""Divides the parameters, gradients and optimizer state of a step among ranks, and times its collectives.

With n ranks in a ring, a collective of so many bytes, those of the whole tensor, takes

    T = latency * (n - 1) + (n - 1) / n * bytes / bandwidth

Collectives run one after another, and take nothing from compute and copies beside them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, final

from ucudnn.errors import InvalidValueError
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import RANKS, Affine, Phase, Role, StepGraph, StepOperation, Storage

_Value = TypeVar("_Value")
BUCKET_BYTES = 4 * 2**20
"""Most bytes of what is gathered or averaged together: a collective of few bytes takes as long as one of some MiB."""
_BUCKETS = 16  # of a model at least, so that a plan of a small one has something to choose from
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
    """Return the bytes of the whole tensors of a collective; 0 for any other operation."""
    found = graph.operations[operation]
    if operation not in graph.collectives:
        return 0
    return max(sum(graph.sizes[each] for each in accessed) for accessed in (found.reads, found.writes))


def buckets(
    things: Sequence[_Value], size: Callable[[_Value], int], kind: Callable[[_Value], object]
) -> list[list[_Value]]:
    """Return what is gathered or averaged together, in order: small things of one kind, though large ones are between.

    Args:
        things: what is gathered or averaged.
        size: bytes of each.
        kind: tells which may be together; None is the kind of what is alone.
    """
    found: list[list[_Value]] = []
    most = min(BUCKET_BYTES, sum(map(size, things)) // _BUCKETS)
    filling: dict[object, tuple[list[_Value] | None, int]] = {}
    for each in things:
        own, more = kind(each), size(each)
        bucket, filled = filling.get(own, (None, 0))
        if bucket is None or filled + more > most:
            bucket, filled = [], 0
            found.append(bucket)
        bucket.append(each)
        if own is not None and filled + more <= most:
            filling[own] = bucket, filled + more
    return found


def sharded_step(graph: StepGraph, costs: Costs, link: RankLink) -> tuple[StepGraph, Costs]:
    """Return the step of each of several ranks as `fit(..., mesh=)` has it, with what it is predicted to take.

    Each rank has the mini-batch of the step. A parameter is gathered where forward or backward reads it first, and its
    gradient is averaged when it is whole, small ones of neighbours together. The optimizer takes as much less time as
    there are ranks.

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
        roles = {each: graph.storages[each].role for each in self._whole}
        read = [each for each, role in roles.items() if role is Role.PARAMETER and graph.readers[each]]
        last = {
            each: graph.writers[each][-1]
            for each, role in roles.items()
            if role is Role.GRADIENT and graph.writers[each]
        }
        size = graph.sizes.__getitem__
        together = [*buckets(read, size, roles.get), *buckets([*last], size, roles.get)]
        self._bucket = {each: tuple(bucket) for bucket in together for each in bucket}
        self._last = {each: max(last[other] for other in self._bucket[each]) for each in last}

    def operations_of(self, index: int) -> Iterator[tuple[int | None, StepOperation]]:
        """Yield an operation with its index, behind gathers of what it reads, and before the averages of gradients."""
        operation = self._graph.operations[index]
        if operation.phase is Phase.OPTIMIZER:
            yield index, operation
            return
        for storage in operation.reads:
            if self._whole.get(storage) == -1 and self._graph.storages[storage].role is Role.PARAMETER:
                own = self._bucket[storage]
                yield None, self._collective("all_gather", operation, own, [self._whole_of(each) for each in own])
        reads, writes = (
            tuple(sorted(self._whole_of(each) for each in accessed)) for accessed in (operation.reads, operation.writes)
        )
        yield index, replace(operation, reads=reads, writes=writes)
        for own in dict.fromkeys(self._bucket[each] for each in operation.writes if self._last.get(each) == index):
            yield None, self._collective("reduce_scatter", operation, [self._whole[each] for each in own], own)

    def _whole_of(self, storage: int) -> int:
        if self._whole.get(storage) == -1:
            own = self._graph.storages[storage]
            self._whole[storage] = len(self.storages)
            self.storages.append(Storage(name=f"whole {own.name}", role=Role.ACTIVATION, size=own.size))
        return self._whole.get(storage, storage)

    def _collective(
        self, kind: str, beside: StepOperation, sources: Sequence[int], targets: Sequence[int]
    ) -> StepOperation:
        return StepOperation(
            name=f"{kind} of {self.storages[sources[0]].name}",
            kind=f"{RANKS}.{kind}",
            phase=beside.phase,
            dtype=beside.dtype,
            reads=tuple(sorted(sources)),
            writes=tuple(sorted(targets)),
            module=beside.module,
        )
