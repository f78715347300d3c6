"""The entry of a kernel in a handle: its decision, and what was prepared and remembered for it."""

from array import array
from typing import final

from ucudnn.backends.base import Buffer, Tensor
from ucudnn.bounded import BoundedDict
from ucudnn.execution.plan import Plan
from ucudnn.execution.recovery import Replacement
from ucudnn.kernel import Kernel
from ucudnn.planning.decision import Decision
from ucudnn.workspace.stream_order import Segment

_MOST_REPLACEMENTS = 16  # that a report lists of one kernel: calls may fail with any alpha and beta
_MOST_QUEUES = 64


@final
class Entry:
    """A kernel of a handle with its decision, its plan and its workspaces. Only its own methods write it.

    Attributes:
        kernel: the kernel.
        decision: the latest decision; None before the first.
        limit_bytes: workspace limit for later decisions.
        segment: the kernel's part of the divided workspace under WD; else None.
        plan: the prepared calls; None before the first launch.
        workspaces: the kernel's workspace on each queue on which it was launched.
        disjoint: the addresses whose output was last found to share no memory with an input, as `bind` returns them.
        calls: number of launches by Python.
        native_calls: two numbers for launches by C++: how many there were, and 1 once their plan is outdated; None if
            there are none.
        replacements: what replaced configurations that could not be used, in order; equal ones once.
    """

    __slots__ = (
        *("_warned", "calls", "decision", "disjoint", "kernel", "limit_bytes"),
        *("native_calls", "plan", "replacements", "segment", "workspaces"),
    )

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.decision: Decision | None = None
        self.limit_bytes = 0
        self.segment: Segment | None = None
        self.plan: Plan | None = None
        self.workspaces: dict[int, Buffer] = BoundedDict(_MOST_QUEUES)  # of which most have ended in time
        self.disjoint: tuple[Tensor, Tensor, Tensor, int] | None = None
        self.calls = 0
        self.native_calls: array[int] | None = None
        self.replacements: tuple[Replacement, ...] = ()
        self._warned = False

    @property
    def launches(self) -> int:
        """Number of launches, by Python and by C++."""
        return self.calls + (0 if self.native_calls is None else self.native_calls[0])

    def count(self) -> None:
        """Count a launch by Python."""
        self.calls += 1

    def count_natively(self) -> "array[int]":
        """Return `native_calls` for launches by the latest plan."""
        if self.native_calls is None:
            self.native_calls = array("q", [0, 0])
        self.native_calls[1] = 0
        return self.native_calls

    def decide(self, decision: Decision, plan: Plan | None = None) -> None:
        """Take a decision, with a plan if one was prepared, and drop what was prepared for an earlier one."""
        self.decision, self.segment = decision, decision.segment
        self.limit_bytes = self.segment.size_bytes if self.segment else decision.workspace_bytes
        self.drop_plan()
        self.plan = plan
        self.workspaces.clear()

    def repair(self, decision: Decision, reason: str) -> None:
        """Take a decision in place of one that could not be used; the limit and the segment stay."""
        before = self.decision
        assert before is not None
        timed = before.timed and decision.timed
        self.note(Replacement(before=before.configuration, after=decision.configuration, reason=reason, timed=timed))
        self.decision = decision
        self.drop_plan()
        self.workspaces.clear()

    def note(self, replacement: Replacement) -> None:
        """Remember what replaced a configuration, for the report."""
        if replacement not in self.replacements and len(self.replacements) < _MOST_REPLACEMENTS:
            self.replacements = (*self.replacements, replacement)

    def prepare(self, plan: Plan) -> Plan:
        """Take the plan of the decision, and return it."""
        self.plan = plan
        return plan

    def drop_plan(self) -> None:
        """Forget the plan, in Python and in C++."""
        self.plan = None
        if self.native_calls is not None:
            self.native_calls[1] = 1

    def hold(self, queue: int, workspace: Buffer) -> None:
        """Keep the workspace of a queue."""
        self.workspaces[queue] = workspace

    def release(self, queue: int | None = None) -> None:
        """Forget the workspace of a queue, or of all of them."""
        if queue is None:
            self.workspaces.clear()
        else:
            self.workspaces.pop(queue, None)

    def accept(self, bound: tuple[Tensor, Tensor, Tensor, int]) -> None:
        """Remember addresses whose output shares no memory with an input; arrays may be other views the next time."""
        if type(bound[0]) is type(bound[1]) is type(bound[2]) is int:
            self.disjoint = bound

    def warns(self) -> bool:
        """Return whether a failure of an algorithm is to be logged, which is done once."""
        first, self._warned = not self._warned, True
        return first
