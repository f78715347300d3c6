"""The kernels of a step's convolutions: the forward, the gradient of the input and the gradient of the weight of each.

A convolution that PyTorch would not give to cuDNN is left to PyTorch. As in PyTorch, tensors that lie in another memory
format than the kernel's are copied first; the copies live as long as the workspace.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Any, final

import torch

from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.memory.torch.subject.traced_values import TracedCall, TracedTensor
from ucudnn.problem import MOST_ALIGNMENT, ConvolutionProblem
from ucudnn.torch.calls.call_cache import Flags, asked_convolution, present_flags
from ucudnn.torch.calls.problem import Geometry

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepKernel:
    """What one operation of a step asks a convolution library for.

    Attributes:
        problem: what is computed, at the step's mini-batch.
        transposed: whether the convolution is transposed, so that its output is the x of the problem.
        result: which of the gradients of input, weight and bias it is; None for the output of forward.
        output: where the kernel's output lies.
        copied: those among the arguments that lie otherwise.
        bias: the bias that forward adds, or the gradient of the bias that comes with that of the weight; None without.
    """

    name: str
    problem: ConvolutionProblem
    transposed: bool
    result: int | None
    output: TracedTensor
    memory_format: torch.memory_format
    copied: tuple[TracedTensor, ...]
    bias: TracedTensor | None

    def copied_bytes(self, granularity: int) -> int:
        """Return the bytes that the copies take, of which an allocator hands out multiples."""
        sizes = (prod(each.shape) * each.dtype.itemsize for each in self.copied)
        return sum(-(-size // granularity) * granularity for size in sizes)


def step_kernels(program: StepProgram) -> tuple[dict[int, StepKernel], dict[int, str]]:
    """Return the kernels that ucudnn can compute, and why other convolutions are left to PyTorch, by operation."""
    found: dict[int, StepKernel] = {}
    left: dict[int, str] = {}
    flags = present_flags()
    for operation, call in enumerate(program.calls):
        if call.func in (_FORWARD, _BACKWARD):
            kernel = _kernel(program.graph.operations[operation].name, call, program.device, flags)
            if isinstance(kernel, str):
                left[operation] = kernel
            else:
                found[operation] = kernel
    return found, left


def _kernel(name: str, call: TracedCall, device: torch.device, flags: Flags) -> StepKernel | str:
    gradient: TracedTensor | None = None
    bias: Any
    if call.func is _FORWARD:
        x, weight, bias, *rest = call.args
        result, output = None, call.results
    else:
        gradient, x, weight, _, *rest, mask = call.args
        result = 0 if mask[0] else 1
        output, bias = call.results[result], None if mask[0] else call.results[2]
        if not mask[result]:
            return "only the gradient of the bias is wanted"
    stride, padding, dilation, transposed, output_padding, groups = rest
    lists = tuple(stride), tuple(padding), tuple(dilation), bool(transposed), tuple(output_padding), int(groups)
    asked = asked_convolution(x.empty(device), weight.empty(device), Geometry(*lists), flags)
    if isinstance(asked, str):
        return asked
    if gradient is not None and (gradient.shape != asked.out_shape or gradient.dtype is not x.dtype):
        return "the gradient is of another shape or type"
    form = asked.memory_format
    if not _lies_as(output, form):
        return "PyTorch's output lies in another memory format"
    given = [x, weight] if gradient is None else [gradient, weight if mask[0] else x]
    if bias is not None and bias.dtype is not x.dtype:
        return "the bias is of another type"
    problem = asked.forward if result is None else (asked.backward_input, asked.backward_weight)[result]
    return StepKernel(
        name=name,
        problem=replace(problem, alignment=_alignment([each for each in given if _lies_as(each, form)])),
        transposed=bool(transposed),
        result=result,
        output=output,
        memory_format=form,
        copied=tuple(each for each in given if not _lies_as(each, form)),
        bias=bias,
    )


def _lies_as(tensor: TracedTensor, memory_format: torch.memory_format) -> bool:
    return tensor.empty().is_contiguous(memory_format=memory_format)


def _alignment(tensors: list[TracedTensor]) -> int:
    """Return the bytes to which tensors are aligned in storages that begin aligned."""
    low = MOST_ALIGNMENT
    for tensor in tensors:
        low |= tensor.offset * tensor.dtype.itemsize
    return low & -low
