"""Reports of single kernels, and in words how far their executed times are from predicted ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, log

from ucudnn.planning.choices import Origin
from ucudnn.planning.decision import Decision
from ucudnn.units import format_ms

FAR = 1.25
"""An executed time is far from its prediction if one of them is more than this many times the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """The decision for a kernel. Times are for one layer, in milliseconds.

    Attributes:
        layer: name of the layer, or of the first one of several.
        operation: Forward, BackwardData or BackwardFilter.
        problem: the problem, as text.
        count: how many layers have this shape and configuration.
        configuration: the configuration, such as '4x64 FFT_TILING'.
        undivided: the fastest single algorithm within the limit; None if none fits.
        undivided_ms: its predicted time.
        micro_batched_ms: the predicted time of the configuration; None if nothing was measured for it.
        undivided_executed_ms: the measured time of the undivided plan; None if nothing was executed.
        executed_ms: the measured time of the configuration's plan; None if nothing was executed.
        workspace_bytes: the workspace of the configuration, without the caller's spare memory.
        undivided_workspace_bytes: the workspace of the undivided algorithm.
        calls: how often a handle ran the kernel.
        spare_bytes: the most bytes of the caller's spare memory, or of the output's tail, that serve as workspace.
        replaced: what replaced configurations that failed or found no room, and why, as one sentence each.
        replaced_ms: the predicted time of the first configuration that was replaced for all calls; None if none was.
        first_predicted_ms: the time that was predicted at first, if it was so far from the executed time that the
            kernel was measured again; else None.
        origin: where the configuration comes from: 'measured', 'file' or 'rule'.
    """

    layer: str
    operation: str
    problem: str
    count: int
    configuration: str
    undivided: str | None
    undivided_ms: float | None
    micro_batched_ms: float | None
    undivided_executed_ms: float | None = None
    executed_ms: float | None = None
    workspace_bytes: int
    undivided_workspace_bytes: int | None
    calls: int = 0
    spare_bytes: int = 0
    replaced: tuple[str, ...] = ()
    replaced_ms: float | None = None
    origin: str = Origin.MEASURED.value
    first_predicted_ms: float | None = None

    @property
    def name(self) -> str:
        """The layer, or the problem where it has no name, and the operation."""
        return f"{self.layer or self.problem} {self.operation}"

    @property
    def is_far(self) -> bool:
        """Whether the plan was executed, and took more than FAR times its prediction, or less by the same factor."""
        if self.origin != Origin.MEASURED.value or self.executed_ms is None or self.micro_batched_ms is None:
            return False
        return is_far(self.executed_ms, self.micro_batched_ms)

    @property
    def speedup(self) -> float | None:
        """Undivided over micro-batched time: executed times if there are any, else predicted ones."""
        if self.undivided_executed_ms is not None and self.executed_ms is not None:
            return self.undivided_executed_ms / self.executed_ms
        return ratio(self.undivided_ms, self.micro_batched_ms)


def is_far(executed_ms: float, predicted_ms: float) -> bool:
    """Return whether an executed time is far from its prediction."""
    return not predicted_ms / FAR <= executed_ms <= predicted_ms * FAR


def ratio(before: float | None, after: float | None) -> float | None:
    """Return how many times as long something took before; None where a time is missing."""
    return before / after if before is not None and after else None


def report_kernel(
    decision: Decision, *, executed_ms: float | None = None, undivided_executed_ms: float | None = None
) -> KernelReport:
    """Return the report of one decision, with its measured times if it was executed."""
    undivided = decision.undivided
    return KernelReport(
        layer=decision.kernel.layer,
        operation=decision.kernel.operation.value,
        problem=str(decision.kernel.problem),
        count=decision.kernel.count,
        configuration=str(decision.configuration),
        undivided=str(undivided) if undivided else None,
        undivided_ms=undivided.time_ms if undivided else None,
        micro_batched_ms=decision.configuration.time_ms if decision.timed else None,
        undivided_executed_ms=undivided_executed_ms,
        executed_ms=executed_ms,
        workspace_bytes=decision.workspace_bytes,
        undivided_workspace_bytes=undivided.workspace_bytes if undivided else None,
        spare_bytes=decision.spare_bytes,
        origin=decision.origin.value,
    )


_MOST_NAMED = 3  # kernels in a line
_BUSY_CPUS = 0.2


def describe_deviations(kernels: Sequence[KernelReport], other_cpus: float | None) -> list[str]:
    """Return lines that say which kernels were measured again, which predictions do not hold, and why.

    Args:
        kernels: the kernels; those for which nothing was measured, or that were not executed, have nothing to compare.
        other_cpus: how many CPUs other programs used while kernels were executed; None if it is not known.
    """
    lines = []
    predicted = [(each, each.micro_batched_ms) for each in kernels if each.micro_batched_ms is not None]
    again = [
        f"{each.name} ({format_ms(each.first_predicted_ms)} before, {format_ms(now_ms)} now)"
        for each, now_ms in predicted
        if each.first_predicted_ms is not None
    ]
    if again:
        lines.append(f"measured again, because predictions were far from executed times: {_first(again)}")
    executed = [(each, each.executed_ms, time_ms) for each, time_ms in predicted if each.executed_ms is not None]
    ratios = {each.name: spent / time_ms for each, spent, time_ms in executed if is_far(spent, time_ms)}
    if not ratios:
        return lines
    worst = sorted(ratios, key=lambda name: -abs(log(ratios[name])))
    lines.append(
        f"predictions that do not hold: {len(ratios)} of {len(executed)} kernels are more than a factor of {FAR} off,"
        f" such as {_first([f'{name} ({ratios[name]:.2f} times its prediction)' for name in worst])}"
    )
    total = fsum(each.count * spent for each, spent, _ in executed)
    promised = fsum(each.count * time_ms for each, _, time_ms in executed)
    if is_far(total, promised):
        lines.append(f"could not predict: all kernels together took {total / promised:.2f} times their prediction")
    lines.append(_reason(other_cpus))
    return lines


def _reason(other_cpus: float | None) -> str:
    again = "measure again on an idle machine, with --remeasure or UCUDNN_REMEASURE=1"
    if other_cpus is None:
        return f"a possible reason: other programs used the machine; {again}"
    if other_cpus < _BUSY_CPUS:
        return f"other programs used no CPU meanwhile: the measurements may be those of a busy time; {again}"
    return f"a likely reason: other programs used {other_cpus:.1f} CPUs meanwhile; {again}"


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
