"""What PyTorch's compiler must leave alone: code that C++ calls in the midst of an operator, and steps under watch."""

import sys
from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ucudnn.backends.fork_locks import LockLevel, new_lock

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


class EagerOperators(TorchDispatchMode):
    """Sees each operator of a thread; what torch.compile made runs eagerly meanwhile, in all threads.

    With another mode, PyTorch would give up each frame that it meets, and for good. All compiled modules of a process
    begin with the same frame, so none of them would ever be compiled again.
    """

    _lock = new_lock(LockLevel.INNERMOST)
    _entered = 0
    _stance: Any = None

    def __enter__(self) -> Self:
        mode = EagerOperators
        with mode._lock:
            if not mode._entered and "torch._dynamo.eval_frame" in sys.modules:  # else nothing has been compiled
                mode._stance = torch.compiler.set_stance("force_eager")
            mode._entered += 1
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        mode = EagerOperators
        with mode._lock:
            mode._entered -= 1
            if not mode._entered and mode._stance is not None:
                mode._stance.__exit__(*error)
                mode._stance = None
