"""The graph of a traced step as its code runs it: random numbers stay in order, and the caller's part runs once."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ucudnn.memory.step.graph import Affine, Role, StepGraph, Storage
from ucudnn.memory.torch.subject.traced_values import TracedCall

_GENERATOR = "random number generator"


def with_generator(graph: StepGraph) -> StepGraph:
    """Return a step whose operations that draw random numbers stay in the program's order, whatever a plan does.

    They read and write one storage of no bytes, which stands for the generator.
    """
    drawing = [index for index, each in enumerate(graph.operations) if not each.repeatable]
    number = len(graph.storages)
    operations = list(graph.operations)
    for index in drawing:
        old = operations[index]
        operations[index] = replace(old, reads=(*old.reads, number), writes=(*old.writes, number))
    generator = Storage(name=_GENERATOR, role=Role.BUFFER, size=Affine(0))
    return replace(graph, operations=tuple(operations), storages=(*graph.storages, generator))


def with_beside(graph: StepGraph, beside: Mapping[str, int]) -> StepGraph:
    """Return a step with storages that no operation accesses, which are there all the time."""
    found = tuple(Storage(name=name, role=Role.BUFFER, size=Affine(size)) for name, size in beside.items())
    return replace(graph, storages=(*graph.storages, *found))


def executable(graph: StepGraph, calls: Sequence[TracedCall], outside: Mapping[int, int]) -> StepGraph:
    """Return a step whose operations read all that their calls are given, and do the caller's part only once.

    PyTorch's gradient of a convolution's input is given the input, too, of which it needs only the geometry.
    """
    operations = []
    for index, (operation, call) in enumerate(zip(graph.operations, calls, strict=True)):
        given = {each.storage for each in call.inputs if each.storage < len(graph.storages)}
        reads = tuple(sorted({*operation.reads} | (given - {*operation.writes})))
        operations.append(replace(operation, reads=reads, repeatable=operation.repeatable and index not in outside))
    return replace(graph, operations=tuple(operations))
