"""Locks and forks: no thread is inside a lock of this package while the process forks.

A forked child has only the thread that forked. If another thread held a lock, nobody in the child would release it, and
what the lock guards might be half made. So a fork waits for the locks, the outermost first, as Python's own logging
does. It waits for `PATIENCE_S` at most, because planning may take long: a lock that is still held then is made new in
the child, whose first call may have to plan again.
"""

import os
from collections.abc import Callable
from enum import IntEnum
from functools import cached_property
from itertools import count
from threading import RLock, local
from time import monotonic
from typing import Any, final
from weakref import WeakMethod, ref

from ucudnn.configuration import Configuration

PATIENCE_S = 10.0
"""The longest time in seconds that a fork waits for all locks together."""


@final
class LockLevel(IntEnum):
    """Which locks are taken first: a thread that holds one takes only locks of the same or a later level."""

    OVERRIDES = 0
    FACE = 1
    BACKEND = 2
    STORAGE = 3
    INNERMOST = 4


_numbers = count()
_locks: dict[tuple[LockLevel, int], "ref[Any]"] = {}
_children: dict[int, "WeakMethod[Callable[[], None]]"] = {}
_held = local()


def new_lock(level: LockLevel) -> Any:
    """Return a new lock that a thread may take several times; a fork waits for it."""
    lock = RLock()
    _guard(lock, level)
    return lock


def guard_cached_properties(cls: type) -> None:
    """Let a fork wait for the locks that Python 3.11 has in each cached property, which all instances share."""
    for each in vars(cls).values():
        if isinstance(each, cached_property) and hasattr(each, "lock"):
            _guard(each.lock, LockLevel.INNERMOST)


def call_in_child(method: Callable[[], None]) -> None:
    """Call a method in each forked child, as long as its object lives: to give up what only the parent may use."""
    number = next(_numbers)
    _children[number] = WeakMethod(method, lambda _: _children.pop(number, None))


def _guard(lock: Any, level: LockLevel) -> None:
    key = level, next(_numbers)
    _locks[key] = ref(lock, lambda _: _locks.pop(key, None))


def _before() -> None:
    until = monotonic() + PATIENCE_S
    taken: list[Any] = []
    left: list[Any] = []
    for _, weak in sorted(_locks.copy().items(), key=lambda item: item[0]):
        lock = weak()
        if lock is not None:
            fate = taken if lock.acquire(timeout=max(0.0, until - monotonic())) else left
            fate.append(lock)
    _held.locks = taken, left


def _release() -> list[Any]:
    taken, left = _held.locks
    del _held.locks
    for lock in reversed(taken):
        lock.release()
    return list(left)


def _in_child() -> None:
    for lock in _release():
        lock._at_fork_reinit()
    for weak in list(_children.values()):
        method = weak()
        if method is not None:
            method()


guard_cached_properties(Configuration)
if hasattr(os, "register_at_fork"):  # Windows cannot fork
    os.register_at_fork(before=_before, after_in_parent=_release, after_in_child=_in_child)
