"""Slides: how bytes get from one place to another that may overlap it, in copies of which none overlaps itself."""

from collections.abc import Iterator

MOST_COPIES = 64
"""Copies of a slide at most. Each takes the host 2 to 4 us and a GPU 3 us, so all of them take at most 0.25 ms."""


def slide_copies(source: int, target: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, bytes) of copies in whose order no byte is overwritten before it was copied.

    Each has at most as many bytes as lie between both places. Bytes that go to lower addresses are copied from the
    first one on, others from the last one on.

    Args:
        source: address of the first byte.
        target: address that it gets.
        size: bytes.
    """
    step = abs(target - source)
    if not step:
        return
    offsets = range(0, size, step)
    for offset in offsets if target < source else reversed(offsets):
        yield offset, min(step, size - offset)


def count_copies(source: int, target: int, size: int) -> int:
    """Return the number of copies of a slide; arguments as those of `slide_copies`."""
    return -(-size // abs(target - source)) if target != source else 0
