"""Steps: a configuration as calls of cuDNN that C++ makes itself, on the caller's cudnnHandle_t."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, final

from ucudnn.backends.base import Scaling
from ucudnn.backends.cudnn.algorithms.legacy_call import HALF, LegacyDescriptors, legacy_number
from ucudnn.backends.cudnn.algorithms.operation_graph import OperationGraph, is_engine, round_up
from ucudnn.backends.cudnn.algorithms.wrapped_call import PartAddresses
from ucudnn.backends.cudnn.api.descriptor import BackendDescriptor
from ucudnn.backends.cudnn.api.enums import Attribute, Type
from ucudnn.backends.cudnn.api.library import Library
from ucudnn.configuration import Configuration
from ucudnn.errors import BackendError, UnsupportedProblemError
from ucudnn.execution.plan import PlanStep, aligned, steps_of
from ucudnn.problem import ConvolutionProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeStep:
    """One call of cuDNN on a part of the tensors. Addresses are those of cuDNN's descriptors.

    Attributes:
        algorithm: name of the algorithm.
        start: first sample of the part.
        x_offset_bytes: offset of the part in x.
        y_offset_bytes: offset of the part in y.
        accumulates: whether it adds to the output of earlier steps, so that beta is 1.
        workspace_bytes: workspace of the call.
        number: number of a legacy algorithm; None for an engine configuration.
        descriptors: the execution plan of an engine configuration; x, w, convolution and y of a legacy algorithm.
        keeps: an object that must live as long as the descriptors.
    """

    algorithm: str
    start: int
    x_offset_bytes: int
    y_offset_bytes: int
    accumulates: bool
    workspace_bytes: int
    number: int | None
    descriptors: tuple[int, ...]
    keeps: object


@final
class StepRequest(NamedTuple):
    """What the steps of a problem are made for.

    Attributes:
        library: cuDNN, the one that the program uses.
        cudnn: address of the caller's cudnnHandle_t. Plans are built on the handle that executes them, because several
            threads may use handles of one GPU, but not plans of one handle.
        problem: the problem at mini-batch size.
        scaling: alpha and beta, which are part of each execution plan.
        start: the first sample to compute.
    """

    library: Library
    cudnn: int
    problem: ConvolutionProblem
    scaling: Scaling
    start: int


@final
class _Recipe:
    """An algorithm for one part. Execution plans are built when they are first needed, one for each beta."""

    def __init__(self, request: StepRequest, problem: ConvolutionProblem, algorithm: str) -> None:
        self._request = request
        self._problem = problem
        self._algorithm = algorithm
        self._plans: dict[Scaling, BackendDescriptor] = {}
        self._number = None if is_engine(algorithm) else legacy_number(problem, algorithm)
        self._legacy: LegacyDescriptors | None = None
        if self._number is not None:
            self._legacy = LegacyDescriptors(request.library, problem, half=algorithm.endswith(HALF))

    @property
    def number(self) -> int | None:
        """The number of a legacy algorithm; None for an engine configuration."""
        return self._number

    def call(self, scaling: Scaling, measured_bytes: int) -> tuple[tuple[int, ...], int]:
        """Return the addresses of the call's descriptors, and its workspace.

        Args:
            scaling: alpha and beta.
            measured_bytes: workspace of the algorithm when it was measured.

        Raises:
            CudnnError: if cuDNN cannot build the execution plan.
        """
        if self._legacy is not None:
            own = self._legacy
            return (own.x, own.w, own.convolution, own.y), measured_bytes
        if scaling not in self._plans:
            graph = OperationGraph(self._request.library, self._request.cudnn, self._problem, scaling)
            self._plans[scaling] = graph.plan(self._algorithm)
        plan = self._plans[scaling]
        return (plan.address,), round_up(plan.number(Attribute.EXECUTION_PLAN_WORKSPACE_SIZE, Type.INT64))


def native_steps(request: StepRequest, configuration: Configuration, room_bytes: int) -> Sequence[NativeStep]:
    """Return the calls of a configuration in order.

    Args:
        request: what the steps are for.
        configuration: computes the problem, or its samples from `request.start` on.
        room_bytes: the most workspace that a step may need.

    Raises:
        StepError: if an algorithm cannot compute its part, or needs more workspace with this alpha and beta.
    """
    steps = steps_of(request.problem, aligned(configuration.parts), partial(_Recipe, request), request.start)
    addresses = PartAddresses(request.problem)
    return [_native_step(request, step, addresses, room_bytes) for step in steps]


def _native_step(
    request: StepRequest, step: PlanStep[_Recipe], addresses: PartAddresses, room_bytes: int
) -> NativeStep:
    algorithm, (alpha, beta) = step.part.algorithm, request.scaling
    try:
        scaling = Scaling(alpha, 1.0) if step.accumulates else request.scaling
        descriptors, need = step.call.call(scaling, step.part.workspace_bytes)
        if need > room_bytes:
            raise UnsupportedProblemError(
                f"{algorithm} needs {need} bytes of workspace with alpha {alpha} and beta {beta}, not {room_bytes}"
            )
    except BackendError as error:
        raise step.failed(error) from error
    x_offset, y_offset = addresses.at(0, 0, step.offset)
    return NativeStep(
        algorithm=algorithm,
        start=step.offset.start,
        x_offset_bytes=x_offset,
        y_offset_bytes=y_offset,
        accumulates=step.accumulates,
        workspace_bytes=need,
        number=step.call.number,
        descriptors=descriptors,
        keeps=step.call,
    )
