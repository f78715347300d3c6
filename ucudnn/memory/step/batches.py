"""One step graph from two: a step that was recorded at two mini-batches stands for every mini-batch."""

from dataclasses import replace

from ucudnn.errors import StepGraphError
from ucudnn.memory.step.graph import Affine, StepGraph, StepOperation, Storage


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
        operations=tuple(_join_operations(*pair, batches) for pair in operations),
        storages=tuple(_join_storages(*pair, batches) for pair in storages),
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


def _join_operations(mine: StepOperation, theirs: StepOperation, batches: tuple[int, int]) -> StepOperation:
    _check_same("operation", mine, theirs, batches, "flops", "traffic", "problem_batch")
    return replace(
        mine,
        flops=_through(batches, mine.flops, theirs.flops, mine.name),
        traffic=_through(batches, mine.traffic, theirs.traffic, mine.name),
        problem_batch=_through(batches, mine.problem_batch, theirs.problem_batch, mine.name),
    )


def _join_storages(mine: Storage, theirs: Storage, batches: tuple[int, int]) -> Storage:
    _check_same("storage", mine, theirs, batches, "size")
    return replace(mine, size=_through(batches, mine.size, theirs.size, mine.name))


def _check_same(
    noun: str, mine: StepOperation | Storage, theirs: StepOperation | Storage, batches: tuple[int, int], *but: str
) -> None:
    """Check that two records of one thing differ in nothing but some quantities; problems are those of one sample."""
    if replace(mine, **{name: getattr(theirs, name) for name in but}) != theirs:
        raise StepGraphError(f"{noun} {mine.name} at a mini-batch of {batches[0]} is not {theirs.name} at {batches[1]}")


def _through(batches: tuple[int, int], value: Affine, other: Affine, name: str) -> Affine:
    first, second = batches
    try:
        return Affine.through(first, value.at(first), second, other.at(second))
    except StepGraphError as error:
        raise StepGraphError(f"{name}: {error}") from error
