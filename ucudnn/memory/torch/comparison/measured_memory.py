"""The measured memory of a plan beside the predicted one, operation by operation.

In a step of its own, the plan's code marks each operation, and PyTorch's profiler sees every allocation between the
marks. That is the order in which the host calls operators, which is the plan's. A GPU runs them later, but what its
allocator hands out follows the host.
"""

from dataclasses import dataclass
from typing import final

from ucudnn.memory.plans.actions import COMPUTES
from ucudnn.memory.simulation.result import Queue
from ucudnn.memory.torch.codegen.code_support import MARK
from ucudnn.memory.torch.measuring.measured_peak import memory_between_marks
from ucudnn.memory.torch.measuring.training_step import TrainingStep
from ucudnn.memory.torch.running.fitted_step import FittedStep

_UPDATE = "Optimizer.step#"  # begin of the name that PyTorch gives an update


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OperationMemory:
    """The memory while one operation of a plan, or the whole optimizer's update, runs.

    It begins when it is predicted to. The predicted bytes are those of the plan and of libraries; the measured ones are
    the most that existed, scratch included.
    """

    operation: str
    begin_ms: float
    predicted_bytes: int
    measured_bytes: int


def measure_memory(step: TrainingStep, fitted: FittedStep, library: int) -> tuple[OperationMemory, ...]:
    """Take one step of a plan, which has run before, and return its memory, operation by operation in the plan's order.

    The plan does not know the bytes that libraries keep in the allocator.
    """
    with fitted.marked():
        marks = dict(memory_between_marks(step, (MARK, _UPDATE)))
    begins = {action: begin for queue, action, begin, _ in fitted.simulation.timeline if queue is Queue.COMPUTE}
    graph = fitted.plan.graph
    ran = [(index, target) for index, (kind, target) in enumerate(fitted.plan.actions) if kind in COMPUTES]
    found: list[OperationMemory] = []
    update: list[tuple[float, int]] = []
    for (action, target), predicted in zip(ran, fitted.simulation.running_bytes, strict=True):
        if f"{MARK}{action}" in marks:
            found.append(
                OperationMemory(
                    operation=graph.operation_name(target),
                    begin_ms=begins[action],
                    predicted_bytes=predicted + library,
                    measured_bytes=marks[f"{MARK}{action}"],
                )
            )
        else:
            update.append((begins[action], predicted + library))
    measured = [size for name, size in marks.items() if name.startswith(_UPDATE)]
    if update and measured:
        begin, predicted = update[0][0], max(size for _, size in update)
        found.append(
            OperationMemory(
                operation="optimizer", begin_ms=begin, predicted_bytes=predicted, measured_bytes=max(measured)
            )
        )
    return tuple(found)
