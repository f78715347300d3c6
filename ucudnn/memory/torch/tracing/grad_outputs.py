"""Tangents: the gradients of a step's outputs, with which its backward begins."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ucudnn.memory.step.graph import Phase
from ucudnn.memory.torch.subject.traced_values import TracedTensor

if TYPE_CHECKING:
    from ucudnn.memory.torch.subject.step_program import StepProgram


def origins_of(program: "StepProgram") -> list[set[int]]:
    """Return for each gradient the tangents that it depends on."""
    found: dict[int, set[int]] = {}
    for number, tangent in enumerate(program.tangents):
        found.setdefault(tangent.storage, set()).add(number)
    for operation, call in enumerate(program.calls):
        if call.phase is Phase.BACKWARD and operation not in program.outside:
            origins = set[int]().union(*(found.get(each.storage, ()) for each in call.inputs))
            for storage, _ in program.graph.makes[operation]:
                found.setdefault(storage, set()).update(origins)
    return [set() if each is None else found.get(each.storage, set()) for each in program.gradients]


def lying_as(tensor: Tensor | None, traced: TracedTensor, device: torch.device) -> Tensor:
    """Return a tensor as the trace has it in memory: the tensor itself, or a copy; zeros for None."""
    if tensor is None:
        return torch.empty_strided(traced.shape, traced.stride, dtype=traced.dtype, device=device).zero_()
    lies = tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    if lies == (traced.stride, 0, traced.dtype, False, False):
        return tensor
    made = torch.empty_strided(traced.shape, traced.stride, dtype=traced.dtype, device=tensor.device)
    return made.copy_(tensor)
