"""Batch-size policies: which micro-batch sizes are benchmarked (paper, section 3.4)."""

from enum import Enum


class BatchSizePolicy(Enum):
    """Which micro-batch sizes of a mini-batch are benchmarked.

    UNDIVIDED takes the mini-batch only; POWER_OF_TWO the powers of two and the mini-batch itself; ALL every
    size: never worse, but its time to benchmark grows with the mini-batch.
    """

    UNDIVIDED = "undivided"
    POWER_OF_TWO = "powerOfTwo"
    ALL = "all"

    def sizes(self, batch: int) -> tuple[int, ...]:
        """Return the micro-batch sizes to benchmark for a mini-batch, ascending; the last is the mini-batch."""
        if self is BatchSizePolicy.UNDIVIDED:
            return (batch,)
        if self is BatchSizePolicy.ALL:
            return tuple(range(1, batch + 1))
        powers = [1 << exponent for exponent in range(batch.bit_length())]
        return (*(size for size in powers if size < batch), batch)
