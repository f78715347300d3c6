"""Steps: a configuration as calls of cuDNN that C++ makes itself, on the caller's cudnnHandle_t."""

import ctypes
from ctypes import c_char_p, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from functools import partial
from typing import final

from ucudnn.backends.base import Scaling
from ucudnn.backends.cudnn.algorithms.legacy_call import HALF, LegacyDescriptors, legacy_number
from ucudnn.backends.cudnn.algorithms.operation_graph import OperationGraph, is_engine, round_up
from ucudnn.backends.cudnn.algorithms.wrapped_call import PartAddresses
from ucudnn.backends.cudnn.api.descriptor import BackendDescriptor
from ucudnn.backends.cudnn.api.enums import Attribute, Type
from ucudnn.backends.cudnn.api.library import Library
from ucudnn.configuration import Configuration
from ucudnn.errors import BackendError, UnsupportedProblemError
from ucudnn.execution.plan import aligned, steps_of
from ucudnn.problem import ConvolutionProblem


class StepStruct(ctypes.Structure):
    """One call of cuDNN on a part of the tensors (src/planner.hpp)."""

    _fields_ = (
        *((name, c_int32) for name in ("kind", "algorithm", "accumulates", "unused")),
        ("start", c_int64),
        *((name, c_uint64) for name in ("x_offset", "y_offset", "workspace_bytes")),
        *((name, c_void_p) for name in ("plan", "x_descriptor", "w_descriptor", "convolution", "y_descriptor")),
        ("name", c_char_p),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A request for a plan.

    Attributes:
        handle: number of the handle.
        cudnn: address of the handle's cudnnHandle_t. Plans are built on the handle that executes them, because several
            threads may use handles of one GPU, but not plans of one handle.
        problem: the problem at mini-batch size, with the alignment of its tensors.
        scaling: alpha and beta, which are part of each execution plan.
        start: first sample to compute; those before it are computed already.
        failed: an algorithm that cuDNN failed to run, or ''.
        most_bytes: the most workspace that fits into memory.
    """

    handle: int
    cudnn: int
    problem: ConvolutionProblem
    scaling: Scaling
    start: int
    failed: str
    most_bytes: int


@final
class Recipe:
    """An algorithm for one part, to keep as long as its calls. Each beta has an execution plan, built when needed."""

    def __init__(self, library: Library, cudnn: int, problem: ConvolutionProblem, algorithm: str) -> None:
        self._library = library
        self._cudnn = cudnn
        self._problem = problem
        self._algorithm = algorithm
        self._plans: dict[Scaling, BackendDescriptor] = {}
        self._number = 0
        self._legacy: LegacyDescriptors | None = None
        if not is_engine(algorithm):
            self._number = legacy_number(problem, algorithm)
            self._legacy = LegacyDescriptors(library, problem, half=algorithm.endswith(HALF))

    def call(self, scaling: Scaling, measured_bytes: int) -> StepStruct:
        """Return the call with its algorithm, descriptors and workspace, given that of the measurement.

        Raises:
            CudnnError: if cuDNN cannot build the execution plan.
        """
        made = StepStruct(name=self._algorithm.encode(), workspace_bytes=measured_bytes)
        if self._legacy is not None:
            made.kind, made.algorithm = 1, self._number
            own = self._legacy
            made.x_descriptor, made.w_descriptor, made.y_descriptor = own.x, own.w, own.y
            made.convolution = own.convolution
            return made
        if scaling not in self._plans:
            graph = OperationGraph(self._library, self._cudnn, self._problem, scaling)
            self._plans[scaling] = graph.plan(self._algorithm)
        plan = self._plans[scaling]
        made.plan = plan.address
        made.workspace_bytes = round_up(plan.number(Attribute.EXECUTION_PLAN_WORKSPACE_SIZE, Type.INT64))
        return made


def native_steps(
    library: Library, request: PlanRequest, configuration: Configuration, limit_bytes: int
) -> tuple[list[StepStruct], list[Recipe]]:
    """Return the calls of a configuration in order, and what must live as long as they do.

    The configuration computes the samples from `request.start` on, within a workspace of `limit_bytes`.

    Raises:
        StepError: if an algorithm cannot compute its part, or needs more workspace with this alpha and beta.
    """
    recipe = partial(Recipe, library, request.cudnn)
    steps = steps_of(request.problem, aligned(configuration.parts), recipe, request.start)
    addresses, (alpha, beta) = PartAddresses(request.problem), request.scaling
    found = []
    for step in steps:
        try:
            scaling = Scaling(alpha, 1.0) if step.accumulates else request.scaling
            made = step.call.call(scaling, step.part.workspace_bytes)
            if made.workspace_bytes > limit_bytes:
                raise UnsupportedProblemError(
                    f"{step.part.algorithm} needs {made.workspace_bytes} bytes of workspace with alpha {alpha} and beta"
                    f" {beta}, not {limit_bytes}"
                )
        except BackendError as error:
            raise step.failed(error) from error
        made.start, made.accumulates = step.offset.start, step.accumulates
        made.x_offset, made.y_offset = addresses.at(0, 0, step.offset)
        found.append(made)
    return found, [step.call for step in steps]
