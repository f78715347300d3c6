"""Blocks of steps that take turns: with what is compared, and without it."""

from typing import final

BLOCK_STEPS = 5
"""Steps of a block whose first one does not count, because the step before was another one."""


@final
class Turns:
    """Says which steps are with what is compared.

    Args:
        unsteady_steps: the first steps of each block, which do not count.

    Attributes:
        is_on: whether the step that runs is with it.
    """

    def __init__(self, unsteady_steps: int = 1) -> None:
        self.is_on = True
        self._unsteady_steps = unsteady_steps
        self._steps = 0  # of this block that have ended

    @property
    def begins_block(self) -> bool:
        """Whether the step that runs is one of the first ones of its block, which do not count."""
        return self._steps < self._unsteady_steps

    def step_ended(self) -> bool:
        """End a step, and return whether the next one begins another block."""
        self._steps = (self._steps + 1) % (BLOCK_STEPS - 1 + self._unsteady_steps)
        if self._steps == 0:
            self.is_on = not self.is_on
        return self._steps == 0
