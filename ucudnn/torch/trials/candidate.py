"""What may replace PyTorch's own kernel, how far it is tried, and what one step does with it."""

from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import final

from ucudnn.backends.cudnn.algorithms.operation_graph import without_knobs
from ucudnn.configuration import Configuration
from ucudnn.torch.calls.candidate_kernel import TunedKernel

WRONG, SLOW, NO_MEMORY, FAILED = "wrong result", "slow", "no free memory for a check", "failed"
SLOW_PLAN = "its plan takes too long to build"
"""Why a candidate is given up."""

_MOST_FAILURES = 8  # steps in which a candidate fails: memory may be short for a while, or a tensor not aligned


class CandidateState(Enum):
    """How far a candidate is: not run yet, its output checked, or given up."""

    NEW = "new"
    CHECKED = "checked"
    REJECTED = "rejected"


@final
@dataclass(slots=True, eq=False)
class Candidate:
    """A configuration that may replace PyTorch's own kernel.

    Attributes:
        configuration: the configuration.
        workspace_bytes: its workspace.
        state: how far it is.
        reason: why it was given up; '' if it was not.
        rough_ms: its time beside PyTorch's own kernel, where its output was checked.
        samples_ms: its times in place of PyTorch's own kernel.
        host_ms: the least milliseconds that the host took to issue it.
        misses: number of calls at which no memory was free to check it.
        in_turn: whether it is checked in the memory of PyTorch's output, before that is computed.
        failures: number of steps in which it failed.
        was_slow: whether its first run was slow, which may have loaded its code.
    """

    configuration: Configuration
    workspace_bytes: int
    state: CandidateState = CandidateState.NEW
    reason: str = ""
    rough_ms: float = inf
    samples_ms: list[float] = field(default_factory=list)
    host_ms: float = inf
    misses: int = 0
    in_turn: bool = False
    failures: int = 0
    was_slow: bool = False

    @property
    def is_undivided(self) -> bool:
        """Whether it computes the whole mini-batch at once."""
        return len(self.configuration.parts) == 1

    @property
    def kind(self) -> tuple[int, str]:
        """Its number of parts and its engine: heuristics name many knobs of an engine in a row."""
        return len(self.configuration.parts), without_knobs(self.configuration.parts[0].algorithm)

    def failed(self) -> None:
        """Note that it failed in a step; it is given up if it fails again and again."""
        self.failures += 1
        if self.failures >= _MOST_FAILURES:
            self.reject(FAILED)

    def reject(self, reason: str) -> None:
        """Give it up."""
        self.state, self.reason = CandidateState.REJECTED, reason


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Trial:
    """What a site does in one step.

    Attributes:
        candidate: what is tried; None times PyTorch's own kernel.
        in_place: whether the candidate replaces PyTorch's own kernel; otherwise it runs beside it and is checked.
        estimate_ms: the time that the trial is expected to lose.
        kernel: the candidate's.
        started: whether the candidate has run beside PyTorch's own kernel in this step, or has failed.
    """

    candidate: Candidate | None
    in_place: bool
    estimate_ms: float
    kernel: TunedKernel | None = None
    started: bool = False

    @property
    def is_over(self) -> bool:
        """Whether other calls of this step do nothing: beside PyTorch's own kernel, once in a step is enough."""
        return self.started or (self.candidate is not None and bool(self.candidate.reason))
