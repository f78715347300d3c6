"""μ-cuDNN: convolutions in micro-batches, so that fast algorithms fit a workspace limit."""

import importlib
import typing

if typing.TYPE_CHECKING:
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

_OTHERS = {"UcudnnError": "errors", "Handle": "handle", "BatchSizePolicy": "policy", "Effort": "profiles.measurement"}


def __getattr__(name: str) -> typing.Any:
    """Return a public name, whose module is imported only now.

    Python imports this file before the first line of the command `ucudnn`. So it is short: Ctrl-C cannot be taken yet.
    """
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("ucudnn")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_OTHERS.get(name, 'problem')}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
