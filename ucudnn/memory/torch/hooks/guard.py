"""Guard: runs an operation again that found no memory, after saved tensors have left the device."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any, final

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ucudnn.memory.torch.hooks.live_bytes import CountedBytes
from ucudnn.memory.torch.hooks.repeated_call import random_state, set_random_state
from ucudnn.torch.device.compilation import EagerOperators, never_compiled
from ucudnn.units import parse_bytes

_TRIED = re.compile(r"Tried to allocate ([\d.]+) (\w+)")
_NORMS = ("aten.native_batch_norm.", "aten.cudnn_batch_norm.", "aten.miopen_batch_norm.")


def tried_bytes(error: torch.OutOfMemoryError) -> int:
    """Return the bytes that an operation asked for in vain; 0 where the error does not say."""
    found = _TRIED.search(str(error))
    return parse_bytes(f"{found[1]}{found[2].replace('bytes', 'B')}") if found else 0


@cache
def _traits(func: Any) -> tuple[bool, bool, bool]:
    """Return whether an operation can run again, draws random numbers then, and writes to running statistics."""
    schema = getattr(func, "_schema", None)
    again = schema is not None and not schema.is_mutable
    return again, again and torch.Tag.nondeterministic_seeded in func.tags, str(func).startswith(_NORMS)


@final
class Guard(EagerOperators):
    """Guards the operations of a thread while it is on.

    An operation that writes to no argument can run again. Batch normalization writes to running statistics, which its
    schema does not say.

    Args:
        device: whose random numbers are drawn again.
        free: frees some bytes; False if it cannot.
        explained: returns the error that is raised then.
        counted: what counts the results on a CPU.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        device: torch.device,
        free: Callable[[int], bool],
        explained: Callable[[torch.OutOfMemoryError], Exception],
        counted: CountedBytes | None,
    ) -> None:
        super().__init__()
        self._device, self._free, self._explained, self._counted = device, free, explained, counted

    def turn(self, *, on: bool) -> None:
        """Turn it on or off for this thread, unless another mode is in its way."""
        top = _get_current_dispatch_mode()
        if on and top is not self and (top is None or isinstance(top, Guard)):
            self.__enter__()
        elif not on and top is self:
            self.__exit__(None, None, None)

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        again, draws, writes = _traits(func)
        state = random_state(self._device) if draws else None
        statistics = args[3:5] if writes else ()
        before = [each if each is None else each.clone() for each in statistics]
        if self._counted is not None:
            self._count(self._counted, (args, kwargs))
        while True:
            try:
                found = func(*args, **(kwargs or {}))
                if self._counted is not None:
                    self._counted.add(found, bounded=again)
                    self._count(self._counted, ())
                return found
            except torch.OutOfMemoryError as error:
                found = None
                if not again or not self._free(tried_bytes(error)):
                    raise self._explained(error) from error
            for each, old in zip(statistics, before, strict=True):
                if each is not None:
                    each.data.copy_(old)
            if state is not None:
                set_random_state(self._device, state)

    def _count(self, counted: CountedBytes, tensors: Any) -> None:
        """Count tensors that are there in any case, and let others leave for them."""
        counted.add(tensors)
        while (over := counted.over()) > 0:
            if not self._free(over):
                raise self._explained(torch.OutOfMemoryError())
