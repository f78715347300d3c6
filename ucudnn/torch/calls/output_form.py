"""The form of a kernel's output: new tensors as PyTorch would make them."""

from functools import partial
from math import prod
from typing import final

import torch

from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.torch.calls.problem import DTYPES, format_of, shapes_of
from ucudnn.torch.device.fast_tensors import empty_of
from ucudnn.torch.device.gpu import current_device

_WRITTEN = {Operation.FORWARD: 2, Operation.BACKWARD_DATA: 0, Operation.BACKWARD_FILTER: 1}  # index in x, w, y


@final
class OutputForm:
    """Makes tensors for the output of a problem on the GPU of a number, or on the CPU for -1."""

    __slots__ = (
        *("_device", "_dtype", "_new_here", "_ordinal"),
        *("elements", "memory_format", "size_bytes", "sizes", "strides"),
    )

    def __init__(self, problem: ConvolutionProblem, ordinal: int) -> None:
        self._ordinal = ordinal
        self.sizes = shape = shapes_of(problem)[_WRITTEN[problem.operation]]
        self.memory_format = order = format_of(problem)
        self.strides = strides = torch.empty(shape, device="meta", memory_format=order).stride()
        self._device = torch.device("cpu") if ordinal < 0 else torch.device("cuda", ordinal)
        self._dtype = DTYPES[problem.dtype]
        self._new_here = partial(empty_of(self._device.type), shape, strides, self._dtype)
        self.elements = prod(shape)
        self.size_bytes = self.elements * problem.dtype.itemsize

    def new(self) -> torch.Tensor:
        """Return a new tensor for the output."""
        if self._ordinal < 0 or current_device() == self._ordinal:
            return self._new_here()
        return torch.empty_strided(self.sizes, self.strides, dtype=self._dtype, device=self._device)
