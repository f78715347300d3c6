"""The report of what a program ran: decisions, calls and replacements, and times that are measured for the report."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import NamedTuple, final

from ucudnn.backends.base import Backend, ComputeBackend
from ucudnn.execution.entry import Entry
from ucudnn.execution.kernel_plans import KernelPlans
from ucudnn.planning.decision import Decision, Decisions
from ucudnn.reporting.kernel_report import KernelReport, report_kernel
from ucudnn.reporting.plan_timing import Execution, execute
from ucudnn.reporting.report import Report, report_decisions

_BUSY = (0, 1, 2, 5, 6, 7)  # columns of /proc/stat: user, nice, system, interrupts, soft interrupts, stolen


class CpuSeconds(NamedTuple):
    """Seconds of processors: of any program and of this process; and of the clock, since some time in the past."""

    all: float
    own: float
    wall: float


def read_cpu_seconds() -> CpuSeconds | None:
    """Return the seconds that Linux has counted, or None where there is no such count."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
        ticks = sum(int(fields[column]) for column in _BUSY)
        return CpuSeconds(ticks / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4]), monotonic())
    except (OSError, ValueError, IndexError, AttributeError):  # other systems have neither the file nor sysconf
        return None


@final
class MachineLoad:
    """Counts from its creation on; `read` returns the seconds so far."""

    def __init__(self, read: Callable[[], CpuSeconds | None] = read_cpu_seconds) -> None:
        self._read = read
        self._begin = read()

    def others(self) -> float | None:
        """Return how many processors other programs used on average since the creation; None if that is not known."""
        now = self._read()
        if self._begin is None or now is None or now.wall <= self._begin.wall:
            return None
        used = (now.all - self._begin.all) - (now.own - self._begin.own)
        return max(0.0, used / (now.wall - self._begin.wall))


def report_run(
    decided: Sequence[Decisions],
    entries: Iterable[Entry],
    backend: Backend,
    policy: str,
    executed: Mapping[Entry, KernelReport] | None = None,
    other_cpus: float | None = None,
) -> Report:
    """Return the report of the kernels that a program ran.

    Args:
        decided: the decisions in order, at least one.
        entries: the kernels; those without a decision are left out.
        backend: the backend that ran the kernels.
        policy: the batch-size policy.
        executed: the reports of kernels that were executed for this report.
        other_cpus: how many CPUs other programs used meanwhile; None if it is not known.
    """
    run = [(each.decision, each) for each in entries if each.decision is not None]
    first = {id(decision) for each in decided for decision in each.kernels}
    merged = Decisions(
        method=decided[0].method,
        limit_bytes=decided[0].limit_bytes,
        kernels=tuple(decision for decision, _ in run),
        benchmark_seconds=sum(each.benchmark_seconds for each in decided),
        solver_seconds=sum(each.solver_seconds for each in decided),
        division=decided[-1].division,
    )
    return report_decisions(
        merged,
        [_report_entry(decision, entry, (executed or {}).get(entry)) for decision, entry in run],
        backend,
        policy=policy,
        changed=sum(id(decision) not in first for decision, _ in run),
        other_cpus=other_cpus,
    )


def report_plans(plans: KernelPlans, backend: Backend, policy: str, repeats: int) -> Report:
    """Return the report of the kernels that a handle ran, each of which is timed now if there are repeats.

    Each plan is timed `repeats` times; see `execute_entries`.

    Raises:
        StepError, MemoryError: if an algorithm fails, or there is no room for tensors and workspace.
        UcudnnError: if a kernel is measured again, and cannot be planned.
    """
    if not repeats or not plans.decisions or not isinstance(backend, ComputeBackend):
        return report_run(plans.decided(), plans.entries.values(), backend, policy)
    load = MachineLoad()
    executed = execute_entries(plans, partial(execute, backend=backend, repeats=repeats))
    return report_run(plans.decisions, plans.entries.values(), backend, policy, executed, load.others())


def execute_entries(plans: KernelPlans, run: Execution) -> dict[Entry, KernelReport]:
    """Execute the kernels that have a decision. Those far from their predictions are measured and planned again, once.

    Kernels whose configuration was replaced keep the other one: it failed, or found no room. Where ranks measure
    together, nothing is measured again, because a rank would wait for others that do not ask for it.

    Returns:
        The reports of the decisions that hold in the end.
    """
    before = {each: each.decision for each in plans.entries.values() if each.decision is not None}
    reports = {entry: run(decision) for entry, decision in before.items()}
    far = [entry for entry, report in reports.items() if report.is_far and not entry.replacements]
    if not far or not plans.measure_again(far):
        return reports
    stale = {entry: before[entry].configuration.time_ms for entry in far}
    for entry, decision in before.items():
        now = entry.decision
        assert now is not None
        if entry in stale:
            reports[entry] = replace(run(now), first_predicted_ms=stale[entry])
        elif now != decision:  # the workspace was divided again
            reports[entry] = run(now)
    return reports


def _report_entry(decision: Decision, entry: Entry, executed: KernelReport | None) -> KernelReport:
    always = [each for each in entry.replacements if not each.calls]
    return replace(
        executed or report_kernel(decision),
        calls=entry.launches,
        replaced=tuple(map(str, entry.replacements)),
        replaced_ms=always[0].before.time_ms if always and always[0].timed else None,
    )
