"""Plan: a configuration bound to offsets and prepared calls, ready to launch."""

from collections.abc import Sequence
from dataclasses import dataclass

from ucudnn.backends.base import Buffer, ComputeBackend, PreparedCall, Tensor
from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.errors import BackendError, StepError
from ucudnn.problem import ConvolutionProblem, Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One prepared call and the part of the whole that it computes.

    Attributes:
        call: the call, prepared for its part's problem.
        part: what it computes, how much and with which algorithm.
        start: where the part begins: its first sample.
        accumulates: whether it adds to what earlier steps wrote, so that beta must be 1.
    """

    call: PreparedCall
    part: MicroConfiguration
    start: int
    accumulates: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that launching needs; nothing is decided, built or allocated any more.

    Attributes:
        problem: the problem at mini-batch size.
        configuration: what was chosen.
        steps: the calls in order.
    """

    problem: ConvolutionProblem
    configuration: Configuration
    steps: tuple[Step, ...]

    def launch(self, x: Tensor, w: Tensor, y: Tensor, *, alpha: float, beta: float, workspace: Buffer) -> None:
        """Compute out = alpha * conv + beta * out, micro-batch by micro-batch.

        Forward and BackwardData write disjoint samples, each with the caller's beta. BackwardFilter scales
        what is there once, with its first micro-batch, and accumulates the others (paper, section 2).

        Args:
            x: input, or its gradient.
            w: filters, or their gradient.
            y: output, or its gradient.
            alpha: factor of the convolution.
            beta: factor of what the output holds; at 0 the output is not read.
            workspace: at least `configuration.workspace_bytes`, from the backend.

        Raises:
            StepError: if an algorithm fails; it says from which sample on nothing was launched.
        """
        for step in self.steps:
            try:
                step.call.launch(
                    x,
                    w,
                    y,
                    start=step.start,
                    alpha=alpha,
                    beta=1.0 if step.accumulates else beta,
                    workspace=workspace,
                )
            except BackendError as error:
                raise StepError(step.part.algorithm, step.part.size, step.start, error) from error


def make_plan(
    problem: ConvolutionProblem, configuration: Configuration, backend: ComputeBackend, start: int = 0
) -> Plan:
    """Prepare the calls of a configuration; equal micro-configurations share one.

    Args:
        problem: the problem at mini-batch size.
        configuration: what computes it, or what is left of it from `start` on.
        backend: prepares the calls.
        start: the first sample to compute.

    Raises:
        StepError: if an algorithm cannot compute its part.
    """
    calls: dict[tuple[int, str], PreparedCall] = {}
    steps = []
    first = start
    for part in _aligned(configuration.parts):
        key = (part.size, part.algorithm)
        if key not in calls:
            try:
                calls[key] = backend.prepare(problem.part(part.size), part.algorithm)
            except BackendError as error:
                raise StepError(part.algorithm, part.size, first, error) from error
        accumulates = problem.operation is Operation.BACKWARD_FILTER and start > 0
        steps.append(Step(call=calls[key], part=part, start=start, accumulates=accumulates))
        start += part.size
    return Plan(problem=problem, configuration=configuration, steps=tuple(steps))


def _aligned(parts: Sequence[MicroConfiguration]) -> list[MicroConfiguration]:
    """Order parts so that each starts at a multiple of the largest power of two in its size.

    That is the alignment for which `ConvolutionProblem.part` lets algorithms be measured and prepared.
    """
    return sorted(parts, key=lambda part: -(part.size & -part.size))
