"""Kernel: one operation of one layer of a network, how often the network holds it, and what its caller is told."""

from dataclasses import dataclass
from typing import NamedTuple, final

from ucudnn.problem import ConvolutionProblem, Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One operation of one layer, counted where layers of the same shape recur.

    Attributes:
        layer: name of the (first such) layer; '' for a call that has no name.
        problem: what the kernel computes, at mini-batch size.
        count: how many layers of the network share the problem.
        spare_bytes: memory of its caller's that serves as its workspace, where that is more than the limit; else 0.
        fresh: whether its output holds nothing that is wanted, so that its tail may serve as workspace.
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

    def __str__(self) -> str:
        """'conv2 (BackwardFilter)', or the problem where nobody named the layer."""
        if self.layer.startswith("#"):
            return f"{self.layer} {self.problem}"
        return f"{self.layer} ({self.operation.value})" if self.layer else str(self.problem)


@final
class KernelKey(NamedTuple):
    """What tells the kernels of one handle apart.

    Each call of a handle makes one to look up its plan; a tuple is made and hashed faster than a dataclass.

    Attributes:
        layer: as in `Kernel`, as are the others.
        problem: what the kernel computes, at mini-batch size.
        spare_bytes: bytes of its caller's memory that serve as its workspace.
        fresh: whether its output's tail may serve as workspace.
    """

    layer: str
    problem: ConvolutionProblem
    spare_bytes: int = 0
    fresh: bool = False

    def kernel(self) -> Kernel:
        """Return the kernel that it stands for."""
        return Kernel(layer=self.layer, problem=self.problem, spare_bytes=self.spare_bytes, fresh=self.fresh)


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualAlgorithm:
    """What a framework is told in place of an algorithm: the handle decides, and owns the workspace.

    Attributes:
        name: 'UCUDNN'.
        workspace_bytes: 0: the framework need not allocate any (paper, section 3.4).
    """

    name: str = "UCUDNN"
    workspace_bytes: int = 0
