"""Plan: a configuration bound to offsets and prepared calls, ready to launch."""

from dataclasses import dataclass

from ucudnn.backends.base import Buffer, ComputeBackend, PreparedCall, Tensor
from ucudnn.configuration import Configuration
from ucudnn.problem import ConvolutionProblem, Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One prepared call and the part of the whole that it computes.

    Attributes:
        call: the call, prepared for its part's problem.
        start: where the part begins: its first sample.
        accumulates: whether it adds to what earlier steps wrote, so that beta must be 1.
    """

    call: PreparedCall
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
        """
        for step in self.steps:
            step.call.launch(
                x,
                w,
                y,
                start=step.start,
                alpha=alpha,
                beta=1.0 if step.accumulates else beta,
                workspace=workspace,
            )


def make_plan(problem: ConvolutionProblem, configuration: Configuration, backend: ComputeBackend) -> Plan:
    """Prepare the calls of a configuration; equal micro-configurations share one.

    Raises:
        UnsupportedProblemError: if an algorithm cannot compute its part.
    """
    calls: dict[tuple[int, str], PreparedCall] = {}
    steps = []
    start = 0
    for part in configuration.parts:
        key = (part.size, part.algorithm)
        if key not in calls:
            calls[key] = backend.prepare(problem.with_batch(part.size), part.algorithm)
        accumulates = problem.operation is Operation.BACKWARD_FILTER and start > 0
        steps.append(Step(call=calls[key], start=start, accumulates=accumulates))
        start += part.size
    return Plan(problem=problem, configuration=configuration, steps=tuple(steps))
