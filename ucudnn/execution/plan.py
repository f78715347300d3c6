"""Plan: the prepared calls of a configuration with their offsets, ready to launch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Generic, TypeVar, final

from ucudnn.backends.base import (
    ACCUMULATE,
    BEGIN,
    OVERWRITE,
    Buffer,
    ComputeBackend,
    Offset,
    PreparedCall,
    PreparedSum,
    Scaling,
    Tensor,
)
from ucudnn.configuration import Configuration, MicroConfiguration, SlabConfiguration
from ucudnn.errors import BackendError, StepError
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.slabs import pieces_of
from ucudnn.workspace.spare import own_bytes, parts_in_tail, tail_step

CallT = TypeVar("CallT")
"""Type of a step's call: a backend's prepared call, or whatever else computes a part."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStep(Generic[CallT]):
    """One prepared call, and the part of the mini-batch that it computes.

    Attributes:
        call: the call, prepared for the problem of its part, which is a micro-batch.
        offset: where the micro-batch, or its slab, begins.
        accumulates: whether it adds to the output of earlier steps, so that beta must be 1.
        slab: index of the slab of the micro-batch that it computes; None if it computes all rows.
        tail: returns the memory of later samples of the output, which is the step's workspace; None if the step uses
            the workspace of the plan.
    """

    call: CallT
    part: MicroConfiguration
    offset: Offset
    accumulates: bool
    slab: int | None = None
    tail: Callable[[Tensor], Buffer] | None = None

    def failed(self, error: BackendError) -> StepError:
        """Return the error of the step whose call failed with an error."""
        left = () if self.slab is None else self.part.slabs[self.slab :]
        algorithm = left[0].algorithm if left else self.part.algorithm
        return StepError(algorithm, self.part.size, self.offset.start, error, _begun(left))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that a launch needs; nothing is left to decide or allocate, or to prepare but for a new alpha or beta.

    Attributes:
        workspace_bytes: the workspace that must be given, for steps that do not use the output's tail.
        total: the float32 sum that the steps of a filter gradient of 16 bits write, and that is rounded once; None if
            the steps write the output.
    """

    problem: ConvolutionProblem
    configuration: Configuration
    steps: tuple[PlanStep[PreparedCall], ...]
    workspace_bytes: int
    total: PreparedSum | None = None

    def parts_from(self, start: int) -> tuple[MicroConfiguration, ...]:
        """Return the micro-batches that begin at a sample or later, in the order of their execution."""
        parts = {step.offset.start: step.part for step in self.steps}
        return tuple(part for first, part in parts.items() if first >= start)

    def launch(self, x: Tensor, w: Tensor, y: Tensor, workspace: Buffer, scaling: Scaling = OVERWRITE) -> None:
        """Compute out = alpha * conv + beta * out, micro-batch by micro-batch and slab by slab.

        Forward and BackwardData write disjoint samples or rows, each with the caller's beta. BackwardFilter applies the
        caller's beta in its first part and accumulates the others (paper, section 2). All parts are added to a float32
        sum, if there is one; then the caller's alpha and beta apply when the sum is rounded.

        Raises:
            StepError: if an algorithm fails; it says from which sample on nothing was launched.
        """
        if self.total is not None:
            self._launch_with_sum(self.total, (x, w, y), workspace, scaling)
            return
        out = x if self.problem.operation is Operation.BACKWARD_DATA else y
        added = _added(scaling)
        for step in self.steps:
            own = workspace if step.tail is None else step.tail(out)
            try:
                step.call.launch(x, w, y, own, step.offset, added if step.accumulates else scaling)
            except BackendError as error:
                raise step.failed(error) from error

    def _launch_with_sum(
        self, prepared: PreparedSum, tensors: tuple[Tensor, Tensor, Tensor], workspace: Buffer, scaling: Scaling
    ) -> None:
        x, w, y = tensors
        total, rest = prepared.split(workspace)
        finish = prepared.bind(total, w, scaling)
        for step in self.steps:
            try:
                step.call.launch(x, total, y, rest, step.offset, ACCUMULATE if step.accumulates else OVERWRITE)
            except BackendError as error:
                raise self._failed_with_sum(step, error) from error
        try:
            finish()
        except BackendError as error:
            raise self._failed_with_sum(self.steps[-1], error) from error

    def _failed_with_sum(self, step: PlanStep[PreparedCall], error: BackendError) -> StepError:
        """Return the error of a step that failed before anything was written to the output, so that all is left."""
        failed = step.failed(error)
        return StepError(failed.algorithm, failed.size, self.steps[0].offset.start, error)

    def kernels(self, scaling: Scaling) -> tuple[object, ...]:
        """Return what must live as long as a CUDA graph that captured a launch with an alpha and a beta."""
        if self.total is not None:
            scaling = OVERWRITE
        added = _added(scaling)
        steps = (step.call.kernels(added if step.accumulates else scaling) for step in self.steps)
        return *steps, self.total

    def bind(self, x: Tensor, w: Tensor, y: Tensor, workspace: Buffer) -> tuple[Callable[[], None], ...]:
        """Return the calls of a launch with alpha = 1 and beta = 0, bound to their arguments."""
        out = x if self.problem.operation is Operation.BACKWARD_DATA else y
        after: tuple[Callable[[], None], ...] = ()
        if self.total is not None:
            total, workspace = self.total.split(workspace)
            after = (self.total.bind(total, w),)
            w = total
        calls = tuple(
            step.call.bind(
                x,
                w,
                y,
                workspace if step.tail is None else step.tail(out),
                step.offset,
                ACCUMULATE if step.accumulates else OVERWRITE,
            )
            for step in self.steps
        )
        return *calls, *after


def make_plan(
    problem: ConvolutionProblem,
    configuration: Configuration,
    backend: ComputeBackend,
    start: int = 0,
    *,
    fresh: bool = False,
) -> Plan:
    """Prepare the calls of a configuration.

    The configuration computes the problem from sample `start` on. If the output is `fresh`, it holds no values that are
    needed. Then its tail is the workspace of parts that fit there, and the parts run in the order of the configuration.
    """
    parts = configuration.parts if fresh else aligned(configuration.parts)
    asked, total = _asked(problem, configuration), None
    if configuration.float32_sum is not None:
        total = backend.prepare_sum(problem)
        if start:
            raise BackendError(f"a float32 sum of {problem} begins at sample {start}, not at the first")
    adds = start > 0 or configuration.adds
    steps = steps_of(asked, parts, partial(backend.prepare, adds=adds), start)
    if fresh:
        starts = accumulate((part.size for part in parts), initial=start)
        in_tail = {first for first, found in zip(starts, parts_in_tail(problem, configuration), strict=False) if found}
        steps = [_with_tail(each, problem, backend) if each.offset.start in in_tail else each for each in steps]
    own = own_bytes(problem, configuration, fresh=fresh)
    return Plan(problem=problem, configuration=configuration, steps=tuple(steps), workspace_bytes=own, total=total)


def prepared(problem: ConvolutionProblem, configuration: Configuration, backend: ComputeBackend) -> list[object]:
    """Return the calls of a configuration; while they live, another backend of the GPU compiles none of them."""
    prepare = partial(backend.prepare, adds=configuration.adds)
    return [each.call for each in steps_of(_asked(problem, configuration), configuration.parts, prepare)]


def _asked(problem: ConvolutionProblem, configuration: Configuration) -> ConvolutionProblem:
    """Return the problem of which the parts are computed; parts of a float32 sum are asked for as such."""
    return problem if configuration.float32_sum is None else replace(problem, float32_sum=True)


def steps_of(
    problem: ConvolutionProblem,
    parts: Sequence[MicroConfiguration],
    prepare: Callable[[ConvolutionProblem, str], CallT],
    start: int = 0,
) -> list[PlanStep[CallT]]:
    """Return the steps that compute parts of a problem one after another; equal parts share a call.

    Raises:
        StepError: if an algorithm cannot compute its part.
    """
    calls: dict[tuple[ConvolutionProblem, str], CallT] = {}
    first = start

    def prepared(piece: ConvolutionProblem, algorithm: str) -> CallT:
        if (piece, algorithm) not in calls:
            try:
                calls[piece, algorithm] = prepare(piece, algorithm)
            except BackendError as error:  # whichever part it is for, no part was launched yet
                raise StepError(algorithm, parts[0].size, first, error, _begun(parts[0].slabs)) from error
        return calls[piece, algorithm]

    steps = []
    adds = problem.operation is Operation.BACKWARD_FILTER
    for part in parts:
        slabs = [each.slab for each in part.slabs]
        for index, piece in enumerate(pieces_of(problem, part.size, slabs)):
            algorithm = part.slabs[index].algorithm if slabs else part.algorithm
            steps.append(
                PlanStep(
                    call=prepared(piece.problem, algorithm),
                    part=part,
                    offset=Offset(start, piece.first_rows) if slabs or start else BEGIN,
                    accumulates=adds and (start > 0 or (piece.first_rows is not None and piece.first_rows[1] > 0)),
                    slab=index if slabs else None,
                )
            )
        start += part.size
    return steps


def aligned(parts: Sequence[MicroConfiguration]) -> list[MicroConfiguration]:
    """Order parts so that each starts at a multiple of the largest power of two in its size.

    `ConvolutionProblem.part` assumes this alignment when algorithms are measured and prepared.
    """
    return sorted(parts, key=lambda part: -(part.size & -part.size))


def _added(scaling: Scaling) -> Scaling:
    return ACCUMULATE if scaling.alpha == 1 else Scaling(scaling.alpha, 1.0)


def _with_tail(
    step: PlanStep[PreparedCall], problem: ConvolutionProblem, backend: ComputeBackend
) -> PlanStep[PreparedCall]:
    after = step.offset.start + step.part.size
    return replace(
        step, tail=partial(backend.tail_buffer, start=after, step_bytes=tail_step(problem), samples=problem.batch)
    )


def _begun(left: tuple[SlabConfiguration, ...]) -> tuple[SlabConfiguration, ...]:
    """Return the slabs that are left of a micro-batch; () if none was computed, so that slabs are not needed."""
    return left if left and left[0].slab.first else ()
