"""MemoryPlan: an order of a step's operations, with what is freed, moved and recomputed between them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from ucudnn.configuration import Configuration
from ucudnn.memory.plans.actions import Action, Moves
from ucudnn.memory.plans.validity import check_actions, check_buffers
from ucudnn.memory.step.graph import StepGraph

_is_draft = ContextVar("_is_draft", default=False)


@contextmanager
def drafts() -> Iterator[None]:
    """Let plans be made without a check: a search makes many, and the one that it chooses is made once more."""
    token = _is_draft.set(True)
    try:
        yield
    finally:
        _is_draft.reset(token)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """A plan for one step graph at its mini-batch. Immutable, and valid once it is made.

    A policy may plan for another graph than the one that it was given, as long as both compute the same: a segment that
    runs in micro-batches is a graph with more and smaller operations.

    Attributes:
        policy: name of the policy that made it.
        actions: what is issued, in order.
        budget: bytes that the plan promises never to exceed on the device, persistent bytes and scratch included;
            None where it promises nothing.
        configurations: configurations that the plan chooses for convolutions, by the index of their operation; their
            times and workspaces stand in the place of the costs'. At a recomputation the same one runs.
        buffers: groups of storages that share bytes; each group holds the bytes of its largest storage during the whole
            step. At most one storage of a group is present at a time.
        scratch_buffer: whether the largest scratch of all operations is held during the whole step, too.
        overlapped: whether collectives run beside compute, one after another. Each begins where it stands. What
            accesses its results or writes its operands waits for its end, and operands that are freed stay until then.
        moves: what moves before an action, so that all tensors find room side by side (`compact`). It changes no
            bytes, and neither peak nor time of a simulation.

    Raises:
        MemoryPlanError: if the plan reads what is absent, frees twice, recomputes from what is gone, leaves out an
            operation, or loses what must exist after the step. The message names the operation and the storage.
    """

    policy: str
    graph: StepGraph
    actions: tuple[Action, ...]
    budget: int | None = None
    configurations: Mapping[int, Configuration] = field(default_factory=dict)
    buffers: tuple[tuple[int, ...], ...] = ()
    scratch_buffer: bool = False
    overlapped: bool = False
    moves: Moves = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _is_draft.get():
            check_actions(self.graph, self.actions)
            check_buffers(self.graph, self.actions, self.buffers)
