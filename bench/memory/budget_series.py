"""Budgets of one step, one after another in a process, which makes cuDNN's trials of algorithms once.

In a process of its own, a trial with a budget spends most of its time on imports and on cuDNN's trials, which PyTorch
remembers for its process (`benchmark_cache` in `aten/src/ATen/native/cudnn/Conv_v8.cpp`). Here they stay from trial to
trial. Everything else begins anew: parameters, the optimizer's state, PyTorch's allocator, its bound, the measuring of
operations within the budget, and the plan.

What is remembered is the fastest algorithm that fitted into memory then. Within a smaller budget it is still the
fastest one if it fits. If it does not, PyTorch's allocator refuses its workspace, and PyTorch tries all that fit. That
does not hold for a larger budget, so budgets go down, and a larger one begins in another process.

A profiler looks at each trial, and then keeps memory beside PyTorch's allocator that no training has. It comes on top
of later budgets.
"""

from contextlib import ExitStack
from dataclasses import replace
from math import inf
from multiprocessing.connection import Connection
from typing import Self, final

from bench.memory.reused_step import ReusedStep
from ucudnn.memory.torch.comparison.trial import ENDED, PolicyTrial, result_of
from ucudnn.memory.torch.comparison.trial_process import process_of, received
from ucudnn.memory.torch.comparison.trial_result import TrialResult, TrialSettings
from ucudnn.memory.torch.device.stated_budget import outside_bytes


@final
class BudgetSeries:
    """Runs trials of one step in this process.

    Attributes:
        profiler_bytes: what profilers have kept on the device so far.

    Args:
        settings: the first of them, of which the recipe and the device count.

    Raises:
        InvalidValueError: if there is no such model, loss or optimizer.
    """

    def __init__(self, settings: TrialSettings) -> None:
        self._reused = ReusedStep(settings)
        self.profiler_bytes = 0

    def run(self, settings: TrialSettings) -> TrialResult:
        """Run a trial, whose budget is no larger than those of earlier ones."""
        self._reused.begin_anew()
        budget = settings.budget
        given = settings if budget is None else replace(settings, budget=budget + self.profiler_bytes)
        trial = PolicyTrial(given, self._reused.step)
        try:
            result = result_of(settings.policy, trial.run)
        finally:
            trial.close()
        if result.figures is not None:
            self.profiler_bytes += max(0, outside_bytes(self._reused.device) - result.figures.outside)
        return result


@final
class BudgetTrials:
    """Runs trials, those of one step and falling budgets in one process; leaving the context ends its processes."""

    def __init__(self) -> None:
        self._process = ExitStack()
        self._connection: Connection | None = None
        self._last: TrialSettings | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, settings: TrialSettings) -> TrialResult:
        """Run a trial and wait for its outcome; that its process ended by a signal is a reason, too."""
        connection = self._connection_for(settings)
        try:
            connection.send(settings)
            result: TrialResult | Exception = received(connection)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._end()
            return TrialResult(policy=settings.policy, figures=None, reason=ENDED)
        if isinstance(result, Exception):
            self._end()
            raise result
        return result

    def _connection_for(self, settings: TrialSettings) -> Connection:
        last, self._last = self._last, settings
        if last is not None and not _goes_with(last, settings):
            self._end()
        if self._connection is None:
            self._connection = self._process.enter_context(process_of(_serve))
        return self._connection

    def _end(self) -> None:
        self._connection = None
        self._process.close()


def _goes_with(last: TrialSettings, settings: TrialSettings) -> bool:
    """Return whether a trial can run in the process of an earlier one."""
    same = (last.recipe, last.device) == (settings.recipe, settings.device)
    return same and (settings.budget or inf) <= (last.budget or inf)


def _serve(connection: Connection) -> None:
    series: BudgetSeries | None = None
    while True:
        settings: TrialSettings = connection.recv()
        try:
            series = series or BudgetSeries(settings)
            connection.send(series.run(settings))
        except Exception as error:  # noqa: BLE001, because the process that waits shall raise it
            connection.send(error)
