"""What the convolutions of a step can choose from, measured on its device, and the functions that run what was chosen.

A desirable set holds the configurations of a kernel that no other beats in both time and workspace. With micro-batches
of one size only, the mini-batch's, its first one is vDNN's (m) and its last one (p).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, final

import torch
from torch import Tensor

from ucudnn.backends.base import ComputeBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.factory import open_benchmark
from ucudnn.benchmarking.measurer import Progress as Measured
from ucudnn.benchmarking.request import Request, request_of
from ucudnn.configuration import Configuration
from ucudnn.errors import InvalidValueError, SettingsError, UcudnnError
from ucudnn.execution.plan import Plan, make_plan
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.torch.convolutions.planned_convolution import PlannedConvolution
from ucudnn.memory.torch.convolutions.step_kernel import StepKernel, step_kernels
from ucudnn.memory.torch.device.allocator import allocator_cap
from ucudnn.memory.torch.measuring.measure import memory_bytes
from ucudnn.memory.torch.measuring.operation_costs import measure_operator
from ucudnn.memory.torch.measuring.progress import Stages
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.memory.torch.subject.traced_values import TracedTensor
from ucudnn.planning.float32_sums import preferred, rounds_often, summed_configurations, summed_request
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.measurement import Effort
from ucudnn.settings import Settings
from ucudnn.solvers.desirable import desirable_set
from ucudnn.torch.factory import open_device
from ucudnn.units import shortened

_REPEATS = 5
_Front = tuple[Configuration, ...]


@final
class ConvolutionChoices:
    """The convolutions of one step that ucudnn can compute.

    Options are those of `ucudnn.Handle`, or a batch-size policy, such as 'undivided'. They say which micro-batch sizes
    are measured; a workspace limit counts only if it was given.

    Attributes:
        left: why other convolutions are left to PyTorch, by operation.

    Raises:
        SettingsError: if an option is unknown or has an invalid value.
    """

    def __init__(self, program: StepProgram, options: str | Mapping[str, Any]) -> None:
        if not isinstance(options, str | Mapping):
            raise SettingsError(
                f"convolutions={shortened(options)}: give a batch-size policy, or options as a dictionary"
            )
        unused = [each for each in ("plans", "strict") if not isinstance(options, str) and each in options]
        if unused:
            raise SettingsError(f"{' and '.join(unused)} have no effect in convolutions=: the plan of the step decides")
        given: dict[str, Any] = {"policy": options} if isinstance(options, str) else {**options}
        self._effort = effort = given.pop("effort", None)
        if not isinstance(effort, Effort | None):
            raise SettingsError(f"effort={shortened(effort)} is no ucudnn.Effort")
        unknown = [each for each in given if not isinstance(each, str) or each in ("environment", "names")]
        if unknown:
            raise SettingsError(f"unknown settings {unknown}: there are the options of ucudnn.Handle")
        settings = Settings.load(**given)
        self._settings = replace(settings, total_workspace_bytes=settings.workspace_limit_bytes)
        self.kernels, self.left = step_kernels(program)
        self._program = program
        self._copied: dict[int, int] = {}  # bytes of workspaces that are copies of arguments, by operation

    def measured(self, costs: Costs, tensor_bytes: int | None, stages: Stages | None = None) -> Costs:
        """Return the costs of the step with the desirable sets of its convolutions.

        A kernel that cannot be measured has none, and PyTorch computes it. Measuring does not exceed some bytes with
        all that is allocated now, or the device's memory; stages are told which kernels are measured.
        """
        device = self._program.device
        room = memory_bytes(device) if tensor_bytes is None else tensor_bytes
        if device.type == "cuda":
            room -= torch.cuda.memory_allocated(device)
        problems = dict.fromkeys(kernel.problem for kernel in self.kernels.values())
        most = self._settings.workspace_limit_bytes if "workspace_limit_bytes" in self._settings.names else room
        limits = {each: min(most, room - (each.x_bytes + each.w_bytes + each.y_bytes)) for each in problems}
        requests = {each: request_of(each, self._settings, limit) for each, limit in limits.items() if limit >= 0}
        with allocator_cap(device) as allow:
            allow(None if tensor_bytes is None else room)
            fronts = self._fronts(requests, stages or Stages())
        besides = self._besides(costs.granularity)
        found = {
            operation: tuple(_with(each, *besides[operation]) for each in fronts[kernel.problem])
            for operation, kernel in self.kernels.items()
            if fronts.get(kernel.problem)
        }
        self._copied = {operation: copied for operation, (_, copied) in besides.items()}
        return replace(costs, configurations=found)

    def applied(self, configurations: Mapping[int, Configuration]) -> StepProgram:
        """Return the step with functions that compute operations with given configurations.

        Nothing is left to prepare when they run.

        Raises:
            InvalidValueError: if an operation is no convolution that ucudnn computes in this step.
            StepError: if an algorithm cannot compute its part.
        """
        plans: dict[tuple[ConvolutionProblem, Configuration], Plan] = {}
        found: dict[int, PlannedConvolution] = {}
        for operation, configuration in configurations.items():
            kernel = self.kernels.get(operation)
            if kernel is None:
                name = self._program.graph.operation_name(operation)
                why = self.left.get(operation, "it is no convolution")
                raise InvalidValueError(f"{name} has a configuration, and ucudnn cannot run it: {why}")
            key = kernel.problem, _with(configuration, 0.0, -self._copied.get(operation, 0))
            if key not in plans:
                plans[key] = make_plan(*key, self._backend)
            found[operation] = PlannedConvolution(kernel, plans[key], self._backend, self._program.device)
        return replace(self._program, functions=found)

    @cached_property
    def _backend(self) -> ComputeBackend:
        device = self._program.device
        if device.type != "cuda":
            return open_device(self._settings, -1)
        return open_device(self._settings, torch.cuda.current_device() if device.index is None else device.index)

    def _fronts(
        self, requests: Mapping[ConvolutionProblem, Request], stages: Stages
    ) -> dict[ConvolutionProblem, _Front]:
        stages.begin(f"measuring the algorithms of {len(requests)} kernels of convolutions")
        finished = set[ConvolutionProblem]()

        def listen(measured: Measured) -> None:
            if measured.done == measured.total:
                finished.add(measured.problem)
            stages.done(len(finished), len(requests))

        benchmark = open_benchmark(self._backend, self._settings, effort=self._effort, listener=listen)
        with suppress(UcudnnError):  # if one of them cannot be computed, that is found below
            benchmark.explore([*requests.values()])  # faster than one after another
        return {problem: self._front(request, benchmark) for problem, request in requests.items()}

    def _front(self, request: Request, benchmark: Benchmark) -> _Front:
        problem, limit = request.problem, request.limit_bytes
        try:
            front = desirable_set(benchmark.micro_configurations(request), problem.batch)
            with_sum = summed_request(problem, self._settings, limit, self._backend)
            if with_sum is not None and (not front or any(map(rounds_often, front))):
                front = preferred(front, summed_configurations(with_sum, benchmark), None)
        except UcudnnError:
            return ()
        return front

    def _besides(self, granularity: int) -> dict[int, tuple[float, int]]:
        """Return milliseconds and bytes that biases and copies of arguments take beside the kernels, by operation."""
        times: dict[tuple[object, ...], float] = {}
        found = {}
        for operation, kernel in self.kernels.items():
            near = kernel.output if kernel.result is None else self._program.calls[operation].args[0]
            tensors = (near, *kernel.copied) if kernel.bias is not None else kernel.copied
            key = kernel.result, kernel.bias is None, kernel.memory_format, *(each.geometry for each in tensors)
            if key not in times:
                times[key] = sum(
                    measure_operator(run, self._program.device, _REPEATS)[0] for run in self._runs(kernel, near)
                )
            found[operation] = times[key], kernel.copied_bytes(granularity)
        return found

    def _runs(self, kernel: StepKernel, near: TracedTensor) -> Iterator[Callable[[], object]]:
        """Yield what runs beside a kernel, on operands of its own.

        `near` is the tensor to which its bias is added, or of which the gradient of its bias is the sum.
        """

        def zeros(tensor: TracedTensor) -> Tensor:
            return tensor.empty(self._program.device).zero_()

        for each in kernel.copied:
            yield partial(zeros(each).contiguous, memory_format=kernel.memory_format)
        if kernel.bias is not None:
            tensor = zeros(near)
            if kernel.result is None:
                yield partial(tensor.add_, zeros(kernel.bias).view(-1, *[1] * (tensor.dim() - 2)))
            else:
                yield partial(tensor.sum, dim=[0, *range(2, tensor.dim())])


def _with(configuration: Configuration, extra_ms: float, extra_bytes: int) -> Configuration:
    """Return a configuration that takes more time and memory for what runs beside its calls."""
    if not extra_ms and not extra_bytes:
        return configuration
    parts = [replace(each, workspace_bytes=each.workspace_bytes + extra_bytes) for each in configuration.parts]
    parts[0] = replace(parts[0], time_ms=parts[0].time_ms + extra_ms)
    return replace(configuration, parts=tuple(parts))
