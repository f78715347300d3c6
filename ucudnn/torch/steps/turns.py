"""Blocks of steps that take turns: with what is compared, and without it."""

from typing import final

BLOCK_STEPS = 5
"""Steps of a block. The first one does not count, because the step before was another one."""


@final
class Turns:
    """Says which steps are with what is compared.

    Attributes:
        is_on: whether the step that runs is with it.
    """

    def __init__(self) -> None:
        self.is_on = True
        self._steps = 0  # of this block that have ended

    @property
    def begins_block(self) -> bool:
        """Whether the step that runs is the first one of its block."""
        return self._steps == 0

    def step_ended(self) -> bool:
        """End a step, and return whether the next one begins another block."""
        self._steps = (self._steps + 1) % BLOCK_STEPS
        if self._steps == 0:
            self.is_on = not self.is_on
        return self._steps == 0
