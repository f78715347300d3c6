"""Deviations of executed times from predicted ones, in words."""

from collections.abc import Sequence
from math import fsum, log

from ucudnn.reporting.kernel_report import FAR, KernelReport, is_far
from ucudnn.units import format_ms

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
