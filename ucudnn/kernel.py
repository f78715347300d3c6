"""Kernels: one operation of one layer of a network, and how often the network has it."""

from dataclasses import dataclass
from typing import NamedTuple, final

from ucudnn.problem import ConvolutionProblem, Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One operation of one layer, counted once for all layers of the same shape.

    Attributes:
        layer: name of the first such layer; '' for a call without a name.
        problem: what the kernel computes, at mini-batch size.
        count: how many layers of the network share the problem.
        spare_bytes: bytes of the caller's memory that serve as workspace, if they are more than the limit; else 0.
        fresh: whether the output holds nothing that is wanted, so that its tail may serve as workspace.
    """

    layer: str
    problem: ConvolutionProblem
    count: int = 1
    spare_bytes: int = 0
    fresh: bool = False

    @property
    def operation(self) -> Operation:
        """The operation of the problem."""
        return self.problem.operation

    def key(self) -> "KernelKey":
        """Return the key by which a handle finds its plan."""
        return KernelKey(self.layer, self.problem, self.spare_bytes, self.fresh)

    def __str__(self) -> str:
        """Return for example 'conv2 (BackwardFilter)', or the problem if the layer has no name."""
        if self.layer.startswith("#"):
            return f"{self.layer} {self.problem}"
        return f"{self.layer} ({self.operation.value})" if self.layer else str(self.problem)


@final
class KernelKey(NamedTuple):
    """The key by which a handle looks up the plan of a kernel.

    A plain tuple of the same values finds the same plan, and is made faster on the way of a call. `Kernel` says what
    the attributes are.
    """

    layer: str
    problem: ConvolutionProblem
    spare_bytes: int = 0
    fresh: bool = False

    def kernel(self) -> Kernel:
        """Return the kernel of this key."""
        return Kernel(layer=self.layer, problem=self.problem, spare_bytes=self.spare_bytes, fresh=self.fresh)


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualAlgorithm:
    """The algorithm that a framework gets, because the handle chooses the real ones and owns their workspace.

    Attributes:
        name: 'UCUDNN'.
        workspace_bytes: 0, so that the framework allocates nothing (paper, section 3.4).
    """

    name: str = "UCUDNN"
    workspace_bytes: int = 0
