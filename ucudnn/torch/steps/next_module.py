"""What is done when a module is called next: work of a step that must not come before its forward pass begins."""

import sys
from collections.abc import Callable
from typing import Any, final

from torch.nn.modules.module import register_module_forward_pre_hook


@final
class NextModule:
    """Calls a function once, before any module of the process is called next."""

    def __init__(self) -> None:
        self._hook: Any = None

    @property
    def is_awaited(self) -> bool:
        """Whether a function waits to be called."""
        return self._hook is not None

    def wait(self, action: Callable[[], object]) -> None:
        """Call a function before the next module is called."""
        self.forget()

        def called(*_: object) -> None:
            if self._hook is not None:  # or another thread was faster
                self.forget()
                action()

        self._hook = register_module_forward_pre_hook(called)

    def forget(self) -> None:
        """Call nothing any more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def has_compiled() -> bool:
    """Return whether PyTorch has compiled anything in this process; torch._dynamo counts that."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters.get("frames"))
