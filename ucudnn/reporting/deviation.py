"""Deviations of executed times from predicted ones, in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, log
from typing import final

from ucudnn.units import format_ms

FAR = 1.25
"""An executed time is far from its prediction if one of them is more than this many times the other."""

_MOST_NAMED = 3  # kernels in a line
_BUSY_CPUS = 0.2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTimes:
    """Predicted and executed milliseconds of a kernel.

    Attributes:
        name: its layer and operation.
        count: how many layers it stands for.
        predicted_ms: the prediction that holds.
        executed_ms: the executed time; None if it was not executed.
        first_predicted_ms: the prediction before the kernel was measured again; None if it was not.
    """

    name: str
    count: int
    predicted_ms: float
    executed_ms: float | None
    first_predicted_ms: float | None = None


def is_far(executed_ms: float, predicted_ms: float) -> bool:
    """Return whether an executed time is far from its prediction."""
    return not predicted_ms / FAR <= executed_ms <= predicted_ms * FAR


def describe_deviations(kernels: Sequence[KernelTimes], other_cpus: float | None) -> list[str]:
    """Return lines that say which kernels were measured again, which predictions do not hold, and why.

    Args:
        kernels: the times.
        other_cpus: how many CPUs other programs used while kernels were executed; None if it is not known.
    """
    lines = []
    again = [
        f"{each.name} ({format_ms(each.first_predicted_ms)} before, {format_ms(each.predicted_ms)} now)"
        for each in kernels
        if each.first_predicted_ms is not None
    ]
    if again:
        lines.append(f"measured again, because predictions were far from executed times: {_first(again)}")
    executed = [(each, each.executed_ms) for each in kernels if each.executed_ms is not None]
    ratios = {
        each.name: time_ms / each.predicted_ms for each, time_ms in executed if is_far(time_ms, each.predicted_ms)
    }
    if not ratios:
        return lines
    worst = sorted(ratios, key=lambda name: -abs(log(ratios[name])))
    lines.append(
        f"predictions that do not hold: {len(ratios)} of {len(executed)} kernels are more than a factor of {FAR} off,"
        f" such as {_first([f'{name} ({ratios[name]:.2f} times its prediction)' for name in worst])}"
    )
    spent, predicted = (
        fsum(time_ms * each.count for each, time_ms in executed),
        fsum(each.predicted_ms * each.count for each, _ in executed),
    )
    if is_far(spent, predicted):
        lines.append(f"could not predict: all kernels together took {spent / predicted:.2f} times their prediction")
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
