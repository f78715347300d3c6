"""Convolution layers, and the rows of tables that describe them."""

from dataclasses import dataclass

from ucudnn.kernel import Kernel
from ucudnn.problem import ConvolutionProblem, Operation

LayerRow = tuple[str, int, int, int, int, int | tuple[int, ...], int | tuple[int, ...], int]
"""Name of the first such layer, count, channels, height = width (= depth), filters, kernel, padding and stride.

A kernel or a padding is one number for all dimensions, or has a number for each.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A convolution layer."""

    name: str
    forward: ConvolutionProblem
    count: int = 1

    @classmethod
    def of_row(cls, row: LayerRow, batch: int, dimensions: int) -> "Layer":
        """Return the layer of a row with a mini-batch size and a number of spatial dimensions."""
        name, count, channels, size, filters, kernel, padding, stride = row
        problem = ConvolutionProblem(
            operation=Operation.FORWARD,
            batch=batch,
            channels=channels,
            spatial=(size,) * dimensions,
            filters=filters,
            kernel=kernel if isinstance(kernel, tuple) else (kernel,) * dimensions,
            padding=padding if isinstance(padding, tuple) else (padding,) * dimensions,
            stride=(stride,) * dimensions,
        )
        return cls(name=name, forward=problem, count=count)

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the layer's three kernels: Forward, BackwardData, BackwardFilter."""
        return tuple(
            Kernel(layer=self.name, problem=self.forward.with_operation(operation), count=self.count)
            for operation in Operation
        )
