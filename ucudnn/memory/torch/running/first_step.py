"""The first step runs the minimum-memory plan; what it takes beyond its prediction decides on the plan after it.

Operations were measured one by one. What they take in a row was not: a library may keep memory that it allocated first
in the step. So the plan that fills the budget begins when a step has shown that it may. Kernels that are loaded later
grow what the process has beside PyTorch's allocator. A budget keeps a reserve for them; what exceeds it is taken from
the plan.
"""

import warnings
from collections.abc import Callable
from typing import final

import torch

from ucudnn.memory.simulation.simulator import predicted_bytes
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.torch.device.allocator_meter import AllocatorMeter
from ucudnn.memory.torch.device.stated_budget import read_outside
from ucudnn.memory.torch.running.planned_run import PlannedRun
from ucudnn.units import bytes_up


def outside_meter(device: torch.device) -> Callable[[], int | None] | None:
    """Return what measures this process's bytes beside PyTorch's allocator; None elsewhere than on a GPU.

    It returns None where the driver does not tell them from those of other processes.
    """

    def measured() -> int | None:
        found = read_outside(device)
        return found.bytes if found.told_apart else None

    return measured if device.type == "cuda" else None


@final
class FirstStep:
    """The plan of the first step, and what comes after it.

    The later plan stays below the budget by the spare bytes. `for_less` returns the code of another plan for so many
    bytes less; None where there is none.
    """

    def __init__(
        self,
        run: PlannedRun,
        costs: Costs,
        spare_bytes: int,
        meter: AllocatorMeter,
        for_less: Callable[[int], PlannedRun | None],
    ) -> None:
        self.run = run
        self._meter, self._for_less, self._spare = meter, for_less, spare_bytes
        self._predicted = predicted_bytes(run.plan, costs, run.simulation)
        self._excess: int | None = None
        run.after_backward = self._end

    @property
    def ended(self) -> bool:
        """Whether a forward and its backward have run."""
        return self._excess is not None

    @property
    def excess_bytes(self) -> int:
        """Bytes that the first step took beyond its prediction; 0 before it has ended."""
        return self._excess or 0

    def begin(self) -> PlannedRun:
        """Begin to measure, and return the code that is to run now."""
        self._meter.begin()
        return self.run

    def follow(self, later: PlannedRun) -> PlannedRun:
        """Return the code for all further steps: the later plan's if the budget has room, or one that takes less."""
        self.run.after_backward = None
        excess = self.excess_bytes
        if excess <= max(0, self._spare):  # without an excess the later plan is the best there is
            return later
        return self._for_less(excess) or self.run

    def _end(self) -> None:
        if self._excess is None:
            self._excess = max(0, self._meter.taken_bytes() - self._predicted)


@final
class GrowthGuard:
    """Takes from the plan what grows beside PyTorch's allocator beyond the budget's reserve.

    To ask the driver takes longer than an operation, so it is asked after 1, 2, 4, 8 and so on steps.

    Args:
        measure: returns this process's bytes beside the allocator; None where they are not known, because what other
            processes take must not change a plan.
        counted_bytes: how many of them the budget counts, its reserve included.
        for_less: returns the code of another plan than the one given, for so many bytes less, or its own code where it
            takes so much less already; None where there is none.
    """

    def __init__(
        self,
        measure: Callable[[], int | None],
        counted_bytes: int,
        for_less: Callable[[int, PlannedRun], PlannedRun | None],
    ) -> None:
        self._measure, self._counted, self._for_less = measure, counted_bytes, for_less
        self._steps = self._grown = 0

    def follow(self, run: PlannedRun) -> PlannedRun:
        """Return the code for the step that begins, when the steps before it ran some code."""
        steps, grown = self._steps + 1, self._grown
        found: PlannedRun | None = run
        if not steps & (steps - 1):
            measured = self._measure()
            grown = max(grown, 0 if measured is None else measured - self._counted)
        if grown > self._grown:
            found = self._for_less(grown, run)
        self._steps, self._grown = steps, grown  # at the end: a search that Ctrl-C ended begins anew
        if found is None:
            warnings.warn(
                f"kernels that were loaded since fit take {bytes_up(grown)} beyond the budget's reserve for them,"
                " and no plan takes so much less, so steps may exceed the budget by that: raise it",
                stacklevel=2,
            )
        return found or run
