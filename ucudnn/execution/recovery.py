"""Recovery: when another configuration takes the place of one whose algorithm failed; `Replanner` chooses it.

An algorithm may fail when it is prepared or launched although it was measured before. With an alpha and a beta with
which it was measured, it is discarded for good. With others it may be of use to other calls, so it is excluded only for
calls with the same alpha and beta.
"""

from dataclasses import dataclass
from typing import final

from ucudnn.backends.base import Scaling
from ucudnn.configuration import Configuration
from ucudnn.errors import BackendError, CudnnError, StepError, UnsupportedProblemError
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.units import format_ms

MOST_FAILURES = 8
"""Failures of one call after which it is given up, because so many are not the fault of algorithms."""

_NOT_SUPPORTED = range(3000, 4000)
"""Values of cudnnStatus_t that say what cuDNN does not support: CUDNN_STATUS_NOT_SUPPORTED and its kinds."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """What happened to the configuration of a kernel after it was decided.

    Attributes:
        before: the configuration that could not be used; `after` is used instead.
        calls: which calls it concerns; '' for all of them.
        timed: whether the times of both were measured.
    """

    before: Configuration
    after: Configuration
    reason: str
    calls: str = ""
    timed: bool = True

    def __str__(self) -> str:
        """Return which configuration was replaced, by which, why, and how many milliseconds that costs."""
        cost = self.after.time_ms - self.before.time_ms
        compared = f", predicted to be {format_ms(abs(cost))} {'slower' if cost >= 0 else 'faster'},"
        concerned = f" in calls with {self.calls}" if self.calls else ""
        compared = compared if self.timed else ""
        return f"{self.before} was replaced by {self.after}{concerned}{compared} because {self.reason}"


def is_measured(problem: ConvolutionProblem, scaling: Scaling) -> bool:
    """Return whether algorithms for a problem are measured with an alpha and a beta."""
    alpha, beta = scaling
    return alpha == 1 and (beta == 0 or (beta == 1 and problem.operation is Operation.BACKWARD_FILTER))


def is_lasting(error: StepError) -> bool:
    """Return whether an algorithm fails whenever it is called like this, because it does not compute the problem."""
    cause = error.__cause__
    if isinstance(cause, CudnnError):
        return cause.status in _NOT_SUPPORTED
    return isinstance(cause, UnsupportedProblemError)


def given_up(subject: object) -> BackendError:
    """Return the error of a kernel or problem for which MOST_FAILURES configurations failed."""
    return BackendError(f"{subject}: {MOST_FAILURES} configurations failed one after another")
