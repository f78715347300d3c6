"""Keeps Python's garbage collector from walking through older objects while a step is fitted."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from ucudnn.memory.torch.subject.left_as_found import Snapshot


@contextmanager
def only_new_collected(snapshot: Snapshot) -> Iterator[None]:
    """Let collections look only at objects that are made inside the block; the snapshot releases the others on Ctrl-C.

    A process with PyTorch has some hundred thousand objects that stay. Tracing and planning make so many new ones that
    collections walk through all of them again and again, which took a quarter of the time. What is garbage before is
    collected first, because it may hold memory of a device. Nothing happens where a program has frozen objects itself,
    because only all of them together can be released.
    """
    gc.collect()
    if gc.get_freeze_count():
        yield
        return
    snapshot.undo_after_errors(gc.unfreeze)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
