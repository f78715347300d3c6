"""Plan: a configuration bound to offsets and prepared calls, ready to launch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ucudnn.backends.base import Buffer, ComputeBackend, PreparedCall, Tensor
from ucudnn.configuration import Configuration, MicroConfiguration, SlabConfiguration
from ucudnn.errors import BackendError, StepError
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.slabs import Rows, piece_of
from ucudnn.workspace.spare import own_bytes, parts_in_tail, tail_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One prepared call and the part of the whole that it computes.

    Attributes:
        call: the call, prepared for its part's problem.
        part: the micro-batch, and what computes it.
        start: where the micro-batch begins: its first sample.
        accumulates: whether it adds to what earlier steps wrote, so that beta must be 1.
        slab: index of the slab of the micro-batch that it computes; None for all of it.
        first_rows: where that slab begins.
        tail: returns the memory of later samples of the output, which is its workspace; None where it has another.
    """

    call: PreparedCall
    part: MicroConfiguration
    start: int
    accumulates: bool
    slab: int | None = None
    first_rows: Rows | None = None
    tail: Callable[[Tensor], Buffer] | None = None

    def own(self, out: Tensor, workspace: Buffer) -> Buffer:
        """Return the workspace of this step of a plan that has `workspace` and writes `out`."""
        return workspace if self.tail is None else self.tail(out)

    def failed(self, error: BackendError) -> StepError:
        """Return the error of its call as one of this step."""
        left = () if self.slab is None else self.part.slabs[self.slab :]
        return StepError(
            left[0].algorithm if left else self.part.algorithm, self.part.size, self.start, error, _begun(left)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that launching needs; nothing is decided, built or allocated any more.

    Attributes:
        problem: the problem at mini-batch size.
        configuration: what was chosen.
        steps: the calls in order.
        workspace_bytes: what those need that find none in the output's tail.
    """

    problem: ConvolutionProblem
    configuration: Configuration
    steps: tuple[Step, ...]
    workspace_bytes: int

    def launch(self, x: Tensor, w: Tensor, y: Tensor, *, alpha: float, beta: float, workspace: Buffer) -> None:
        """Compute out = alpha * conv + beta * out, micro-batch by micro-batch, slab by slab.

        Forward and BackwardData write disjoint samples or rows, each with the caller's beta. BackwardFilter scales
        what is there once, with its first part, and accumulates the others (paper, section 2).

        Args:
            x: input, or its gradient.
            w: filters, or their gradient.
            y: output, or its gradient.
            alpha: factor of the convolution.
            beta: factor of what the output holds; at 0 the output is not read.
            workspace: at least `workspace_bytes`, from the backend.

        Raises:
            StepError: if an algorithm fails; it says from which sample on nothing was launched.
        """
        out = x if self.problem.operation is Operation.BACKWARD_DATA else y
        for step in self.steps:
            own = step.own(out, workspace)
            try:
                step.call.launch(
                    x,
                    w,
                    y,
                    start=step.start,
                    alpha=alpha,
                    beta=1.0 if step.accumulates else beta,
                    workspace=own,
                    first_rows=step.first_rows,
                )
            except BackendError as error:
                raise step.failed(error) from error

    def bind(self, x: Tensor, w: Tensor, y: Tensor, *, workspace: Buffer) -> tuple[Callable[[], None], ...]:
        """Return the calls that `launch` makes with alpha = 1 and beta = 0, made ready; they raise BackendError.

        Args:
            x: input, or its gradient.
            w: filters, or their gradient.
            y: output, or its gradient.
            workspace: at least `workspace_bytes`, from the backend.

        Raises:
            BackendError: if a call cannot be made ready.
        """
        out = x if self.problem.operation is Operation.BACKWARD_DATA else y
        return tuple(
            step.call.bind(
                x,
                w,
                y,
                start=step.start,
                alpha=1.0,
                beta=1.0 if step.accumulates else 0.0,
                workspace=step.own(out, workspace),
                first_rows=step.first_rows,
            )
            for step in self.steps
        )


def make_plan(
    problem: ConvolutionProblem,
    configuration: Configuration,
    backend: ComputeBackend,
    start: int = 0,
    *,
    fresh: bool = False,
) -> Plan:
    """Prepare the calls of a configuration; parts that are the same problem share one.

    Args:
        problem: the problem at mini-batch size.
        configuration: what computes it, or what is left of it from `start` on.
        backend: prepares the calls.
        start: the first sample to compute.
        fresh: whether the output holds nothing that is wanted; then its tail is workspace for parts that find room
            there, which run in the order of the configuration.

    Raises:
        StepError: if an algorithm cannot compute its part.
    """
    calls: dict[tuple[ConvolutionProblem, str], PreparedCall] = {}
    steps = []
    parts = list(configuration.parts) if fresh else _aligned(configuration.parts)
    found = parts_in_tail(problem, configuration, fresh=fresh)
    begin = start
    gradient = problem.operation is Operation.BACKWARD_FILTER

    def prepared(piece: ConvolutionProblem, algorithm: str) -> PreparedCall:
        call = calls.get((piece, algorithm))
        if call is None:
            try:
                call = calls[piece, algorithm] = backend.prepare(piece, algorithm)
            except BackendError as error:  # nothing was launched yet, wherever it is
                raise StepError(algorithm, parts[0].size, begin, error, _begun(parts[0].slabs)) from error
        return call

    for part, in_tail in zip(parts, found, strict=True):
        whole = problem.part(part.size)
        if not part.slabs:
            call = prepared(whole, part.algorithm)
            tail = None
            if in_tail:
                after = start + part.size
                tail = partial(backend.behind, start=after, step_bytes=tail_step(problem), samples=problem.batch)
            accumulates = gradient and start > 0
            steps.append(Step(call=call, part=part, start=start, accumulates=accumulates, tail=tail))
        for index, each in enumerate(part.slabs):
            piece = piece_of(whole, each.slab)
            steps.append(
                Step(
                    call=prepared(piece.problem, each.algorithm),
                    part=part,
                    start=start,
                    accumulates=gradient and (start > 0 or each.slab.first > 0),
                    slab=index,
                    first_rows=piece.first_rows,
                )
            )
        start += part.size
    own = own_bytes(problem, configuration, fresh=fresh)
    return Plan(problem=problem, configuration=configuration, steps=tuple(steps), workspace_bytes=own)


def _begun(left: tuple[SlabConfiguration, ...]) -> tuple[SlabConfiguration, ...]:
    """Return what is left of a micro-batch, or () where that is all of it: then it need not be computed in slabs."""
    return left if left and left[0].slab.first else ()


def _aligned(parts: Sequence[MicroConfiguration]) -> list[MicroConfiguration]:
    """Order parts so that each starts at a multiple of the largest power of two in its size.

    That is the alignment for which `ConvolutionProblem.part` lets algorithms be measured and prepared.
    """
    return sorted(parts, key=lambda part: -(part.size & -part.size))
