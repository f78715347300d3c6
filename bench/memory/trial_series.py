"""Several policies without a budget, one after another on one step, whose operations are measured once.

Measuring the operations of a step takes longer than the steps of a trial. Within a budget they are measured anew
(`budget_series`), because what a budget bounds is the process.
"""

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, final

from bench.memory.contention import ContentionFigures, measure_contention
from bench.memory.reused_step import ReusedStep
from ucudnn.errors import InvalidValueError
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.torch.comparison.trial import ENDED, PolicyTrial, result_of, trial_subject, with_plan
from ucudnn.memory.torch.comparison.trial_process import process_of, received
from ucudnn.memory.torch.comparison.trial_result import TrialFigures, TrialResult, TrialSettings
from ucudnn.memory.torch.convolutions.convolution_choices import ConvolutionChoices
from ucudnn.memory.torch.measuring.operation_costs import measure_operations, step_costs
from ucudnn.memory.torch.measuring.training_step import TrainingStep
from ucudnn.memory.torch.running.fit import fit_plan
from ucudnn.memory.torch.running.fitted_step import FittedStep
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.memory.torch.tracing.traced_program import trace_program

_WITHOUT_COPIES = "stock"


class SeriesMember(NamedTuple):
    """A policy of a series.

    Attributes:
        policy: its name.
        convolutions: the batch-size policy by which it chooses convolutions; '' leaves them to PyTorch.
        contention: whether the steps of its plan also take turns with those of a plan without copies, which run alone
            and beside copies that nothing waits for (`measure_contention`).
    """

    policy: str
    convolutions: str = ""
    contention: bool = False


class SeriesResult(NamedTuple):
    """The outcome of a member, and its contention where that was asked for."""

    result: TrialResult
    contention: ContentionFigures | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the picture, for JSON."""
        contention = None if self.contention is None else asdict(self.contention)
        return {**self.result.to_dict(), "contention": contention}


@final
class TrialSeries:
    """Runs policies on one step.

    Each policy begins with the same parameters and without state of the optimizer.

    Args:
        settings: what runs; of it neither the policy nor how it chooses convolutions counts.

    Raises:
        InvalidValueError: if there is a budget, or there is no such model, loss or optimizer.
    """

    def __init__(self, settings: TrialSettings) -> None:
        if settings.budget is not None:
            raise InvalidValueError(
                "a series of policies has no budget: within one, operations are measured for each trial"
            )
        self._settings = settings
        self._reused = ReusedStep(settings)
        self._step = self._reused.step
        self._chosen: dict[str, tuple[ConvolutionChoices, Costs]] = {}

    def run(self, member: SeriesMember) -> SeriesResult:
        """Run a policy, or PyTorch's own step."""
        settings = replace(self._settings, policy=member.policy, convolutions=member.convolutions)
        fitted: list[FittedStep] = []

        def fit(step: TrainingStep) -> FittedStep:
            fitted.append(self._fitted(member))
            return fitted[-1]

        contention: list[ContentionFigures] = []

        def run() -> TrialFigures:
            figures = PolicyTrial(settings, self._step, fit).run()
            if member.contention:
                contention.append(self._contention(fitted[0]))
            return figures

        self._reused.begin_anew()
        try:
            return SeriesResult(result_of(settings.policy, run), *contention)
        finally:
            for each in fitted:
                each.close()

    def _contention(self, fitted: FittedStep) -> ContentionFigures:
        with closing(self._fitted(SeriesMember(_WITHOUT_COPIES))) as base:
            return measure_contention(
                with_plan(self._step, base),
                with_plan(self._step, fitted),
                fitted.plan,
                self._program.device,
                rounds=self._settings.steps,
                warmup=self._settings.warmup,
            )

    def _fitted(self, member: SeriesMember) -> FittedStep:
        with self._step.autocast():
            program, costs = self._program, self._costs
            choices = None
            if member.convolutions:
                choices, costs = self._choices(member.convolutions)
            plan = make_plan(program.graph, costs, None, member.policy)
            if choices is not None:
                program = choices.applied(plan.configurations)
            return fit_plan(trial_subject(self._step), program, plan, costs)

    @cached_property
    def _program(self) -> StepProgram:
        model = self._step.model
        return trace_program(trial_subject(self._step), type(model).__name__, self._settings.recipe.batch)

    @cached_property
    def _costs(self) -> Costs:
        program = self._program
        return measure_operations(program, step_costs(program.graph, program.device), tensor_bytes=None)

    def _choices(self, convolutions: str) -> tuple[ConvolutionChoices, Costs]:
        if convolutions not in self._chosen:
            choices = ConvolutionChoices.asked(self._program, convolutions)
            self._chosen[convolutions] = choices, choices.measured(self._costs, None)
        return self._chosen[convolutions]


def run_series_apart(settings: TrialSettings, members: Sequence[SeriesMember]) -> Generator[SeriesResult, None, None]:
    """Yield the outcome of each member in their order, as soon as it is known, from a process of their own.

    A process that ends by a signal is the reason of the member that ran; those behind it run in a new process.
    """
    left = [*members]
    while left:
        with process_of(_serve, settings, [*left]) as connection:
            while left:
                member = left.pop(0)
                try:
                    result = received(connection)
                except EOFError:
                    yield SeriesResult(TrialResult(policy=member.policy, figures=None, reason=ENDED))
                    break
                if isinstance(result, Exception):
                    raise result
                yield result


def _serve(settings: TrialSettings, members: Sequence[SeriesMember], connection: Connection) -> None:
    try:
        series = TrialSeries(settings)
        for member in members:
            connection.send(series.run(member))
    except Exception as error:  # noqa: BLE001, because the process that waits shall raise it
        connection.send(error)
