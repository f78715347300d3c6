"""What PyTorch's compiler must leave alone: code that C++ calls in the midst of an operator, and steps under watch."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ucudnn.backends.fork_locks import LockLevel, new_lock

_F = TypeVar("_F", bound=Callable[..., Any])

_eval_frame: Any = torch._C._dynamo.eval_frame
_lock = new_lock(LockLevel.INNERMOST)
_eager: list[Any] = []  # for each block in which programs run eagerly; the first one has PyTorch's stance


def never_compiled(function: _F) -> _F:
    """Return a function after telling torch.compile to run it, and all that it calls, as it is.

    Where torch.compile gives a frame up, at a graph break in a loop say, it runs the frame as it is and tries to
    compile each frame below. Kernels and hooks in Python are such frames, and it would compile them anew for each
    shape. `torch.compiler.disable` does the same, but it imports the compiler, which takes seconds, and costs a
    microsecond a call.
    """
    skip = _eval_frame._FrameAction.SKIP
    code = getattr(function, "__code__", None)  # functions of C++ have none, and are never compiled
    if code is not None:
        _eval_frame.set_code_exec_strategy(code, _eval_frame._FrameExecStrategy(skip, skip))
    return function


@contextmanager
def eagerly() -> Iterator[None]:
    """Run what torch.compile made as it was before, in all threads; for a block that watches operators.

    With a mode that watches them, PyTorch would give up each frame that it meets, and for good. All compiled modules of
    a process begin with the same frame, so none of them would ever be compiled again.
    """
    before = _eval_frame.set_eval_frame(None)  # of a frame that was given up, and runs this block
    with _lock:
        _eager.append(None)
    try:
        stop_compiler()
        yield
    finally:
        with _lock:
            if len(_eager) == 1 and _eager[0] is not None:
                _eager[0].__exit__(None, None, None)
            _eager.pop()
        _eval_frame.set_eval_frame(before)


def stop_compiler() -> None:
    """Let programs run eagerly in a block that does so, if the process has compiled its first one since it began."""
    if _eager and _eager[0] is None and "torch._dynamo.eval_frame" in sys.modules:
        with _lock:
            if _eager and _eager[0] is None:
                _eager[0] = torch.compiler.set_stance("force_eager")


class EagerOperators(TorchDispatchMode):
    """Sees each operator of a thread, and runs `eagerly` what torch.compile made."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: list[Any] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that PyTorch compiles what it meets before `stop_compiler`, in other threads, too."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled meanwhile, and PyTorch would go through its compiler in each call."""
        return False

    def __enter__(self) -> Self:
        self._blocks.append(eagerly())
        self._blocks[-1].__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._blocks.pop().__exit__(None, None, None)
