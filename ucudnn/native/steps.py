"""Preparing: a configuration as calls of cuDNN that C++ can make by itself, on the caller's own cudnnHandle_t."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast, final

from ucudnn.backends.base import ComputeBackend
from ucudnn.backends.cudnn.algorithms.addresses import PartAddresses
from ucudnn.backends.cudnn.algorithms.legacy_call import ALGORITHMS, LegacyDescriptors
from ucudnn.backends.cudnn.algorithms.operation_graph import OperationGraph, is_engine, round_up
from ucudnn.backends.cudnn.api.descriptor import Descriptor
from ucudnn.backends.cudnn.api.enums import Attribute, Type
from ucudnn.backends.cudnn.api.library import Library
from ucudnn.configuration import Configuration
from ucudnn.errors import StepError, UcudnnError, UnsupportedProblemError
from ucudnn.execution.plan import make_plan
from ucudnn.problem import ConvolutionProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeStep:
    """One call of cuDNN on a part of the tensors; addresses are those of cuDNN's descriptors.

    Attributes:
        algorithm: its name.
        start: its first sample.
        x_offset_bytes: where its part of x begins.
        y_offset_bytes: where its part of y begins.
        accumulates: whether it adds to what earlier steps wrote, so that beta is 1.
        workspace_bytes: what it needs.
        number: of a legacy algorithm; None for an engine configuration.
        descriptors: of an engine configuration the execution plan; of a legacy algorithm x, w, convolution and y.
        keeps: what must live as long as these.
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
class _Recipe:
    """An algorithm for one part: a plan for each beta, made when it is first asked for."""

    def __init__(self, library: Library, cudnn: int, problem: ConvolutionProblem, algorithm: str) -> None:
        self._library = library
        self._cudnn = cudnn
        self._problem = problem
        self._algorithm = algorithm
        self._plans: dict[float, Descriptor] = {}
        self.legacy = None if is_engine(algorithm) else LegacyDescriptors(library, problem)
        if self.legacy is not None and algorithm not in ALGORITHMS[problem.operation]:
            raise UnsupportedProblemError(f"{algorithm} is no algorithm of {problem.operation.value}")

    def plan(self, alpha: float, beta: float) -> Descriptor:
        """Return the execution plan of an engine configuration."""
        if beta not in self._plans:
            graph = OperationGraph(self._library, self._cudnn, self._problem, alpha=alpha, beta=beta)
            self._plans[beta] = graph.plan(self._algorithm)
        return self._plans[beta]


@final
class _Preparer:
    """What `make_plan` asks of a backend, on a cudnnHandle_t that is not the backend's."""

    def __init__(self, library: Library, cudnn: int) -> None:
        self._library = library
        self._cudnn = cudnn

    def prepare(self, problem: ConvolutionProblem, algorithm: str) -> _Recipe:
        """Return a recipe for an algorithm."""
        return _Recipe(self._library, self._cudnn, problem, algorithm)


def prepare(
    library: Library,
    cudnn: int,
    problem: ConvolutionProblem,
    configuration: Configuration,
    *,
    alpha: float,
    beta: float,
    start: int,
    room_bytes: int,
) -> Sequence[NativeStep]:
    """Return the calls of a configuration in order.

    An execution plan is made on the handle that will execute it: handles of one GPU may be used by several threads,
    but plans may not.

    Args:
        library: cuDNN, the one that the program uses.
        cudnn: address of the caller's cudnnHandle_t.
        problem: the problem at mini-batch size.
        configuration: what computes it from `start` on.
        alpha: factor of the convolution, part of each execution plan.
        beta: factor of what the output holds, likewise.
        start: the first sample to compute.
        room_bytes: workspace that a step may need.

    Raises:
        StepError: if an algorithm cannot compute its part, or needs more with this alpha and beta.
    """
    plan = make_plan(problem, configuration, cast("ComputeBackend", _Preparer(library, cudnn)), start)
    places = PartAddresses(problem)
    found = []
    for step in plan.steps:
        recipe, algorithm = cast("_Recipe", step.call), step.part.algorithm
        need = step.part.workspace_bytes
        number: int | None = None
        descriptors: tuple[int, ...]
        try:
            if recipe.legacy is None:
                executed = recipe.plan(alpha, 1.0 if step.accumulates else beta)
                need = round_up(executed.number(Attribute.EXECUTION_PLAN_WORKSPACE_SIZE, Type.INT64))
                descriptors = (executed.address,)
            else:
                own = recipe.legacy
                number = ALGORITHMS[problem.operation][algorithm]
                descriptors = own.x, own.w, own.convolution, own.y
            if need > room_bytes:
                raise UnsupportedProblemError(
                    f"{algorithm} needs {need} bytes of workspace with alpha {alpha} and beta {beta}, not {room_bytes}"
                )
        except UcudnnError as error:
            raise StepError(algorithm, step.part.size, step.start, error) from error
        x_offset, y_offset = places.of(0, 0, step.start, step.first_rows)
        found.append(
            NativeStep(
                algorithm=algorithm,
                start=step.start,
                x_offset_bytes=x_offset,
                y_offset_bytes=y_offset,
                accumulates=step.accumulates,
                workspace_bytes=need,
                number=number,
                descriptors=descriptors,
                keeps=recipe,
            )
        )
    return found
