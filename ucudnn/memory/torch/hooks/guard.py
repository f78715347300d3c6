"""Guard: runs an operation again that found no memory, after saved tensors have left the device."""

import re
from collections.abc import Callable
from functools import cache, partial
from timeit import repeat
from typing import Any, final

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from ucudnn.memory.torch.hooks.pressure import CountedBytes, LiveBytes
from ucudnn.memory.torch.hooks.repeated_call import random_state, set_random_state
from ucudnn.memory.torch.hooks.saved_memory import SavedMemory
from ucudnn.problem import MathMode
from ucudnn.torch.calls.problem import convolution_of, memory_format_of
from ucudnn.torch.device.compilation import EagerOperators, never_compiled
from ucudnn.units import parse_bytes

_TRIED = re.compile(r"Tried to allocate ([\d.]+) (\w+)")
_BACKWARD = torch.ops.aten.convolution_backward.default
_CONVOLUTIONS = frozenset({torch.ops.aten.convolution.default, _BACKWARD})
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


def _seconds() -> float:
    """Return how many seconds the host takes for a small operation, as things are."""
    return min(repeat(partial(torch.empty, 0), number=16, repeat=5)) / 16


def convolution_bytes(func: Any, args: Any) -> int:
    """Return what a convolution takes while it runs, in bytes: results, and copies of x and y if channels come first.

    In the copies they come last, as tensor cores read them. See `ucudnn.memory.devices.roofline`.
    """
    if func is _BACKWARD:
        _, x, w, _, *geometry, _ = args
    else:
        x, w, _, *geometry = args
    how = (tuple(each) if isinstance(each, list) else each for each in geometry)
    form = memory_format_of(x, w)
    asked = convolution_of(x.shape, w.shape, x.dtype, *how, memory_format=form, math=MathMode.TF32, deterministic=False)
    if asked is None or asked.problem.layout.channels_last:
        return 0
    copies = asked.problem.x_bytes + asked.problem.y_bytes
    return copies + int(x.nbytes + w.nbytes if func is _BACKWARD else copies - x.nbytes)


@final
class Guard(EagerOperators):
    """Guards the operations of a thread while it is on.

    An operation that writes to no argument can run again. Batch normalization writes to running statistics, which its
    schema does not say. A convolution that finds no memory for its workspace runs a slower algorithm of cuDNN, and
    PyTorch takes that for all calls of the process from then on. So room is made for it before.

    Args:
        device: whose random numbers are drawn again.
        memory: frees bytes.
        explained: returns the error that is raised then.
        alive: what counts the results on a CPU, or how often an allocator refused.

    Attributes:
        slower: how many calls of convolutions have taken a slower algorithm for want of memory.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        device: torch.device,
        memory: SavedMemory,
        explained: Callable[[torch.OutOfMemoryError], Exception],
        alive: LiveBytes,
    ) -> None:
        super().__init__()
        self._device, self._memory, self._explained = device, memory, explained
        self._alive, self._counted = alive, alive if isinstance(alive, CountedBytes) else None
        self.slower = self._operations = 0
        self._each_s: float | None = None

    def host_s(self) -> float:
        """Return about how many seconds the host has taken to guard operations so far, without what they take."""
        if self._each_s is None:
            with _disable_current_modes():  # of the program, which are not to see this
                plain = _seconds()
                with self:
                    self._each_s = max(0.0, _seconds() - plain)
        return self._operations * self._each_s

    def turn(self, *, on: bool) -> None:
        """Turn it on or off for this thread, unless another mode is in its way."""
        top = _get_current_dispatch_mode()
        if on and top is not self and (top is None or isinstance(top, Guard)):
            self.__enter__()
        elif not on and top is self:
            self.__exit__(None, None, None)

    def end(self) -> None:
        """Turn it off for this thread, whatever modes were turned on since."""
        stack = _get_current_dispatch_mode_stack()
        if self in stack:
            later = [_pop_mode() for _ in stack[stack.index(self) + 1 :]]
            self.__exit__(None, None, None)
            for each in reversed(later):
                _push_mode(each)

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._operations += 1
        if func in _CONVOLUTIONS and self._device.type == "cuda":
            return self._convolved(func, args, kwargs or {})
        return self._guarded(func, args, kwargs or {})

    def _convolved(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._memory.make_room(convolution_bytes(func, args))
        pressure, (before, _) = self._memory.pressure, self._alive.failures()
        failed = pressure.failed
        found = self._guarded(func, args, kwargs)
        self.slower += self._alive.failures()[0] - before > pressure.failed - failed
        if pressure.learning:
            pressure.room(self._memory.owner, 0)  # nobody but cuDNN knows its workspaces, so what it took is seen
        return found

    def _guarded(self, func: Any, args: Any, kwargs: Any) -> Any:
        again, draws, writes = _traits(func)
        state = random_state(self._device) if draws else None
        statistics = args[3:5] if writes else ()
        before = [each if each is None else each.clone() for each in statistics]
        self._count((args, kwargs))
        while True:
            try:
                found = func(*args, **kwargs)
                self._count(found, bounded=again)
                return found
            except torch.OutOfMemoryError as error:
                found = None
                if not again or not self._memory.free(tried_bytes(error)):
                    raise self._explained(error) from error
            for each, old in zip(statistics, before, strict=True):
                if each is not None:
                    each.data.copy_(old)
            if state is not None:
                set_random_state(self._device, state)

    def _count(self, tensors: Any, *, bounded: bool = False) -> None:
        """Count tensors, and let others leave for them; those that are there in any case are not bounded."""
        if self._counted is None or not self._counted.add(tensors, bounded=bounded):
            return
        while (over := self._counted.over()) > 0:
            if not self._memory.free(over):
                raise self._explained(torch.OutOfMemoryError())
