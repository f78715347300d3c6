"""Code that PyTorch's compiler must leave alone, because C++ calls it in the midst of an operator."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])

_eval_frame: Any = torch._C._dynamo.eval_frame

set_compiler: Callable[[Any], Any] = _eval_frame.set_eval_frame
"""Sets what compiles frames of this thread, None for nothing, and returns what did."""


def never_compiled(function: _F, *, below: bool = False) -> _F:
    """Return a function after telling torch.compile to run it as it is, and all that it calls unless `below`.

    Where torch.compile gives a frame up, at a graph break in a loop say, it runs the frame as it is and tries to
    compile each frame below. Kernels and hooks in Python are such frames, and it would compile them anew for each
    shape. `torch.compiler.disable` does the same, but it imports the compiler, which takes seconds, and costs a
    microsecond a call.
    """
    actions = _eval_frame._FrameAction
    strategy = _eval_frame._FrameExecStrategy(actions.SKIP, actions.DEFAULT if below else actions.SKIP)
    code = getattr(function, "__code__", None)  # functions of C++ have none, and are never compiled
    if code is not None:
        _eval_frame.set_code_exec_strategy(code, strategy)
    return function
