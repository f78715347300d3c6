"""The graph of a traced step as its code runs it: random numbers stay in order, and the caller's part runs once."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ucudnn.memory.step.graph import Affine, Role, StepGraph, Storage
from ucudnn.memory.torch.subject.traced_values import TracedCall


def executable(
    graph: StepGraph, calls: Sequence[TracedCall], outside: Mapping[int, int], beside: Mapping[str, int]
) -> StepGraph:
    """Return a step whose operations read all that their calls are given, and do the caller's part only once.

    PyTorch's gradient of a convolution's input is given the input, too, of which it needs only the geometry. Operations
    that draw random numbers stay in the program's order, whatever a plan does: they read and write one storage of no
    bytes, which stands for the generator.

    Args:
        graph: the step.
        calls: the call of each operation.
        outside: operations that are the caller's part.
        beside: bytes of storages that no operation accesses and that are there all the time, by name.
    """
    generator = len(graph.storages)
    operations = []
    for index, (operation, call) in enumerate(zip(graph.operations, calls, strict=True)):
        given = {each.storage for each in call.inputs if each.storage < generator}
        drawn = () if operation.repeatable else (generator,)
        reads = {*operation.reads, *drawn} | (given - {*operation.writes})
        repeatable = operation.repeatable and index not in outside
        operations.append(
            replace(operation, reads=tuple(sorted(reads)), writes=(*operation.writes, *drawn), repeatable=repeatable)
        )
    sizes = {"random number generator": 0, **beside}
    found = tuple(Storage(name=name, role=Role.BUFFER, size=Affine(size)) for name, size in sizes.items())
    return replace(graph, operations=tuple(operations), storages=(*graph.storages, *found))
