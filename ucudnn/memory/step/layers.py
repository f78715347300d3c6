"""The layers of a step: what the methods that work layer by layer see instead of single operations.

A layer of forward is one operation, with the operations after it that only update what it wrote: a convolution and its
in-place ReLU are one layer, as in vDNN. Backward is a sequence of turns; each turn is the operations of one layer that
follow one another. Layers are numbered in the order of forward.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ucudnn.memory.step.graph import Phase, Role, StepGraph

_FULLY_CONNECTED = {"addmm", "mm", "linear"}
_SOFTMAX = {"softmax", "log_softmax", "_softmax", "_log_softmax", "_safe_softmax"}
_DROPOUT = {"dropout", "native_dropout", "bernoulli", "bernoulli_"}


@dataclass(frozen=True, kw_only=True)
class StepLayer:
    """One layer of forward.

    Attributes:
        inputs: its X: saved storages that it is the last one of forward to read, and that backward reads before it
            writes them. So each storage is the input of one layer.
        resident: whether it is of a class that Dymem never offloads: fully connected, Softmax or Dropout.
    """

    operations: tuple[int, ...]
    inputs: tuple[int, ...]
    convolution: bool
    resident: bool


@dataclass(frozen=True, kw_only=True)
class StepLayers:
    """A step in layers.

    Attributes:
        forward: the layers, in order.
        backward: (number of a layer, operations) of each turn, in order; operations of the optimizer count for layer 0.
        classifier: number of the first layer of the classifier, which is the first fully connected one after the last
            convolution; the number of layers where there is none.
    """

    forward: tuple[StepLayer, ...]
    backward: tuple[tuple[int, tuple[int, ...]], ...]
    classifier: int


def find_layers(graph: StepGraph, order: Sequence[int]) -> StepLayers:
    """Return the layers of a step in an order in which forward comes first: see `parts_in_order`."""
    groups = _forward_groups(graph, [each for each in order if each < graph.backward_begins])
    number_of = {operation: number for number, group in enumerate(groups) for operation in group}
    inputs = _inputs(graph, order, number_of)
    names = [_name(graph, each) for each in range(graph.backward_begins)]
    resident = {each for each, name in enumerate(names) if name in _FULLY_CONNECTED | _SOFTMAX}
    dropouts = (graph.operations[each] for each, name in enumerate(names) if name in _DROPOUT)
    for storage in {storage for each in dropouts for storage in each.writes}:  # their masks or their outputs
        resident.update(graph.accesses[storage])
    forward = tuple(
        StepLayer(
            operations=tuple(group),
            inputs=tuple(inputs.get(number, ())),
            convolution=any(each in graph.problems or "convolution" in _name(graph, each) for each in group),
            resident=not resident.isdisjoint(group),
        )
        for number, group in enumerate(groups)
    )
    last = max((number for number, layer in enumerate(forward) if layer.convolution), default=len(forward))
    connected = (
        number
        for number in range(last, len(forward))
        if any(_name(graph, each) in _FULLY_CONNECTED for each in forward[number].operations)
    )
    return StepLayers(
        forward=forward,
        backward=tuple(_turns(graph, order, number_of)),
        classifier=next(connected, len(forward)),
    )


def parts_in_order(graph: StepGraph, order: Sequence[int]) -> tuple[int, ...]:
    """Return an order of a step with forward before backward before the optimizer, else as it is.

    A part depends on nothing behind it, so the storages of the step allow this whenever they allow the order.
    """
    begins = graph.backward_begins, graph.optimizer_begins
    return tuple(sorted(order, key=lambda operation: sum(operation >= each for each in begins)))


def _forward_groups(graph: StepGraph, order: Sequence[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    made: set[int] = set()  # activations that the last group wrote
    for operation in order:
        writes = {each for each in graph.operations[operation].writes if _is_activation(graph, each)}
        accessed = writes.union(each for each in graph.operations[operation].reads if _is_activation(graph, each))
        if groups and (not accessed or (len(accessed) == 1 and accessed == writes and accessed <= made)):
            groups[-1].append(operation)
        else:
            groups.append([operation])
            made = writes
    return groups


def _inputs(graph: StepGraph, order: Sequence[int], number_of: dict[int, int]) -> dict[int, list[int]]:
    places = {operation: place for place, operation in enumerate(order)}
    found: dict[int, list[int]] = {}
    for storage in graph.saved:
        accesses = sorted(graph.accesses[storage], key=places.__getitem__)
        last = [each for each in accesses if each in number_of][-1]
        following = next(each for each in accesses if each not in number_of)
        only_read = storage not in graph.operations[last].writes
        if only_read and storage in graph.operations[following].reads:
            found.setdefault(number_of[last], []).append(storage)
    return found


def _turns(graph: StepGraph, order: Sequence[int], number_of: dict[int, int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    rest = [each for each in order if each not in number_of]
    current = max(number_of.values(), default=0)
    numbers = []
    for operation in rest:
        if graph.operations[operation].phase is Phase.OPTIMIZER:
            current = 0
        else:
            found = _forward_operation(graph, operation, number_of)
            current = current if found is None else number_of[found]
        numbers.append(current)
    for number, group in groupby(zip(numbers, rest, strict=True), key=lambda each: each[0]):
        yield number, tuple(operation for _, operation in group)


def _forward_operation(graph: StepGraph, operation: int, number_of: dict[int, int]) -> int | None:
    """Return the operation of forward that an operation of backward belongs to; None where nothing says so.

    It is the last one of the same module that accesses something that the operation reads; else the last one that reads
    the same parameter; else the last one that accesses anything that the operation reads.
    """
    module = graph.operations[operation].module
    rules: tuple[Callable[[int, int], bool], ...] = (
        lambda other, _: bool(module) and graph.operations[other].module == module,
        lambda _, storage: graph.storages[storage].role is Role.PARAMETER,
        lambda *_: True,
    )
    pairs = [
        (other, storage)
        for storage in graph.operations[operation].reads
        for other in graph.accesses[storage]
        if other in number_of
    ]
    for rule in rules:
        found = [other for other, storage in pairs if rule(other, storage)]
        if found:
            return max(found, key=number_of.__getitem__)
    return None


def _is_activation(graph: StepGraph, storage: int) -> bool:
    return graph.storages[storage].role is Role.ACTIVATION


def _name(graph: StepGraph, operation: int) -> str:
    return graph.operations[operation].kind.rsplit(".", 1)[-1]
