"""μ-cuDNN: convolutions in micro-batches, so that fast algorithms fit a workspace limit."""

from ucudnn.errors import UcudnnError as UcudnnError
from ucudnn.handle import Handle as Handle
from ucudnn.policy import BatchSizePolicy as BatchSizePolicy
from ucudnn.problem import ConvolutionProblem as ConvolutionProblem
from ucudnn.problem import DataType as DataType
from ucudnn.problem import Layout as Layout
from ucudnn.problem import MathMode as MathMode
from ucudnn.problem import Operation as Operation
from ucudnn.profiles.measurement import Effort as Effort

__all__ = [
    "BatchSizePolicy",
    "ConvolutionProblem",
    "DataType",
    "Effort",
    "Handle",
    "Layout",
    "MathMode",
    "Operation",
    "UcudnnError",
]
