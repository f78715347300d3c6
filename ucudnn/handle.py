"""The handle: stands in for a cuDNN handle, plans each convolution once and dispatches it from then on."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Unpack

from ucudnn.arrays import ArrayLike, BiasedFilters, Parameters, ProblemCache, with_bias
from ucudnn.backends import open_backend
from ucudnn.backends.base import OVERWRITE, Backend, ComputeBackend, Scaling, Spare, Tensor
from ucudnn.benchmarking.factory import open_benchmark
from ucudnn.benchmarking.measurer import ProgressListener
from ucudnn.errors import BackendError, InvalidProblemError
from ucudnn.execution.dispatcher import Dispatcher
from ucudnn.execution.kernel_plans import KernelPlans
from ucudnn.execution.layer_identity import checked_name
from ucudnn.kernel import KernelKey, VirtualAlgorithm
from ucudnn.planning.concurrency import groups_under
from ucudnn.planning.plan_file import SavedPlan, encode_all, load_plans
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.profiles.measurement import Effort
from ucudnn.reporting.output_file import report_at_exit, write_whole
from ucudnn.reporting.report import Report
from ucudnn.reporting.run_report import report_plans
from ucudnn.settings import Settings, SolverName
from ucudnn.workspace.spare import tail_step


class Handle:
    """Convolutions in micro-batches: the same call and the same results, within a workspace limit.

    A problem is planned at its first call, or earlier if `get_algorithm` registered it. An argument that is None comes
    from the environment, or else from the defaults. Threads wait for each other because they share the workspace.

    Args:
        backend: 'auto', 'cpu', 'cudnn[:CANDIDATES]', 'replay:NAME-or-path', or a backend (UCUDNN_BACKEND).
        policy: 'undivided', 'powerOfTwo', 'all' or 'adaptive' (UCUDNN_BATCH_SIZE_POLICY).
        workspace_limit: workspace of each kernel (WR), in bytes or as '64MiB' (UCUDNN_DEFAULT_WORKSPACE_LIMIT).
        total_workspace: workspace of all kernels together (WD), in bytes or as '120MiB' (UCUDNN_TOTAL_WORKSPACE_SIZE).
        solver: solver of WD's integer program (UCUDNN_SOLVER).
        solver_time_limit: seconds after which WD takes the best solution so far (UCUDNN_SOLVER_TIME_LIMIT).
        groups: under WD, the layers that may run at the same time; None for all. A group has branches, a branch is a
            layer's name or a sequence of names that run one after another: `[["1x1", ["3x3_reduce", "3x3"]]]`.
        database: file that keeps measurements for later processes, or 'off' (UCUDNN_DATABASE).
        benchmark_devices: GPUs that measure together, '0,1' or 'all', or 'ranks' (UCUDNN_BENCHMARK_DEVICES).
        slabs: whether samples that need too much workspace are computed in ranges of rows (UCUDNN_SLABS).
        remeasure: whether each problem is measured again, whatever the database has of it (UCUDNN_REMEASURE).
        plans: a file of plans to load, as `save_plans` writes it (UCUDNN_PLANS).
        effort: how much time one measurement may take.
        listener: receives the progress of the benchmarks.

    Attributes:
        settings: its settings.
        backend: what computes the convolutions, or replays recorded measurements.
        plans: the plans of its kernels; who uses them holds the backend's lock.

    Raises:
        SettingsError: if an argument or an environment variable has an invalid value.
        BackendUnavailableError: if the backend is not known or not installed.
        ProfileError: if the profile to replay cannot be read.
        DatabaseError: if the database cannot be opened, or was written by a newer ucudnn.
        PlanFileError: if the file of plans cannot be read, or was made for another device or other versions.
    """

    def __init__(
        self,
        *,
        backend: str | Backend | None = None,
        policy: str | BatchSizePolicy | None = None,
        workspace_limit: int | str | None = None,
        total_workspace: int | str | None = None,
        solver: str | SolverName | None = None,
        solver_time_limit: float | None = None,
        groups: Sequence[Sequence[str | Sequence[str]]] | None = None,
        database: str | PathLike[str] | None = None,
        benchmark_devices: str | int | Iterable[int] | None = None,
        slabs: bool | str | None = None,
        remeasure: bool | str | None = None,
        plans: str | PathLike[str] | None = None,
        effort: Effort | None = None,
        listener: ProgressListener | None = None,
    ) -> None:
        settings = Settings.load(
            backend=None if isinstance(backend, Backend) else backend,
            policy=policy,
            workspace_limit=workspace_limit,
            total_workspace=total_workspace,
            solver=solver,
            solver_time_limit=solver_time_limit,
            database=database,
            benchmark_devices=benchmark_devices,
            slabs=slabs,
            remeasure=remeasure,
            plans=plans,
        )
        self._open(settings, backend if isinstance(backend, Backend) else None, groups, effort, listener)
        report_at_exit(lambda: [report_plans(self.plans, self.backend, self.settings.policy.value, 0)])

    @classmethod
    def from_settings(
        cls,
        settings: Settings,
        *,
        backend: Backend | None = None,
        groups: Sequence[Sequence[str | Sequence[str]]] | None = None,
        effort: Effort | None = None,
        listener: ProgressListener | None = None,
        measures: bool = True,
    ) -> "Handle":
        """Return a handle with the given settings, whatever the environment says; it raises what `Handle` raises.

        Args:
            settings: the settings; every field counts.
            backend: a backend in place of the one that the settings name.
            groups: as for `Handle`, and so are effort and listener.
            effort: how much time one measurement may take.
            listener: receives the progress of the benchmarks.
            measures: whether first calls measure; else a kernel that is not measured gets a plan at once, by the order
                of heuristics and by workspaces.
        """
        handle = cls.__new__(cls)
        handle._open(settings, backend, groups, effort, listener, measures=measures)
        return handle

    def _open(
        self,
        settings: Settings,
        backend: Backend | None,
        groups: Sequence[Sequence[str | Sequence[str]]] | None,
        effort: Effort | None,
        listener: ProgressListener | None,
        *,
        measures: bool = True,
    ) -> None:
        self.settings = settings
        opened = open_backend(settings.backend, cudnn_library=settings.cudnn_library) if backend is None else backend
        self.backend: Backend = opened
        self._effort, self._listener = effort, listener
        self._benchmark = open_benchmark(opened, settings, effort=effort, listener=listener, measures=measures)
        self._lock, self._problems = self.backend.lock, ProblemCache()
        self._divides = settings.total_workspace_bytes is not None
        computes = opened if isinstance(opened, ComputeBackend) else None
        self._dispatcher = None if computes is None else Dispatcher(computes, self._benchmark, settings)
        self.plans = KernelPlans(self._benchmark, settings, groups_under(settings, groups), self._dispatcher)
        self._entries = self.plans.entries
        if settings.plans is not None:
            self.plans.load(load_plans(settings.plans, opened))

    def with_settings(self, settings: Settings) -> "Handle":
        """Return another handle with other settings, on the same backend, which measures as this one does."""
        return Handle.from_settings(settings, backend=self.backend, effort=self._effort, listener=self._listener)

    def get_algorithm(
        self, problem: ConvolutionProblem, *, layer: str = "", filters: Hashable = None
    ) -> VirtualAlgorithm:
        """Register a kernel before its first run, and return an algorithm that needs no workspace from the caller.

        WD must know all kernels before it divides the workspace (paper, section 3.5). Registering a kernel again
        changes nothing.

        Args:
            problem: the problem that will be computed.
            layer: name of the layer; kernels with the same problem and name share a plan and a segment.
            filters: under WD, any value that tells layers without a name apart, such as the address of the filters or
                of their gradient. A later call with filters that were not registered is taken for a call of the next
                registered layer with filters of that shape, or else for a call of a new layer.
        """
        with self._lock:
            layer = checked_name(layer)
            if self._divides and not layer:
                layer = self.plans.layers.register(problem, filters)
            self.plans.register(KernelKey(layer, problem))
        return VirtualAlgorithm()

    def optimize(self) -> None:
        """Benchmark and plan all registered kernels now, so that no later call has to.

        Raises:
            InfeasibleError: if a workspace limit is too small; the message names the kernel and its need.
            MeasurementError: if no algorithm of a kernel could be measured.
        """
        self.backend.refuse_reentry()
        with self._lock:
            self.plans.plan_all()

    def save_plans(self, path: str | PathLike[str]) -> None:
        """Write the plans of all kernels so far to a file, for `load_plans` in other processes.

        Raises:
            OutputError: if the file cannot be written.
        """
        save_plans([self], path)

    def saved_plans(self) -> list[SavedPlan]:
        """Return the plans of all kernels so far, as `save_plans` writes them."""
        with self._lock:
            return self.plans.saved()

    def load_plans(self, path: str | PathLike[str]) -> None:
        """Take the plans of a file from the next call on; a kernel that the file has not is planned as without it.

        Raises:
            PlanFileError: if the file cannot be read, is damaged or of another version, was made for another device or
                other versions, or has a plan for a known kernel that exceeds its limit.
        """
        plans = load_plans(path, self.backend)
        self.backend.refuse_reentry()
        with self._lock:
            self.plans.load(plans)

    def forward(
        self,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        layer: str = "",
        bias: ArrayLike | None = None,
        **parameters: Unpack[Parameters],
    ) -> None:
        """Compute y = alpha * conv(x, w) + beta * y, or alpha * conv(x, w) + bias (cudnnConvolutionForward).

        Args:
            x: input, shape (N, C, spatial...), or (N, spatial..., C) for a channels-last layout such as 'NHWC'.
            w: filters, shape (K, C / groups, kernel...), or (K, kernel..., C / groups).
            y: output, shape (N, K, output...), or (N, output..., K).
            alpha: factor of the convolution.
            beta: factor of what y holds; at 0, y is not read.
            layer: name of the layer.
            bias: one number for each filter, of the type of y; None for none. Algorithms that add it themselves are
                measured beside those after which another kernel adds it.
            **parameters: padding, stride, dilation, groups, layout, math ('tf32' or 'fma'), deterministic.

        Raises:
            InvalidProblemError: if the arrays do not fit together, or if there is a bias and beta is not 0.
            UcudnnError: as `convolve`.
        """
        problem = self._problems.problem_of(Operation.FORWARD, x, w, y, **parameters)
        if bias is not None:
            if beta:
                raise InvalidProblemError(f"beta is {beta}, but a bias is not added to what y holds: leave one out")
            problem, w = with_bias(problem, bias), BiasedFilters(w, bias)
        self.convolve(problem, x, w, y, alpha=alpha, beta=beta, layer=layer)

    def backward_data(
        self,
        w: Tensor,
        dy: Tensor,
        dx: Tensor,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        layer: str = "",
        **parameters: Unpack[Parameters],
    ) -> None:
        """Compute dx = alpha * (gradient of the input) + beta * dx (cudnnConvolutionBackwardData).

        Arguments and errors are as in `forward`; dx and dy, the gradients, are shaped as x and y.
        """
        problem = self._problems.problem_of(Operation.BACKWARD_DATA, dx, w, dy, **parameters)
        self.convolve(problem, dx, w, dy, alpha=alpha, beta=beta, layer=layer)

    def backward_filter(
        self,
        x: Tensor,
        dy: Tensor,
        dw: Tensor,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        layer: str = "",
        **parameters: Unpack[Parameters],
    ) -> None:
        """Compute dw = alpha * (gradient of the filters) + beta * dw (cudnnConvolutionBackwardFilter).

        Arguments and errors are as in `forward`; dy and dw, the gradients, are shaped as y and w. beta applies once.
        """
        problem = self._problems.problem_of(Operation.BACKWARD_FILTER, x, dw, dy, **parameters)
        self.convolve(problem, x, dw, dy, alpha=alpha, beta=beta, layer=layer)

    def convolve(
        self,
        problem: ConvolutionProblem,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        layer: str = "",
        spare: Spare | None = None,
        fresh: bool = False,
    ) -> None:
        """Compute out = alpha * conv + beta * out for a problem, whose operation says which tensor is out.

        If an algorithm fails, the next best one replaces it, and the log says so once. If the GPU has no room for the
        workspace, the kernel gets a configuration that needs less.

        Args:
            problem: the problem to compute.
            x: input or its gradient, in the problem's layout and strides.
            w: filters or their gradient.
            y: output or its gradient.
            alpha: factor of the convolution.
            beta: factor of what the output holds; at 0 the output is not read.
            layer: name of the layer, as registered.
            spare: memory that the call may overwrite. If it is larger than the limit, it serves as the workspace, and
                no other is allocated. Not used under WD.
            fresh: whether the output holds nothing that is wanted and is not read before the call ends. Then samples
                that are not written yet may serve as workspace. Not used under WD or if beta is not 0.

        Raises:
            InvalidProblemError: if the output shares memory with an input.
            InfeasibleError: if a workspace limit is too small.
            MeasurementError: if no algorithm could be measured.
            BackendError: if the backend cannot execute, or the thread is inside another convolution already.
        """
        dispatcher = self._dispatcher
        if dispatcher is None:
            raise BackendError(f"backend {self.backend.name} plans but cannot execute: open one on 'cpu' or 'cudnn'")
        backend = dispatcher.backend  # x, w and y keep their names, because the arrays must live until the launch
        bound_x, bound_w, bound_y, alignment = bound = backend.bind(x, w, y)
        if backend.in_this_thread():
            backend.refuse_reentry()
        if alignment < problem.alignment:
            problem = replace(problem, alignment=alignment)
        spare_bytes = 0 if spare is None else self.plans.spare_workspace_bytes(spare.size_bytes)
        fresh = fresh and beta == 0 and not self._divides and tail_step(problem) > 0
        with self._lock:
            named = bool(layer)
            if self._divides and not named:
                layer = self.plans.layers.call(problem, backend.address(bound_w))
            key = layer, problem, spare_bytes, fresh  # found as a `KernelKey` is, and sooner made
            entry = self._entries.get(key)
            if entry is None and backend.capturing(backend.queue()):
                entry = self._entries.get((layer, problem, 0, False))  # a capture cannot plan
            if entry is None or entry.decision is None:
                if named:
                    checked_name(layer)
                entry = self.plans.plan_call(KernelKey(*key), backend.address(bound_w))
            if entry.disjoint != bound:
                dispatcher.refuse_overlap(entry, bound)
            scaling = OVERWRITE if alpha == 1 and beta == 0 else Scaling(alpha, beta)
            dispatcher.launch(entry, bound_x, bound_w, bound_y, scaling, spare)

    @property
    def workspace_bytes(self) -> int:
        """Workspace in bytes that the handle holds now."""
        return 0 if self._dispatcher is None else self._dispatcher.workspace_bytes

    @property
    def captured(self) -> bool:
        """Whether a captured CUDA graph uses plans of this handle, which must then live as long as the graph."""
        return self._dispatcher is not None and self._dispatcher.captured

    def release_workspace(self) -> None:
        """Free the workspace of each stream, unless a captured CUDA graph uses it; the next call allocates it again."""
        with self._lock:
            if self._dispatcher is not None:
                self._dispatcher.release()

    def __enter__(self) -> "Handle":
        """Return the handle: `with ucudnn.Handle(...) as handle`."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Free the workspaces, as `release_workspace`. The handle keeps its plans and stays usable."""
        self.release_workspace()

    def report(self, *, repeats: int = 0) -> Report:
        """Return the decisions so far, the measurements behind them, and how often each kernel ran.

        Args:
            repeats: how often each kernel's plans are timed on random operands. Kernels whose times are far from their
                predictions are then measured again and planned again. 0 reports predicted times only.

        Raises:
            UcudnnError: with `repeats`, if an algorithm fails, if a kernel cannot be planned again, or if the thread
                is inside a convolution.
            MemoryError: with `repeats`, if there is no room for tensors and workspace.
        """
        if repeats:
            self.backend.refuse_reentry()
        with self._lock:
            return report_plans(self.plans, self.backend, self.settings.policy.value, repeats)


def save_plans(handles: Sequence[Handle], path: str | PathLike[str]) -> None:
    """Write the plans of several handles, such as those of a program's GPUs, to one file; of one kernel, the first.

    Raises:
        PlanFileError: if there is no handle, or if they are of different devices.
        OutputError: if the file cannot be written.
    """
    write_whole(Path(path), encode_all([(each.backend, each.saved_plans()) for each in handles]))
