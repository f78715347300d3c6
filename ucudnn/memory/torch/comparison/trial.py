"""A trial: one policy trains a model for some steps on a device, and what that takes is measured beside its prediction.

Peaks are those of the process, so each trial has a process of its own (`run_apart`), which also frees all that it held.
"""

import gc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter
from typing import final

import torch

from ucudnn.errors import MeasurementError, UcudnnError
from ucudnn.memory.simulation.result import Queue
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.torch.comparison.device_timeline import (
    MeasuredTimeline,
    OperationMemory,
    beside_prediction,
    measure_memory,
    measure_timeline,
)
from ucudnn.memory.torch.comparison.trial_process import process_of, received
from ucudnn.memory.torch.comparison.trial_result import (
    PYTORCH,
    OutsideReached,
    TrialFigures,
    TrialResult,
    TrialSettings,
)
from ucudnn.memory.torch.device.stated_budget import library_workspace_bytes, outside_bytes, read_outside
from ucudnn.memory.torch.device.step_clock import mark, passed_ms
from ucudnn.memory.torch.measuring.measured_peak import peak_bytes
from ucudnn.memory.torch.measuring.training_step import TrainingStep, make_step
from ucudnn.memory.torch.running.fit import FitOptions, fit_subject
from ucudnn.memory.torch.running.fitted_step import FittedStep
from ucudnn.memory.torch.subject.step_program import StepSubject, step_subject
from ucudnn.problem import MathMode

ENDED = "its process ended abruptly, as one does that takes more of the host's memory than there is"
"""The reason of a trial whose process was killed."""

_MOST_ROUNDS = 3  # of timed steps; what grows beside the allocator is looked at after 1, 2, 4, 8 and so on steps


def run_apart(settings: TrialSettings) -> TrialResult:
    """Run a trial in a process of its own; the process's end by a signal is a reason, too."""
    with process_of(_serve, settings) as connection:
        try:
            result: TrialResult | Exception = received(connection)
        except EOFError:
            return TrialResult(policy=settings.policy, figures=None, reason=ENDED)
    if isinstance(result, Exception):
        raise result
    return result


def _serve(settings: TrialSettings, connection: Connection) -> None:
    try:
        connection.send(run_trial(settings))
    except Exception as error:  # noqa: BLE001, because the process that waits shall raise it
        connection.send(error)


def run_trial(settings: TrialSettings) -> TrialResult:
    """Run a trial in this process."""
    return result_of(settings.policy, PolicyTrial(settings).run)


def result_of(policy: str, run: Callable[[], TrialFigures]) -> TrialResult:
    """Run a trial of a policy, and return its outcome; an error of it is a reason."""
    try:
        return TrialResult(policy=policy, figures=run())
    except UcudnnError as error:
        least = getattr(error, "required_bytes", None)
        return TrialResult(policy=policy, figures=None, reason=str(error), least_bytes=least)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever the model or the loss raises
        line = str(error).partition("\n")[0]
        return TrialResult(policy=policy, figures=None, reason=f"{type(error).__name__}: {line}")


def trial_step(settings: TrialSettings) -> TrainingStep:
    """Return the step of trials, after PyTorch was told how to compute it."""
    device = numbered_device(settings.device)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = settings.recipe.variant.math is MathMode.TF32
    torch.manual_seed(0)
    return make_step(settings.recipe, device)


def numbered_device(name: str) -> torch.device:
    """Return a device, with its number if it is a GPU, because PyTorch's allocator takes none without one."""
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


@final
class PolicyTrial:
    """One trial on its way."""

    def __init__(
        self,
        settings: TrialSettings,
        step: TrainingStep | None = None,
        fit: Callable[[TrainingStep], FittedStep] | None = None,
    ) -> None:
        self.settings = settings
        self._device = numbered_device(settings.device)
        self._on_gpu = self._device.type == "cuda"
        self._step, self._fit = step, fit or self._fitted
        self._losses: list[torch.Tensor] = []
        self._reached: list[OutsideReached] = []

    def run(self) -> TrialFigures:
        """Run it, and return what was measured.

        Timed steps are of one plan. Where growth beside the allocator changes it meanwhile, they are repeated.

        Raises:
            MeasurementError: if the plan changed in each of some rounds of timed steps.
            RuntimeError: if memory runs out; other errors are those of `fit`.
        """
        settings = self.settings
        step = trial_step(settings) if self._step is None else self._step
        self._cap()
        self._reach("model")
        library = library_workspace_bytes(self._device)
        self._reach("libraries")
        begin = perf_counter()
        fitted = None if settings.policy == PYTORCH else self._fit(step)
        self._reach("fit")
        self._cap()  # fitting loads kernels
        planned = step if fitted is None else with_plan(step, fitted)
        self._take(planned)
        self._wait()
        first_ms = (perf_counter() - begin) * 1e3
        self._reach("first step")
        for _ in range(_MOST_ROUNDS):
            for _ in range(settings.warmup):
                self._take(planned)
            self._reach("steps before the timed ones")
            found = self._round(planned, fitted, library, first_ms)
            if found is not None:
                return found
            if self._on_gpu and not (fitted is not None and fitted.has_block):
                torch.cuda.empty_cache()  # or pages of the earlier plan would count as those of the next one
        raise MeasurementError(
            f"its plan changed in each of {_MOST_ROUNDS} rounds of timed steps, so there are no figures of one plan:"
            " what the process has beside PyTorch's allocator grows on"
        )

    def _round(
        self, planned: TrainingStep, fitted: FittedStep | None, library: int, first_ms: float
    ) -> TrialFigures | None:
        """Take the timed steps and those behind them, and return what was measured; None if the plan has changed."""
        settings, plan = self.settings, fitted and fitted.plan
        moved, retries = _moved(fitted), self._retries()
        times = self._timed(planned)
        offloaded, prefetched = (after - before for after, before in zip(_moved(fitted), moved, strict=True))
        if self._on_gpu:
            allocated = torch.cuda.max_memory_allocated(self._device)
            reserved: int | None = torch.cuda.max_memory_reserved(self._device)
        else:  # in one more step
            allocated, reserved = peak_bytes(planned), None
        retries = None if retries is None else (self._retries() or 0) - retries
        outside = self._reach("timed steps")  # before a profiler of ours takes some
        timeline = measure_timeline(lambda: self._take(planned), self._device, fitted and fitted.transfers)
        figures = TrialFigures(
            allocated=allocated,
            reserved=reserved,
            retries=retries,
            library=library,
            outside=outside,
            reached=tuple(self._reached),
            step_ms=median(times),
            fastest_ms=min(times),
            slowest_ms=max(times),
            first_ms=first_ms,
            offloaded=offloaded // settings.steps,
            prefetched=prefetched // settings.steps,
            losses=tuple(float(loss) for loss in self._losses),
        )
        if timeline is not None:
            figures = replace(
                figures,
                compute_ms=timeline.busy_ms(Queue.COMPUTE),
                to_host_ms=timeline.busy_ms(Queue.TO_HOST),
                from_host_ms=timeline.busy_ms(Queue.FROM_HOST),
                overlap=timeline.overlap,
            )
        if fitted is None:
            return figures
        memory = measure_memory(planned, fitted, library)
        return None if fitted.plan is not plan else self._with_plan(figures, fitted, timeline, memory)

    def _with_plan(
        self,
        figures: TrialFigures,
        fitted: FittedStep,
        timeline: MeasuredTimeline | None,
        memory: tuple[OperationMemory, ...],
    ) -> TrialFigures:
        plan, costs, stated, simulation = fitted.plan, fitted.costs, fitted.stated, fitted.simulation
        library, picture = figures.library, None
        if timeline is not None:
            picture = beside_prediction(plan, simulation, timeline, figures.allocated, library, memory)
        on_device_ms = simulation.time_ms + stated.moved_ms + (stated.returned_ms if self.settings.capped else 0.0)
        chosen = plan.configurations.values()
        return replace(
            figures,
            predicted_peak=simulation.peak_bytes + library + fitted.held_bytes,
            predicted_reserved=stated.allocator_bytes,
            predicted_returned=stated.returned_bytes,
            moved=stated.moved_bytes,
            predicted_ms=max(on_device_ms, simulation.issue_ms),
            floor=measure_liveness(plan.graph, costs).floor_bytes + library,
            counted_outside=None if stated.budget is None else stated.outside_bytes + stated.reserve_bytes,
            pinned=fitted.transfers.block_bytes,
            configured=len(chosen),
            divided=sum(each.calls > 1 for each in chosen),
            workspace=max((each.workspace_bytes for each in chosen), default=0),
            memory=memory,
            picture=picture,
        )

    def _fitted(self, step: TrainingStep) -> FittedStep:
        settings = self.settings
        options = FitOptions(
            budget=settings.budget,
            policy=settings.policy,
            measured=True,
            convolutions=settings.convolutions or None,
            plan_seconds=settings.plan_seconds,
            divide=settings.divide,
            compile=settings.compile,
        )
        with step.autocast():
            return fit_subject(trial_subject(step), options)

    def _cap(self) -> None:
        budget = self.settings.budget
        if self._on_gpu and self.settings.capped and budget is not None:
            total = torch.cuda.get_device_properties(self._device).total_memory
            left = max(0, budget - outside_bytes(self._device))
            torch.cuda.set_per_process_memory_fraction(min(1.0, left / total))

    def _reach(self, part: str) -> int:
        """Note what the process has beside PyTorch's allocator after a part of the trial, and return its bytes."""
        found = read_outside(self._device)
        if self._on_gpu:
            self._reached.append(OutsideReached(part, found.bytes, found.told_apart))
        return found.bytes

    def _take(self, step: TrainingStep) -> None:
        step.clear()
        self._losses.append(step.run())

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def _timed(self, step: TrainingStep) -> list[float]:
        gc.collect()
        self._wait()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        marks = [mark(self._device)]
        for _ in range(self.settings.steps):
            self._take(step)
            marks.append(mark(self._device))
        self._wait()
        return [passed_ms(*pair) for pair in pairwise(marks)]

    def _retries(self) -> int | None:
        return int(torch.cuda.memory_stats(self._device)["num_alloc_retries"]) if self._on_gpu else None


def trial_subject(step: TrainingStep) -> StepSubject:
    """Return what is trained."""
    return step_subject(step.model, (*step.inputs, *step.targets), step.loss, step.optimizer)


def with_plan(step: TrainingStep, fitted: FittedStep) -> TrainingStep:
    """Return a step that runs the plan in the place of the model and its loss."""
    return replace(step, model=fitted, inputs=(*step.inputs, *step.targets), targets=(), loss=lambda loss: loss)


def _moved(fitted: FittedStep | None) -> tuple[int, int]:
    return (0, 0) if fitted is None else (fitted.transfers.offloaded_bytes, fitted.transfers.prefetched_bytes)
