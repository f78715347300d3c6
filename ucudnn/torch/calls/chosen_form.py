"""The memory format in which PyTorch computes a convolution, and the strides of the tensors that it returns then."""

from functools import partial
from typing import Any, final

import torch
from torch._prims_common import suggest_memory_format

from ucudnn.torch.calls.problem import Geometry
from ucudnn.torch.device.gpu import Sizes


@final
class ChosenForm:
    """PyTorch's own choice for one call.

    The rule is asked from PyTorch and not written down here, because it depends on the version, the processor and, on
    a CPU, `cpu_settings()`: oneDNN follows the order of the input or the filters, PyTorch's own kernels of three
    dimensions and all of float64 but those of two put channels first. From this format follow the strides:

    * PyTorch's own kernels on a CPU have no groups. It computes group by group and joins the results; a part that
      could be of both formats, with one channel say, is joined as contiguous. Two of them return the filters' gradient
      in the format of the filters.
    * cuDNN's gradients ask again, each from the two tensors that it reads, of which one could be of both formats.
    * All others return tensors in this format.

    Attributes:
        backend: name of PyTorch's kernels.
        on_cudnn: whether they are cuDNN's.
        memory_format: the format into which they bring the tensors first; of one dimension, with a second of size 1.
    """

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> None:
        lists = [[*geometry.stride], [*geometry.padding], [*geometry.dilation]]
        arguments = (*lists, geometry.transposed, [*geometry.output_padding], geometry.groups)
        self._choice: Any = torch._C._select_conv_backend(x, weight, None, *arguments)
        self.backend = str(self._choice).rsplit(".", 1)[-1]
        self.on_cudnn = self.backend in ("Cudnn", "CudnnTranspose")
        self._parts = geometry.groups if self.backend.startswith("Slow") else 1
        self._flat = x.dim() == 3
        x, weight = self._given(x).contiguous() if self._flat else self._given(x), self._given(weight)
        if self._flat:  # PyTorch makes the input contiguous, and adds a dimension of size 1
            x, weight = x.unsqueeze(2), weight.unsqueeze(2)
        self.memory_format = self._format_of(x, weight)
        self._x, self._weight = (each.contiguous(memory_format=self.memory_format) for each in (x, weight))

    def output_strides(self, shape: Sizes) -> Sizes:
        """Return the strides of the output, which has this shape."""
        shape = (*shape[:2], 1, *shape[2:]) if self._flat else shape
        return self._strides(shape, 1, self._part_format())

    def gradient_strides(self, grad: torch.Tensor) -> tuple[Sizes, Sizes]:
        """Return the strides of the gradients of input and weight, given the gradient of the output."""
        of_x = of_weight = self._part_format()
        if self.backend in ("Slow2d", "SlowTranspose2d"):
            of_weight = suggest_memory_format(_part(self._weight, 0, self._parts))
        if self.on_cudnn:
            grad = self._given(grad).unsqueeze(2) if self._flat else self._given(grad)
            grad = grad.contiguous(memory_format=self.memory_format)
            grad = grad.contiguous(memory_format=suggest_memory_format(self._x))
            of_x, of_weight = self._format_of(grad, self._weight), self._format_of(self._x, grad)
        return self._strides(self._x.shape, 1, of_x), self._strides(self._weight.shape, 0, of_weight)

    @staticmethod
    def _given(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    def _format_of(self, x: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
        # Some of PyTorch's rules ask whether the device is a CPU; memory that nothing touches costs nothing there.
        like = partial(torch.empty_strided, dtype=x.dtype, device="meta" if self.on_cudnn else "cpu")
        x, weight = (like(each.shape, each.stride()) for each in (x, weight))
        found: torch.memory_format = torch._C._conv_determine_backend_memory_format(x, weight, self._choice)
        return found

    def _part_format(self) -> torch.memory_format:
        return self._format_of(_part(self._x, 1, self._parts), _part(self._weight, 0, self._parts))

    def _strides(self, shape: Sizes, dimension: int, memory_format: torch.memory_format) -> Sizes:
        sizes = [size // self._parts if at == dimension else size for at, size in enumerate(shape)]
        made = torch.empty(sizes, device="meta", memory_format=memory_format)
        if self._parts > 1:
            made = torch.cat([made] * self._parts, dimension)
        return (made.squeeze(2) if self._flat else made).stride()


def cpu_settings() -> tuple[bool, bool, int]:
    """Return PyTorch's settings on which its choice among a CPU's kernels depends."""
    return torch._C._get_mkldnn_enabled(), torch._C._get_nnpack_enabled(), torch.get_num_threads()


def _part(whole: torch.Tensor, dimension: int, parts: int) -> torch.Tensor:
    """Return one group of a tensor, as PyTorch copies it."""
    if parts == 1:
        return whole
    part = whole.narrow(dimension, 0, whole.shape[dimension] // parts)
    return part.contiguous(memory_format=suggest_memory_format(whole))
