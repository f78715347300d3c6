"""What a trial runs, and its outcome: what was predicted and measured, or the reason why it did not run to its end."""

from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any, NamedTuple, final

from ucudnn.memory.planner.search import PLAN_SECONDS
from ucudnn.memory.torch.comparison.device_timeline import OperationMemory
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe
from ucudnn.plots.bands import QueuePicture

PYTORCH = "pytorch"
"""In the place of a policy: the step as PyTorch runs it, without a plan."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSettings:
    """What a trial runs.

    Attributes:
        budget: the budget: a total of what the process has on the device; None without one.
        warmup: steps before them.
        capped: whether PyTorch's allocator refuses to reserve more than the budget leaves beside the CUDA context,
            loaded kernels and NCCL; a GPU's only.
        convolutions: a batch-size policy by which plans choose how each convolution is computed, as in `fit`; '' leaves
            all of them to PyTorch.
    """

    recipe: TrainingRecipe
    policy: str
    budget: int | None
    device: str
    steps: int = 10
    warmup: int = 3
    capped: bool = False
    convolutions: str = ""
    plan_seconds: float | None = PLAN_SECONDS
    divide: bool = False
    compile: bool = False


class OutsideReached(NamedTuple):
    """What a process had on a GPU beside PyTorch's allocator when a part of its trial had ended.

    `told_apart` is whether the driver told it from what other processes have.
    """

    after: str
    bytes: int
    told_apart: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFigures:
    """What was predicted and measured; sizes in bytes, times in milliseconds. None where it is not known.

    Attributes:
        allocated: most bytes that tensors had.
        reserved: most bytes that PyTorch's allocator took from the GPU.
        retries: how often the allocator found no room in the timed steps, and gave memory back to the driver first.
        library: bytes that libraries keep in the allocator.
        outside: bytes of the GPU that are in use beside the allocator after the timed steps.
        reached: how that grew, part by part of the trial; empty on a CPU.
        first_ms: the first step, with the fitting before it.
        losses: loss of each step, the first one and those of repeated rounds included.
        compute_ms: how long the device computed in one step.
        to_host_ms: how long copies to the host took in one step.
        from_host_ms: how long copies from the host took.
        overlap: share of the copies' time during which the device computed.
        predicted_peak: peak of the plan, and what libraries keep in the allocator.
        predicted_reserved: what PyTorch's allocator takes from the GPU for the plan.
        predicted_returned: bytes of pages that the allocator gives back to the driver in each step of the plan, where
            it may have no more than the budget leaves.
        moved: bytes that move within the device in each step, so that tensors lie side by side.
        predicted_ms: time of the plan and of these moves, and in a capped trial what giving pages back to the driver
            takes; or the time in which the host issues its operations, if that is longer.
        floor: the least peak that any plan can reach by offloading and recomputing.
        counted_outside: bytes that the budget counts beside the allocator: what was in use when the plan was made, and
            the reserve for kernels that are loaded later. None without a budget.
        configured: convolutions that ran as the plan chose, forward and gradients counted apart.
        divided: those of them that ran in several calls.
        memory: the memory of each operation of a plan as predicted and measured.
        picture: the measured timeline of one step beside the predicted one.
    """

    allocated: int
    reserved: int | None
    retries: int | None
    library: int
    outside: int
    reached: tuple[OutsideReached, ...]
    step_ms: float
    fastest_ms: float
    slowest_ms: float
    first_ms: float
    offloaded: int
    prefetched: int
    losses: tuple[float, ...]
    compute_ms: float | None = None
    to_host_ms: float | None = None
    from_host_ms: float | None = None
    overlap: float | None = None
    predicted_peak: int | None = None
    predicted_reserved: int | None = None
    predicted_returned: int | None = None
    moved: int | None = None
    predicted_ms: float | None = None
    floor: int | None = None
    counted_outside: int | None = None
    pinned: int = 0
    configured: int = 0
    divided: int = 0
    workspace: int = 0
    memory: tuple[OperationMemory, ...] = ()
    picture: QueuePicture | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """The outcome of a trial: its figures, or why it did not run to its end and the least budget that would do."""

    policy: str
    figures: TrialFigures | None
    reason: str = ""
    least_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the picture, for JSON; a loss that is no finite number, which JSON lacks, is None."""
        if self.figures is None:
            return {"policy": self.policy, "reason": self.reason, "least_bytes": self.least_bytes}
        figures = asdict(replace(self.figures, picture=None))
        del figures["picture"]
        figures["losses"] = [loss if isfinite(loss) else None for loss in self.figures.losses]
        return {"policy": self.policy, **figures}
