"""The owner of plans while a program is tuned within a stated limit: the handle, which makes the first plans."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median
from typing import NamedTuple, Protocol, final

from ucudnn.configuration import Configuration
from ucudnn.errors import UcudnnError
from ucudnn.handle import Handle
from ucudnn.planning.choices import Origin
from ucudnn.problem import ConvolutionProblem
from ucudnn.torch.added_bias import without_addition
from ucudnn.torch.limits.stated_room import StatedRoom

_LOG = logging.getLogger("ucudnn.torch")


class TimedConfiguration(Protocol):
    """A configuration, and its times in the program."""

    configuration: Configuration
    samples_ms: list[float]


class DecidedSite(Protocol):
    """A problem, and the configuration that replaces its first plan."""

    @property
    def problem(self) -> ConvolutionProblem:
        """The problem."""

    @property
    def adopted(self) -> TimedConfiguration | None:
        """What replaces its first plan; None if that stays."""


@final
class PlanOwner:
    """Tells a tuner which plans are final, and takes what the tuner has chosen.

    Args:
        handle: returns the handle.
    """

    def __init__(self, handle: Callable[[], Handle]) -> None:
        self._handle = handle
        self._known_plans = 0

    def has_new_plans(self) -> bool:
        """Return whether the handle has planned kernels since this was last asked."""
        handle, before = self._handle(), self._known_plans
        with handle.backend.lock:
            self._known_plans = len(handle.plans.entries)
        return self._known_plans != before

    def planned_seconds(self) -> float:
        """Return how long the handle has planned so far, while calls of the program waited."""
        return self._handle().plans.seconds

    def is_final(self, problem: ConvolutionProblem) -> bool:
        """Return whether nothing is tried for a problem: its plan was loaded or measured, or PyTorch computes it.

        A first plan has no bias, which PyTorch adds.
        """
        handle, plain = self._handle(), problem.without_bias()
        with handle.backend.lock:
            planned = problem.biased and handle.plans.origins(problem)
            return bool(planned) or handle.plans.origins(plain) != {Origin.RULE}

    def adopt(self, sites: Iterable[DecidedSite]) -> None:
        """Let the handle compute problems by configurations that were faster in the program.

        Where another kernel adds the bias, the configuration is that of the convolution without it. Calls that have no
        bias decide about that last.
        """
        for site in sorted(sites, key=lambda each: not each.problem.biased):
            adopted = site.adopted
            if adopted is None:
                continue
            problem, configuration = without_addition(site.problem, adopted.configuration)
            handle, configuration = self._handle(), _timed(configuration, median(adopted.samples_ms))
            try:
                with handle.backend.lock:
                    handle.plans.adopt(problem, configuration)
            except UcudnnError as error:  # the first plan stays
                _LOG.warning("%s: %s", site.problem, error)


class Stated(NamedTuple):
    """What a tuner needs to know of stated limits.

    Attributes:
        room: says how much workspace a call may have.
        owner: computes calls while nothing is tried, and adopts the configuration that is chosen in the end.
    """

    room: StatedRoom
    owner: PlanOwner


def _timed(configuration: Configuration, time_ms: float) -> Configuration:
    """Return a configuration whose parts share a time that was taken of all of them together."""
    each_ms = time_ms / len(configuration.parts)
    return replace(configuration, parts=tuple(replace(part, time_ms=each_ms) for part in configuration.parts))
