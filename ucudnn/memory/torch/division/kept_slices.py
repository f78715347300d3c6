"""Slices of gradients that are read long after the rest of them: a copy is kept, so that the rest can go.

The gradient of a concatenation is one tensor, of which the skip of a U-Net reads its channels at the end of backward.
"""

from collections import defaultdict
from dataclasses import replace

from ucudnn.memory.step.graph import Role
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.memory.torch.subject.traced_values import TracedTensor
from ucudnn.memory.torch.tracing.assemble import writes

_FAR = 4  # calls in between
_LEAST_GAIN = 2  # times its bytes that the whole has


def kept_slices(program: StepProgram) -> dict[int, list[tuple[TracedTensor, frozenset[int]]]]:
    """Return by call the slices that are copied behind it, each with the calls that read the copy."""
    graph, found = program.graph, defaultdict[int, list[tuple[TracedTensor, frozenset[int]]]](list)
    ends = (*program.outputs, *program.tangents, *program.gradients)
    others = {each.storage for each in ends if each is not None}
    others |= {each.storage for _, call in program.uncounted for each in (*call.inputs, *call.outputs)}
    for storage, readers in enumerate(graph.readers):
        if graph.storages[storage].role is not Role.ACTIVATION or storage in others or not readers:
            continue
        seen = [{each for each in program.calls[at].inputs if each.storage == storage} for at in readers]
        (*_, last), count = seen, 0
        while count < len(seen) and seen[-1 - count] == last:
            count += 1
        late = readers[-count:]
        before = max((each for each in graph.accesses[storage] if each < late[0]), default=late[0])
        far = graph.backward_begins <= before and late[0] - before > _FAR and late[-1] < graph.optimizer_begins
        changed = any(
            each.storage == storage for at in late for each in (*writes(program.calls[at]), *program.calls[at].outputs)
        )
        if far and len(last) == 1 and not changed:
            (part,) = last
            if part.is_plain and part.bytes_touched * _LEAST_GAIN <= program.sizes[storage] and 0 not in part.stride:
                found[before].append((part, frozenset(late)))
    return found


def alone(part: TracedTensor, storage: int) -> TracedTensor:
    """Return how a slice lies in a storage of its own, with its dimensions in the same order."""
    stride, step = [0] * len(part.shape), 1
    for dim in sorted(range(len(part.shape)), key=lambda each: (part.stride[each], part.shape[each])):
        stride[dim] = step
        step *= part.shape[dim]
    return replace(part, storage=storage, stride=tuple(stride), offset=0)
