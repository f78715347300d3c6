"""A trial: one policy trains a model for some steps on a device, and what that takes is measured beside its prediction.

Peaks are those of the process, so each trial has a process of its own (`run_apart`), which also frees all that it held.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter
from typing import Any, final

import torch

from ucudnn.errors import BackendUnavailableError, InvalidValueError, MeasurementError, UcudnnError
from ucudnn.memory.simulation.result import Queue
from ucudnn.memory.step.graph import Phase
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.torch.comparison.device_timeline import beside_prediction, measure_timeline
from ucudnn.memory.torch.comparison.measured_memory import measure_memory
from ucudnn.memory.torch.comparison.step_marks import mark, passed_ms
from ucudnn.memory.torch.comparison.trial_process import process_of, received
from ucudnn.memory.torch.comparison.trial_result import (
    PYTORCH,
    OutsideReached,
    TrialFigures,
    TrialResult,
    TrialSettings,
)
from ucudnn.memory.torch.device.stated_budget import library_workspace_bytes, outside_bytes, read_outside
from ucudnn.memory.torch.measuring.measured_peak import peak_bytes
from ucudnn.memory.torch.measuring.training_step import TrainingStep, make_step
from ucudnn.memory.torch.running.fit import FitOptions, fit_subject
from ucudnn.memory.torch.running.fitted_step import FittedStep
from ucudnn.memory.torch.subject.step_arguments import step_subject
from ucudnn.memory.torch.subject.step_program import StepSubject
from ucudnn.problem import MathMode

ENDED = "its process ended abruptly, as one does that takes more of the host's memory than there is"
"""The reason of a trial whose process was killed."""

_MOST_ROUNDS = 3  # of timed steps; what grows beside the allocator is looked at after 1, 2, 4, 8 and so on steps


def trial_device(name: str) -> str:
    """Return the device of trials: 'cuda', 'cpu', or 'auto' for a GPU where there is one.

    Raises:
        BackendUnavailableError: if PyTorch has no GPU and one is wanted.
        InvalidValueError: if the name is not known.
    """
    if name not in ("auto", "cuda", "cpu"):
        raise InvalidValueError(f"--on={name!r} is not known: give auto, cuda or cpu")
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise BackendUnavailableError("--on=cuda: PyTorch has no GPU here: give cpu")
    return "cuda" if name != "cpu" and there else "cpu"


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
    device = _numbered(settings.device)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = settings.recipe.variant.math is MathMode.TF32
    torch.manual_seed(0)
    return make_step(settings.recipe, device)


def _numbered(name: str) -> torch.device:
    """Return a device, with its number if it is a GPU, because PyTorch's allocator takes none without one."""
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


@final
class ReusedStep:
    """A step that several trials train, one after another.

    Attributes:
        step: the step.
        device: where it runs.

    Args:
        settings: of the trials, of which the recipe and the device count.
    """

    def __init__(self, settings: TrialSettings) -> None:
        self.step = trial_step(settings)
        self.device = _numbered(settings.device)
        on_gpu = self.device.type == "cuda"
        self._random = torch.get_rng_state(), torch.cuda.get_rng_state(self.device) if on_gpu else None
        self._first = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._held()}

    def begin_anew(self) -> None:
        """Bring back the first tensors and random numbers, and give PyTorch's allocator back its room.

        The optimizer's state is forgotten.
        """
        with torch.no_grad():
            for name, tensor in self._held():
                tensor.copy_(self._first[name])
        cpu, gpu = self._random
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu, self.device)
        self.step.clear()
        if self.step.optimizer is not None:
            self.step.optimizer.state.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)
            torch.cuda.empty_cache()

    def _held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield parameters and buffers with their names, also buffers that are in no saved state."""
        yield from self.step.model.named_parameters()
        yield from self.step.model.named_buffers()


@final
class PolicyTrial:
    """One trial on its way.

    Args:
        settings: what it runs.
        step: the step of these settings; None to make it.
        fit: fits it; None for `fit` with these settings.
    """

    def __init__(
        self,
        settings: TrialSettings,
        step: TrainingStep | None = None,
        fit: Callable[[TrainingStep], FittedStep] | None = None,
    ) -> None:
        self.settings = settings
        self._device = _numbered(settings.device)
        self._on_gpu = self._device.type == "cuda"
        self._step, self._fit = step, fit or self._fitted
        self._current: FittedStep | None = None
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
        fitted = self._current = None if settings.policy == PYTORCH else self._fit(step)
        self._reach("fit")
        self._cap()  # fitting loads kernels
        planned = step if fitted is None else with_plan(step, fitted)
        self._take(planned)
        self._wait()
        first_ms = (perf_counter() - begin) * 1e3
        self._reach("first step")
        for _ in range(_MOST_ROUNDS):
            self._warm_up(planned)
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

    def close(self) -> None:
        """Give back the host's memory that its plan has."""
        if self._current is not None:
            self._current.close()
            self._current = None

    def _round(
        self, planned: TrainingStep, fitted: FittedStep | None, library: int, first_ms: float
    ) -> TrialFigures | None:
        """Take the timed steps and those behind them, and return what was measured; None if the plan has changed."""
        settings, plan = self.settings, fitted and fitted.plan
        moved, retries = _moved(fitted), self._retries()
        times = self._timed(planned)
        offloaded, prefetched = (after - before for after, before in zip(_moved(fitted), moved, strict=True))
        allocated, reserved = self._peaks(planned)
        retries = None if retries is None else (self._retries() or 0) - retries
        outside = self._reach("timed steps")  # before a profiler of ours takes some
        timeline = measure_timeline(lambda: self._take(planned), self._device, fitted and fitted.transfers)
        memory = () if fitted is None else measure_memory(planned, fitted, library)
        if fitted is not None and fitted.plan is not plan:
            return None
        simulation, picture = fitted and fitted.simulation, None
        if fitted is not None and simulation is not None and timeline is not None:
            picture = beside_prediction(fitted.plan, simulation, timeline, allocated, library, memory)
        chosen = [] if fitted is None else [*fitted.plan.configurations.values()]
        return TrialFigures(
            predicted_peak=None if fitted is None else fitted.simulation.peak_bytes + library + fitted.held_bytes,
            predicted_reserved=None if fitted is None else fitted.stated.allocator_bytes,
            predicted_returned=None if fitted is None else fitted.stated.returned_bytes,
            moved=None if fitted is None else fitted.stated.moved_bytes,
            predicted_ms=None if fitted is None else _predicted_ms(fitted, capped=settings.capped),
            floor=None if fitted is None else measure_liveness(fitted.plan.graph, fitted.costs).floor_bytes + library,
            allocated=allocated,
            reserved=reserved,
            retries=retries,
            library=library,
            outside=outside,
            counted_outside=_counted_outside(fitted),
            reached=tuple(self._reached),
            pinned=0 if fitted is None else fitted.transfers.block_bytes,
            step_ms=median(times),
            fastest_ms=min(times),
            slowest_ms=max(times),
            first_ms=first_ms,
            offloaded=offloaded // settings.steps,
            prefetched=prefetched // settings.steps,
            forward_ms=None if fitted is None else _forward_ms(fitted),
            to_host_bytes_per_ms=None if fitted is None else fitted.costs.offload_bytes_per_ms,
            compute_ms=None if timeline is None else timeline.busy_ms(Queue.COMPUTE),
            to_host_ms=None if timeline is None else timeline.busy_ms(Queue.TO_HOST),
            from_host_ms=None if timeline is None else timeline.busy_ms(Queue.FROM_HOST),
            overlap=None if timeline is None else timeline.overlap,
            configured=len(chosen),
            divided=sum(each.calls > 1 for each in chosen),
            workspace=max((each.workspace_bytes for each in chosen), default=0),
            losses=tuple(float(loss) for loss in self._losses),
            memory=memory,
            picture=picture,
        )

    def _fitted(self, step: TrainingStep) -> FittedStep:
        settings = self.settings
        with step.autocast():
            subject = trial_subject(step)
            options = FitOptions(measured=True, convolutions=settings.convolutions or None)
            return fit_subject(subject, settings.budget, settings.policy, options)

    def _cap(self) -> None:
        """Let PyTorch's allocator have what the budget leaves, if the trial is capped."""
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

    def _warm_up(self, step: TrainingStep) -> None:
        for _ in range(self.settings.warmup):
            self._take(step)

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def _timed(self, step: TrainingStep) -> list[float]:
        """Return the times of steps, during which peaks of a GPU count."""
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

    def _peaks(self, step: TrainingStep) -> tuple[int, int | None]:
        """Return the most bytes allocated and reserved during the timed steps; on a CPU in one more step."""
        if self._on_gpu:
            return torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)
        return peak_bytes(step), None

    def _retries(self) -> int | None:
        return int(torch.cuda.memory_stats(self._device)["num_alloc_retries"]) if self._on_gpu else None


def trial_subject(step: TrainingStep) -> StepSubject:
    """Return what is trained."""
    return step_subject(step.model, (*step.inputs, *step.targets), step.loss, step.optimizer)


def with_plan(step: TrainingStep, fitted: FittedStep) -> TrainingStep:
    """Return a step that runs the plan in the place of the model and its loss."""
    own: Callable[..., Any] = _itself
    return replace(step, model=fitted, inputs=(*step.inputs, *step.targets), targets=(), loss=own)


def _itself(loss: Any) -> Any:
    return loss


def _predicted_ms(fitted: FittedStep, *, capped: bool) -> float:
    stated = fitted.stated
    on_device = fitted.simulation.time_ms + stated.moved_ms + (stated.returned_ms if capped else 0.0)
    return max(on_device, fitted.simulation.issue_ms)


def _counted_outside(fitted: FittedStep | None) -> int | None:
    if fitted is None or fitted.stated.budget is None:
        return None
    return fitted.stated.outside_bytes + fitted.stated.reserve_bytes


def _forward_ms(fitted: FittedStep) -> float:
    operations, times = fitted.plan.graph.operations, fitted.costs.time_ms
    return sum(time for time, each in zip(times, operations, strict=True) if each.phase is Phase.FORWARD)


def _moved(fitted: FittedStep | None) -> tuple[int, int]:
    return (0, 0) if fitted is None else (fitted.transfers.offloaded_bytes, fitted.transfers.prefetched_bytes)
