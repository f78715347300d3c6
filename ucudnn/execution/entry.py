"""The entry of a kernel in a handle: its decision, and what was prepared and remembered for it."""

from array import array
from typing import final

from ucudnn.backends.base import Buffer
from ucudnn.execution.plan import Plan
from ucudnn.execution.recovery import Replacement
from ucudnn.kernel import Kernel
from ucudnn.planning.decision import Decision
from ucudnn.workspace.segment import Segment

_MOST_REPLACEMENTS = 16  # that a report lists of one kernel: calls may fail with any alpha and beta


@final
class Entry:
    """A kernel of a handle with its decision, its plan and its workspaces.

    Attributes:
        apart: what `bind` returned for tensors whose output shares no memory with an input; None for arrays.
        kernel: the kernel.
        decision: the latest decision; None before the first.
        limit_bytes: workspace limit for later decisions.
        plan: the prepared calls; None before the first launch.
        calls: number of launches in Python.
        elsewhere: two numbers for launches without Python: how many there were, and 0 while they have the latest plan;
            None if there are none.
        ready: the kernel's workspace on each queue on which it was launched.
        segment: the kernel's part of the divided workspace under WD; else None.
        warned: whether a failure of an algorithm was logged.
        replacements: what replaced configurations that could not be used, in order; equal ones once.
    """

    __slots__ = (
        "apart",
        "calls",
        "decision",
        "elsewhere",
        "kernel",
        "limit_bytes",
        "plan",
        "ready",
        "replacements",
        "segment",
        "warned",
    )

    def __init__(self, kernel: Kernel) -> None:
        self.apart: tuple[int, int, int, int] | None = None
        self.kernel = kernel
        self.decision: Decision | None = None
        self.limit_bytes = 0
        self.plan: Plan | None = None
        self.calls = 0
        self.elsewhere: array[int] | None = None
        self.ready: dict[int, Buffer] = {}
        self.segment: Segment | None = None
        self.warned = False
        self.replacements: list[Replacement] = []

    @property
    def launches(self) -> int:
        """Number of launches, in Python and without."""
        return self.calls + (0 if self.elsewhere is None else self.elsewhere[0])

    def replaced(self, replacement: Replacement) -> None:
        """Remember what replaced a configuration, for the report."""
        if replacement not in self.replacements and len(self.replacements) < _MOST_REPLACEMENTS:
            self.replacements.append(replacement)

    def lend(self) -> "array[int]":
        """Return the two numbers for launches without Python by the latest plan."""
        if self.elsewhere is None:
            self.elsewhere = array("q", [0, 0])
        self.elsewhere[1] = 0
        return self.elsewhere

    def drop_plan(self) -> None:
        """Forget the plan, in Python and elsewhere."""
        self.plan = None
        if self.elsewhere is not None:
            self.elsewhere[1] = 1

    def decide(self, decision: Decision) -> None:
        """Take a decision, and drop what was prepared for an earlier one."""
        self.decision = decision
        self.segment = decision.segment
        self.limit_bytes = self.segment.size_bytes if self.segment else decision.workspace_bytes
        self.drop_plan()
        self.ready.clear()
