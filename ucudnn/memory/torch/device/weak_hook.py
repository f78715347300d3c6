"""Hooks of tensors and optimizers that keep nothing alive.

A tensor holds its hooks where Python's collector of garbage may not see them. So an object whose method is a hook of
its own tensor would stay for ever, and the tensor with it.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that calls a method as long as its object is there."""
    reference = WeakMethod(method)

    def hook(*args: Any) -> None:
        found = reference()
        if found is not None:
            found(*args)

    return hook
