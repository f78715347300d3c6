"""Kernel: one operation of one layer of a network, and how often the network holds it."""

from dataclasses import dataclass

from ucudnn.problem import ConvolutionProblem, Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One operation of one layer, counted where layers of the same shape recur.

    Attributes:
        layer: name of the (first such) layer; '' for a call that has no name.
        problem: what the kernel computes, at mini-batch size.
        count: how many layers of the network share the problem.
    """

    layer: str
    problem: ConvolutionProblem
    count: int = 1

    @property
    def operation(self) -> Operation:
        """The operation of the problem."""
        return self.problem.operation

    def __str__(self) -> str:
        """'conv2 (BackwardFilter)', or the problem where nobody named the layer."""
        if self.layer.startswith("#"):
            return f"{self.layer} {self.problem}"
        return f"{self.layer} ({self.operation.value})" if self.layer else str(self.problem)
