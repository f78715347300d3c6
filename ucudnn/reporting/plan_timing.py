"""Times of plans, which run in turn on the same tensors; kernels far from their prediction are measured again, once."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from statistics import median
from typing import TypeVar

from ucudnn.backends.base import ComputeBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.configuration import Configuration
from ucudnn.execution.plan import Plan, make_plan
from ucudnn.kernel import Kernel
from ucudnn.planning.concurrency import Groups
from ucudnn.planning.decision import Decision, Decisions, decide
from ucudnn.planning.plan_file import NO_PLANS, LoadedPlans
from ucudnn.planning.replanning import requests_behind
from ucudnn.problem import ConvolutionProblem
from ucudnn.reporting.kernel_report import KernelReport, report_kernel
from ucudnn.settings import Settings

Name = TypeVar("Name", bound=Hashable)
"""The name of a run."""

_WARM_MS = 30.0  # of work before the first sample, because an idle GPU runs at a lower clock
_LONG_MS = 500.0  # of a first run that counts, because what happens once is a small part of it
_SAMPLE_MS = 2.0  # a shorter plan runs several times in a sample, because the first launch adds noise
_MOST_RUNS = 16


def execute(decision: Decision, backend: ComputeBackend, repeats: int) -> KernelReport:
    """Run a decision's undivided and micro-batched plans in turn and report the median times of `repeats` runs.

    BackwardFilter runs with beta = 0, as the first gradient of a training step does.

    Raises:
        StepError, MemoryError: if an algorithm fails, or there is no room for tensors and workspace.
    """
    kernel, problem = decision.kernel, decision.kernel.problem
    plan = make_plan(problem, decision.configuration, backend, fresh=kernel.fresh)
    plans: dict[Configuration, Configuration | Plan] = {decision.configuration: plan}
    if decision.undivided is not None:
        plans.setdefault(decision.undivided, decision.undivided)
    times = times_in_turn(problem, plans, backend, repeats)
    return report_kernel(
        decision,
        executed_ms=times[decision.configuration],
        undivided_executed_ms=times[decision.undivided] if decision.undivided else None,
    )


def times_in_turn(
    problem: ConvolutionProblem, given: Mapping[Name, Configuration | Plan], backend: ComputeBackend, repeats: int
) -> dict[Name, float]:
    """Run configurations of a problem in turn, on the same random tensors, and return the median milliseconds of each.

    The problem is at mini-batch size. Errors are those of `execute`.
    """
    plans = {
        name: each if isinstance(each, Plan) else make_plan(problem, each, backend) for name, each in given.items()
    }
    tensors = backend.operands(problem)  # they live as long as the runs
    x, w, y, _ = backend.bind(*tensors)
    workspace = backend.allocate(max(each.workspace_bytes for each in plans.values()))
    runs = {name: partial(each.launch, x, w, y, workspace) for name, each in plans.items()}
    return {name: median(each) for name, each in samples_in_turn(runs, backend, repeats).items()}


def samples_in_turn(
    runs: Mapping[Name, Callable[[], None]], backend: ComputeBackend, repeats: int
) -> dict[Name, list[float]]:
    """Run several functions in turn and return the milliseconds of each, in the order of the rounds.

    So many samples are taken of each function. The run before the first one counts, too, if it is long.
    """
    counts: dict[Name, int] = {}
    samples: dict[Name, list[float]] = {name: [] for name in runs}
    for name, run in runs.items():
        warm = backend.elapsed_ms(run)
        if warm >= _LONG_MS:
            samples[name].append(warm)
        while warm < _WARM_MS:
            warm += (last := backend.elapsed_ms(run, run))
            counts[name] = max(1, min(_MOST_RUNS, ceil(_SAMPLE_MS / last)))
    for turn in range(repeats):
        for name, run in runs.items():
            if len(samples[name]) > turn:
                continue
            count = counts.get(name, 1)
            samples[name].append(backend.elapsed_ms(partial(_repeat, run, count), run) / count)
    return samples


def _repeat(run: Callable[[], None], count: int) -> None:
    for _ in range(count):
        run()


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
