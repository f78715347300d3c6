"""One step graph from two: a step that was recorded at two mini-batches stands for every mini-batch."""

from dataclasses import replace
from typing import Any, TypeVar

from ucudnn.errors import StepGraphError
from ucudnn.memory.step.graph import Affine, StepGraph, StepOperation, Storage

_QUANTITIES = {"operation": ("flops", "traffic", "problem_batch"), "storage": ("size",)}
_Entry = TypeVar("_Entry", StepOperation, Storage)


def join_batches(graph: StepGraph, other: StepGraph) -> StepGraph:
    """Return a step whose quantities are affine in the mini-batch, from records at two mini-batches.

    Raises:
        StepGraphError: if the records do not have the same operations and storages, or a quantity does not grow by a
            whole number with each sample. The message names the first difference.
    """
    batches = graph.batch, other.batch
    pairs = ("operations", graph.operations, other.operations), ("storages", graph.storages, other.storages)
    for noun, mine, theirs in pairs:
        if len(mine) != len(theirs):
            raise StepGraphError(
                f"{graph.name} has {len(mine)} {noun} at a mini-batch of {batches[0]} but {len(theirs)} at {batches[1]}"
            )
    operations = zip(graph.operations, other.operations, strict=True)
    storages = zip(graph.storages, other.storages, strict=True)
    return replace(
        graph,
        operations=tuple(_joined("operation", *pair, batches) for pair in operations),
        storages=tuple(_joined("storage", *pair, batches) for pair in storages),
        recorded=batches,
    )


def check_batch(graph: StepGraph, record: StepGraph) -> StepGraph:
    """Return a step, after it was compared with a record at one more mini-batch.

    Raises:
        StepGraphError: if the step is another one at that mini-batch than the record says. The message names the first
            difference.
    """
    joined = join_batches(graph.with_batch(graph.recorded[0]), record)
    rows: list[tuple[StepOperation | Storage, StepOperation | Storage]] = [
        *zip(graph.operations, joined.operations, strict=True),
        *zip(graph.storages, joined.storages, strict=True),
    ]
    for claimed, found in rows:
        if claimed != found:
            raise StepGraphError(
                f"{graph.name}: {claimed.name} is another one at a mini-batch of {record.batch} than the records at"
                f" {' and '.join(map(str, graph.recorded))} say"
            )
    return replace(graph, recorded=(*graph.recorded, record.batch))


def _joined(noun: str, mine: _Entry, theirs: _Entry, batches: tuple[int, int]) -> _Entry:
    """Return one thing from two records of it, which differ in nothing but quantities; problems are of one sample."""
    quantities = _QUANTITIES[noun]
    if replace(mine, **{name: getattr(theirs, name) for name in quantities}) != theirs:
        raise StepGraphError(f"{noun} {mine.name} at a mini-batch of {batches[0]} is not {theirs.name} at {batches[1]}")
    first, second = batches
    try:
        joined: dict[str, Any] = {
            name: Affine.through(first, getattr(mine, name).at(first), second, getattr(theirs, name).at(second))
            for name in quantities
        }
    except StepGraphError as error:
        raise StepGraphError(f"{mine.name}: {error}") from error
    return replace(mine, **joined)
