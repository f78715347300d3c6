"""Predictions against executions: kernels whose times are far from their prediction are measured again, once."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.kernel import Kernel
from ucudnn.planning.concurrency import Groups
from ucudnn.planning.decision import Decision, Decisions, decide
from ucudnn.planning.plan_file import NO_PLANS, LoadedPlans
from ucudnn.planning.replanning import requests_behind
from ucudnn.reporting.kernel_report import KernelReport
from ucudnn.settings import Settings

Execution = Callable[[Decision], KernelReport]
"""Runs the plans of a decision, and returns its report."""


def execute_all(
    kernels: Sequence[Kernel],
    decisions: Decisions,
    benchmark: Benchmark,
    settings: Settings,
    groups: Groups,
    run: Execution,
    loaded: LoadedPlans = NO_PLANS,
) -> tuple[Decisions, list[KernelReport]]:
    """Execute decisions. Where times are far from predictions, measure the kernels again, decide again and execute.

    Plans that were loaded from a file are not measured again.

    Returns:
        The decisions that hold in the end, with their reports.
    """
    reports = [run(decision) for decision in decisions.kernels]
    far = [decision for decision, report in zip(decisions.kernels, reports, strict=True) if report.is_far]
    if not far:
        return decisions, reports
    benchmark.remeasure([each for decision in far for each in requests_behind(decision, benchmark, settings)])
    again = decide(kernels, benchmark, settings, groups, loaded).after([decisions])
    stale = {decision.kernel.problem: decision.configuration.time_ms for decision in far}
    found = []
    for decision in again.kernels:
        same = next((at for at, each in enumerate(decisions.kernels) if each == decision), None)
        if decision.kernel.problem in stale:
            found.append(replace(run(decision), first_predicted_ms=stale[decision.kernel.problem]))
        else:
            found.append(run(decision) if same is None else reports[same])
    return again, found
