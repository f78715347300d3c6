"""Slices of gradients that are read long after the rest of them: a copy is kept, so that the rest can go.

The gradient of a concatenation is one tensor, of which the skip of a U-Net reads its channels at the end of backward.
"""

from collections.abc import Iterator
from dataclasses import replace

from ucudnn.memory.step.graph import Role
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.memory.torch.subject.traced_values import TracedTensor
from ucudnn.memory.torch.tracing.assemble import writes

_FAR = 4  # calls in between
_GAIN = 2  # times the bytes of the slice that the whole has at least


def kept_slices(program: StepProgram) -> Iterator[tuple[int, TracedTensor, list[int]]]:
    """Yield slices that are copied, each with the call behind which that is done, and the calls that read the copy."""
    graph, calls = program.graph, program.calls
    ends = (*program.outputs, *program.grad_outputs, *program.gradients)
    others = {each.storage for each in ends if each is not None}
    others |= {each.storage for _, call in program.uncounted for each in (*call.inputs, *call.outputs)}
    for storage, readers in enumerate(graph.readers):
        if graph.storages[storage].role is not Role.ACTIVATION or storage in others or not readers:
            continue
        reads = [{each for each in calls[at].inputs if each.storage == storage} for at in readers]
        first = reads.index(reads[-1])
        late = readers[first:]
        before = max((each for each in graph.accesses[storage] if each < late[0]), default=-1)
        changed = {each.storage for at in late for each in (*writes(calls[at]), *calls[at].outputs)}
        is_far = graph.backward_begins <= before < late[0] - _FAR and late[-1] < graph.optimizer_begins
        if is_far and len(reads[-1]) == 1 and all(each == reads[-1] for each in reads[first:]):
            (part,) = reads[-1]
            is_small = 0 not in part.stride and part.bytes_touched * _GAIN <= program.sizes[storage]
            if part.is_plain and is_small and storage not in changed:
                yield before, part, [*late]


def alone(part: TracedTensor, storage: int) -> TracedTensor:
    """Return how a slice lies in a storage of its own, with its dimensions in the same order."""
    stride, step = [0] * len(part.shape), 1
    for dim in sorted(range(len(part.shape)), key=lambda each: (part.stride[each], part.shape[each])):
        stride[dim] = step
        step *= part.shape[dim]
    return replace(part, storage=storage, stride=tuple(stride), offset=0)
