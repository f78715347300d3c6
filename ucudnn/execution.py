"""Execution of decisions on the spot: undivided and micro-batched plans, measured against each other."""

from collections.abc import Callable
from functools import partial
from statistics import median

from ucudnn.backends.base import ComputeBackend
from ucudnn.configuration import Configuration
from ucudnn.decision import Decision
from ucudnn.plan import make_plan
from ucudnn.report import KernelReport, report_kernel


def execute(decision: Decision, backend: ComputeBackend, repeats: int) -> KernelReport:
    """Run a decision's undivided and micro-batched plans in turn and report the median times.

    BackwardFilter runs with beta = 0, as the first gradient of a step does.

    Args:
        decision: what was decided for a kernel.
        backend: runs it.
        repeats: how often each plan is measured, after one run that warms up.
    """
    problem = decision.kernel.problem
    x, w, y = backend.operands(problem)
    configurations = [decision.configuration]
    if decision.undivided is not None and decision.undivided != decision.configuration:
        configurations.insert(0, decision.undivided)
    workspace = backend.allocate(max(configuration.workspace_bytes for configuration in configurations))
    runs: dict[Configuration, Callable[[], None]] = {}
    for configuration in configurations:
        plan = make_plan(problem, configuration, backend)
        runs[configuration] = partial(plan.launch, x, w, y, alpha=1.0, beta=0.0, workspace=workspace)
    for run in runs.values():
        run()
    samples: dict[Configuration, list[float]] = {configuration: [] for configuration in runs}
    for _ in range(repeats):
        for configuration, run in runs.items():
            samples[configuration].append(backend.elapsed_ms(run))
    times = {configuration: median(each) for configuration, each in samples.items()}
    return report_kernel(
        decision,
        executed_ms=times[decision.configuration],
        undivided_executed_ms=times[decision.undivided] if decision.undivided else None,
    )
