"""Locks: handles that share a backend share its queue too, and wait for each other."""

from threading import RLock
from weakref import WeakKeyDictionary

from ucudnn.backends.base import Backend

_LOCKS: WeakKeyDictionary[Backend, RLock] = WeakKeyDictionary()


def lock_of(backend: Backend) -> RLock:
    """Return the lock of a backend."""
    return _LOCKS.setdefault(backend, RLock())
