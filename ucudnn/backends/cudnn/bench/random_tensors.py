"""The tensors on a GPU on which algorithms are measured."""

from collections.abc import Callable

from ucudnn.arrays import BiasedFilters
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer, Gpu
from ucudnn.problem import ConvolutionProblem

Operands = tuple[DeviceBuffer, DeviceBuffer | BiasedFilters, DeviceBuffer]
"""x, w and y. Where a problem adds a bias, it comes with w."""


def random_operands(
    problem: ConvolutionProblem, device: Gpu, allocate: Callable[[int], DeviceBuffer]
) -> tuple[DeviceBuffer, DeviceBuffer | BiasedFilters, DeviceBuffer]:
    """Return x, w and y with random numbers in [-0.5, 0.5), the same in every run."""
    sizes = [problem.x_bytes, problem.w_bytes, problem.y_bytes]
    if problem.biased:
        sizes.append(problem.filters * problem.dtype.itemsize)
    x, w, y, *bias = buffers = [allocate(size) for size in sizes]
    for seed, buffer in enumerate(buffers):
        device.fill(buffer, problem.w_dtype if buffer is w else problem.dtype, seed)
    return x, BiasedFilters(w, bias[0]) if bias else w, y


def addresses_of(operands: Operands) -> tuple[int, int | BiasedFilters, int]:
    """Return the addresses of x, w and y, in the form that prepared calls take."""
    x, w, y = operands
    filters = BiasedFilters(w.w.address, w.bias.address) if isinstance(w, BiasedFilters) else w.address
    return x.address, filters, y.address
