"""In which groups a step hands gradients over, so that DistributedDataParallel averages them beside backward.

DistributedDataParallel begins to average a bucket when autograd has accumulated the last of its gradients. In the first
step it notes in which order they come, and makes its buckets anew in this order. The order decides on the last bits of
sums over more than two ranks. So gradients come in the order of the plain loop, and the step in which the order is
noted hands all of them over when it has ended. A group ends where a bucket is full. A step whose groups end elsewhere
would have the same gradients, and only average them later.
"""

import sys
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import replace

from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from ucudnn.memory.torch.subject.step_program import StepProgram


def with_groups(program: StepProgram, parallel: DistributedDataParallel, arrivals: Sequence[int]) -> StepProgram:
    """Return a step whose sources stand in groups; the gradients of one group are handed over together.

    Autograd takes the memory of most gradients as it is. It copies those that lie otherwise than their parameter, or
    share memory. These come last, because the plan does not count the copies, and has most room at the end.
    """
    counts = Counter(each.storage for each in program.gradients if each is not None)
    others = (*(tensor for _, tensor in program.persistent), *program.inputs, *program.outputs, *program.grad_outputs)
    shared = {each.storage for each in others} | {storage for storage, count in counts.items() if count > 1}
    early = [each for each in arrivals if _taken_as_it_is(program, each, shared)]
    absent = [index for index, each in enumerate(program.gradients) if each is None]
    places = {id(_parameter(program, source)): place for place, source in enumerate(early)}
    ends = {
        max((places.get(id(each), -1) for each in bucket), default=-1) for bucket in _buckets(program, parallel, early)
    }
    groups: list[list[int]] = [[*absent]]
    for place, source in enumerate(early):
        groups[-1].append(source)
        if place in ends:
            groups.append([])
    taken = {each for group in groups for each in group}
    groups[-1] += [source for source in range(len(program.sources)) if source not in taken]
    order = dict.fromkeys([*absent, *arrivals, *range(len(program.sources))])
    return replace(program, groups=tuple(tuple(group) for group in groups if group), order=tuple(order))


def _buckets(program: StepProgram, parallel: DistributedDataParallel, early: Sequence[int]) -> list[list[Tensor]]:
    ignored = parallel.parameters_to_ignore
    known = [each for name, each in parallel.module.named_parameters() if each.requires_grad and name not in ignored]
    averaged = {id(each) for each in known}
    arriving = [each for each in (_parameter(program, source) for source in early) if id(each) in averaged]
    cap = parallel.bucket_bytes_cap
    first = getattr(distributed, "_DEFAULT_FIRST_BUCKET_BYTES", cap)
    limits = [first, cap] if parallel.bucket_bytes_cap_default else [cap]
    limits = list(getattr(parallel, "bucket_bytes_cap_list", ())) or limits  # since PyTorch 2.13
    rebuilt = parallel.static_graph or not parallel.find_unused_parameters
    divide = getattr(distributed, "_compute_bucket_assignment_by_size", None)  # without it, buckets are averaged late
    found = []
    for tensors, sizes in ((arriving, limits), (known, [sys.maxsize] if rebuilt else limits)):
        if tensors and divide is not None:
            buckets, _ = divide(tensors, sizes, [False] * len(tensors))
            found += [[tensors[index] for index in bucket] for bucket in buckets]
    return found


def _parameter(program: StepProgram, source: int) -> Tensor:
    return program.persistent[program.sources[source][1]][0]


def _taken_as_it_is(program: StepProgram, source: int, shared: Set[int]) -> bool:
    gradient, (is_parameter, index) = program.gradients[source], program.sources[source]
    if gradient is None or not is_parameter or gradient.storage >= len(program.graph.storages):
        return False
    parameter = program.persistent[index][0]
    strides = zip(gradient.shape, gradient.stride, parameter.stride(), strict=True)
    return (  # it lies in memory as its parameter does, each without holes
        gradient.storage not in shared
        and gradient.dtype is parameter.dtype
        and gradient.bytes_touched == parameter.numel() * parameter.itemsize
        and all(own == other if size != 1 else own for size, own, other in strides)
    )
