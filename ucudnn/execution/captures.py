"""What captured CUDA graphs use.

A graph holds only addresses, so memory and kernels must live as long as it may be replayed.
"""

from collections.abc import Iterable
from typing import final

from ucudnn.backends.base import Buffer, Scaling
from ucudnn.execution.plan import Plan
from ucudnn.workspace.allocation import Workspace


@final
class Captures:
    """Keeps the workspaces and plans of captured calls for good, because nobody tells when a graph is destroyed."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int, int], tuple[Buffer, Plan]] = {}
        self._kernels: dict[tuple[int, Scaling], tuple[object, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._plans)

    def keep(self, workspace: Buffer | None, plan: Plan) -> None:
        """Keep a plan that is launched in a capture, and its workspace; None if the workspace is kept by others."""
        self._plans[id(workspace), id(plan)] = workspace, plan

    def keep_kernels(self, plan: Plan, scaling: Scaling) -> None:
        """Keep what a plan launched in a capture, because calls drop what they prepared for an alpha and a beta."""
        self._kernels[id(plan), scaling] = plan.kernels(scaling)

    def size_bytes(self, workspaces: Iterable[Workspace[int]]) -> int:
        """Return the bytes that only graphs hold, and none of some workspaces."""
        others = list(workspaces)
        alone = {
            id(buffer): plan.workspace_bytes
            for buffer, plan in self._plans.values()
            if buffer is not None and not any(workspace.holds(buffer) for workspace in others)
        }
        return sum(alone.values())
