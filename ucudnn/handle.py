"""Handle: stands in for a cuDNN handle; plans each convolution once, dispatches ever after."""

import logging
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Unpack

from ucudnn.arrays import Parameters, ProblemCache
from ucudnn.backends import open_backend
from ucudnn.backends.base import Backend, ComputeBackend, Spare, Tensor
from ucudnn.backends.measurement import Effort
from ucudnn.benchmarking.benchmark import ProgressListener
from ucudnn.benchmarking.factory import open_benchmark
from ucudnn.errors import BackendError, InfeasibleError, SettingsError
from ucudnn.execution.dispatcher import Dispatcher, Entry
from ucudnn.execution.launcher import Launcher
from ucudnn.execution.layer_identity import LayerIdentities, checked_name
from ucudnn.kernel import Kernel, VirtualAlgorithm
from ucudnn.planning.concurrency import parse_groups
from ucudnn.planning.decision import Decisions, decide
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.reporting.plan_timing import report_run
from ucudnn.reporting.report import Report
from ucudnn.settings import Settings, SolverName
from ucudnn.workspace.spare import tail_step

_LOG = logging.getLogger(__name__)
_Key = tuple[str, ConvolutionProblem, int, bool]
"""Layer, problem, bytes of spare memory, and whether the output is fresh."""


class Handle:
    """Convolutions in micro-batches: the same results, the same call, within a workspace limit.

    Each problem is benchmarked and planned at its first call, or earlier where it was registered with
    `get_algorithm`. Arguments that are None come from the environment, else from defaults. Calls on one
    handle from several threads wait for each other, for they share its workspace.

    Args:
        backend: 'auto', 'cpu', 'cudnn', 'cudnn:CANDIDATES', 'replay:NAME-or-path' (plans only), or a backend
            (UCUDNN_BACKEND).
        policy: 'undivided', 'powerOfTwo', 'all' or 'adaptive' (UCUDNN_BATCH_SIZE_POLICY).
        workspace_limit: bytes or '64MiB' for each kernel, WR (UCUDNN_DEFAULT_WORKSPACE_LIMIT).
        total_workspace: bytes or '120MiB' for all kernels, WD (UCUDNN_TOTAL_WORKSPACE_SIZE).
        solver: solver of WD's integer program (UCUDNN_SOLVER).
        solver_time_limit: seconds after which WD takes the solver's best (UCUDNN_SOLVER_TIME_LIMIT).
        groups: under WD, the layers that may run at the same time: for each group its branches, each a layer's name or
            a sequence of names that run one after another, such as `[["1x1", ["3x3_reduce", "3x3"]]]`. Layers in no
            group run alone. None: any two kernels may run at the same time.
        database: file that keeps measurements for the next process, or 'off' (UCUDNN_DATABASE).
        benchmark_devices: who measures together: GPUs as '0,1' or 'all', or 'ranks' (UCUDNN_BENCHMARK_DEVICES).
        slabs: whether what single samples need too much workspace for is computed in ranges of rows (UCUDNN_SLABS).
        effort: how much time goes into one measurement.
        listener: is told of the benchmarks' progress.

    Raises:
        SettingsError: if an argument or variable has a value it may not have.
        BackendUnavailableError: if the backend is not known or not installed.
        ProfileError: if the profile to replay cannot be read.
        DatabaseError: if the database cannot be opened, or a newer ucudnn wrote it.
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
        database: str | None = None,
        benchmark_devices: str | tuple[int, ...] | None = None,
        slabs: bool | str | None = None,
        effort: Effort | None = None,
        listener: ProgressListener | None = None,
    ) -> None:
        self.settings = Settings.load(
            backend=None if isinstance(backend, Backend) else backend,
            policy=policy,
            workspace_limit_bytes=workspace_limit,
            total_workspace_bytes=total_workspace,
            solver=solver,
            solver_time_limit_seconds=solver_time_limit,
            database=database,
            benchmark_devices=benchmark_devices,
            slabs=slabs,
        )
        path = self.settings.cudnn_library
        opened = backend if isinstance(backend, Backend) else open_backend(self.settings.backend, cudnn_library=path)
        self.backend: Backend = opened
        """What computes, or replays."""
        self._benchmark = open_benchmark(self.backend, self.settings, effort=effort, listener=listener)
        self._lock = self.backend.lock
        self._problems = ProblemCache()
        self._groups = parse_groups(groups or ())
        self._divides = self.settings.total_workspace_bytes is not None
        if self._groups and not self._divides:
            raise SettingsError("groups say how a total is divided: give total_workspace, too")
        self._layers = LayerIdentities()
        self._entries: dict[_Key, Entry] = {}
        self._decided: list[Decisions] = []
        computes = opened if isinstance(opened, ComputeBackend) else None
        self._dispatcher = None if computes is None else Dispatcher(computes, self._benchmark, self.settings)

    def get_algorithm(
        self, problem: ConvolutionProblem, *, layer: str = "", filters: Hashable = None
    ) -> VirtualAlgorithm:
        """Register a kernel before the first run, as frameworks do through cudnnGetConvolution*Algorithm.

        WD must know all kernels before it divides the workspace (paper, section 3.5). Registering a kernel
        again changes nothing.

        Args:
            problem: what will be computed.
            layer: name of the layer; kernels of the same problem and name share a plan and a segment.
            filters: under WD, what tells layers without a name apart: the address of the filters (or of their
                gradient), or whatever else stands for them. Filters that were not registered are taken, when they are
                first computed with, for those of the next registered layer of their shape, else for a new layer.

        Returns:
            A virtual algorithm that needs no workspace of the caller's.
        """
        with self._lock:
            layer = checked_name(layer)
            if self._divides and not layer:
                layer = self._layers.register(problem, filters)
            self._register((layer, problem, 0, False))
        return VirtualAlgorithm()

    def optimize(self) -> None:
        """Benchmark and plan all that is registered now, so that no later call has to.

        Raises:
            InfeasibleError: if a workspace limit is too small; it says which kernel needs how much.
            MeasurementError: if no algorithm of a kernel could be measured.
        """
        with self._lock:
            missing = [entry for entry in self._entries.values() if entry.decision is None]
            if missing:
                self._decide(missing)

    def _decide(self, missing: list[Entry]) -> None:
        if self._divides:
            missing = list(self._entries.values())  # what comes late takes part in a new division
        decisions = decide([entry.kernel for entry in missing], self._benchmark, self.settings, self._groups)
        if self._divides:  # the latest division counts, and the time that all of them took
            decisions = replace(
                decisions,
                benchmark_seconds=decisions.benchmark_seconds + sum(each.benchmark_seconds for each in self._decided),
                solver_seconds=decisions.solver_seconds + sum(each.solver_seconds for each in self._decided),
            )
            self._decided.clear()
        self._decided.append(decisions)
        for entry, decision in zip(missing, decisions.kernels, strict=True):
            entry.decide(decision)
        if self._divides and self._dispatcher is not None:
            self._dispatcher.divide(self._entries.values())
        one = decisions.kernels[0]
        what = f"{one.kernel}: {one.configuration}" if len(missing) == 1 else f"{len(missing)} kernels"
        _LOG.info("planned %s, in %.2f s", what, decisions.benchmark_seconds)

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
        """Compute out = alpha * conv + beta * out for a problem; the operation says which tensor is out.

        An algorithm that fails is replaced by the next best one, and a log line says so once. A GPU without room for
        the workspace gets a configuration that needs less.

        Args:
            problem: what is computed.
            x: input or its gradient, in the problem's layout and strides.
            w: filters or their gradient.
            y: output or its gradient.
            alpha: factor of the convolution.
            beta: factor of what the output holds; at 0 the output is not read.
            layer: name of the layer, as registered.
            spare: memory that the call may overwrite, such as that of a gradient that is computed next. Where it is
                more than the limit, it serves as workspace, and no other is allocated; not under WD.
            fresh: whether the output holds nothing that is wanted, and nobody reads it before the call ends: then what
                is not written yet serves as workspace for what is, where that is faster than the limit allows; not
                under WD, and with beta other than 0.

        Raises:
            InfeasibleError: if a workspace limit is too small.
            MeasurementError: if no algorithm could be measured.
            BackendError: if the backend cannot execute.
        """
        dispatcher = self._dispatcher
        if dispatcher is None:
            raise BackendError(
                f"backend {self.backend.name} plans but cannot execute: open a handle on 'cpu' or 'cudnn'"
            )
        # Under names of their own: the arrays must live until they are launched on, whoever else holds them.
        bound_x, bound_w, bound_y, alignment = dispatcher.backend.bind(x, w, y)
        if alignment < problem.alignment:
            problem = replace(problem, alignment=alignment)
        spare_bytes = 0 if spare is None else self.useful(spare.size_bytes)
        fresh = fresh and beta == 0 and not self._divides and tail_step(problem) > 0
        with self._lock:
            named = bool(layer)
            if self._divides and not named:
                layer = self._layers.call(problem, dispatcher.backend.address(bound_w))
            entry = self._entries.get((layer, problem, spare_bytes, fresh))
            if entry is None and dispatcher.backend.capturing(dispatcher.backend.queue()):
                entry = self._entries.get((layer, problem, 0, False))  # nothing is planned in a capture
            if entry is None or entry.decision is None:
                try:
                    entry = self._plan((checked_name(layer) if named else layer, problem, spare_bytes, fresh))
                except InfeasibleError:
                    shared = None if named else self._layers.share(problem, dispatcher.backend.address(bound_w))
                    if shared is None:
                        raise
                    entry = self._plan((shared, problem, 0, False))
            dispatcher.launch(entry, bound_x, bound_w, bound_y, alpha, beta, spare)

    def useful(self, spare_bytes: int) -> int:
        """Return how much of spare memory serves as workspace: none up to the limit, else in few different sizes."""
        step = 1 << max(0, spare_bytes.bit_length() - 4)
        rounded = spare_bytes // step * step
        return 0 if self._divides or rounded <= self.settings.workspace_limit_bytes else rounded

    def launcher(
        self,
        problem: ConvolutionProblem,
        layer: str = "",
        spare_bytes: int = 0,
        *,
        fresh: bool = False,
        plan: bool = False,
    ) -> Launcher | None:
        """Return what computes a planned problem with alpha = 1 and beta = 0, with little on the way to the backend.

        Args:
            problem: what is computed.
            layer: name of the layer.
            spare_bytes: of spare memory, as far as it is `useful`.
            fresh: whether outputs hold nothing that is wanted.
            plan: whether to plan the problem first, where it is not planned; that raises what `convolve` does.

        Returns:
            The launcher; None where the problem is not planned, and under WD, where each call says which layer it is.
        """
        if self._dispatcher is None or self._divides:
            return None
        key = checked_name(layer), problem, spare_bytes, fresh and tail_step(problem) > 0
        with self._lock:
            entry = self._entries.get(key)
            if plan and (entry is None or entry.decision is None):
                entry = self._plan(key)
        return None if entry is None or entry.decision is None else Launcher(entry, self._dispatcher, self._lock)

    def forward(
        self,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        layer: str = "",
        **parameters: Unpack[Parameters],
    ) -> None:
        """Compute y = alpha * conv(x, w) + beta * y (cudnnConvolutionForward).

        Args:
            x: input, shape (N, C, spatial...), or (N, spatial..., C) with layout='NHWC' and its like.
            w: filters, shape (K, C / groups, kernel...), or (K, kernel..., C / groups).
            y: output, shape (N, K, output...), or (N, output..., K).
            alpha: factor of the convolution.
            beta: factor of what y holds; at 0, y is not read.
            layer: name of the layer.
            **parameters: padding, stride, dilation, groups, layout, math ('tf32' or 'fma'), deterministic.

        Raises:
            InvalidProblemError: if the arrays do not fit together.
            UcudnnError: as `convolve`.
        """
        problem = self._problems.problem_of(Operation.FORWARD, x, w, y, **parameters)
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

        Args:
            w: filters, shaped as in `forward`.
            dy: gradient of the output, shaped as y.
            dx: gradient of the input, shaped as x.
            alpha: factor of the convolution.
            beta: factor of what dx holds; at 0, dx is not read.
            layer: name of the layer.
            **parameters: as in `forward`.

        Raises:
            InvalidProblemError: if the arrays do not fit together.
            UcudnnError: as `convolve`.
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

        Args:
            x: input, shaped as in `forward`.
            dy: gradient of the output, shaped as y.
            dw: gradient of the filters, shaped as w.
            alpha: factor of the convolution.
            beta: factor of what dw holds, applied once; at 0, dw is not read.
            layer: name of the layer.
            **parameters: as in `forward`.

        Raises:
            InvalidProblemError: if the arrays do not fit together.
            UcudnnError: as `convolve`.
        """
        problem = self._problems.problem_of(Operation.BACKWARD_FILTER, x, dw, dy, **parameters)
        self.convolve(problem, x, dw, dy, alpha=alpha, beta=beta, layer=layer)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that the handle holds now."""
        return 0 if self._dispatcher is None else self._dispatcher.workspace_bytes

    @property
    def captured(self) -> bool:
        """Whether a captured CUDA graph uses its plans, so that it must live as long as the graph."""
        return self._dispatcher is not None and self._dispatcher.captured

    def release_workspace(self) -> None:
        """Give back the workspaces, one for each stream, except what captured CUDA graphs use; they are made again."""
        with self._lock:
            if self._dispatcher is not None:
                self._dispatcher.release()

    def report(self, *, repeats: int = 0) -> Report:
        """Return what was decided so far, what it was decided from, and how often each kernel ran.

        Args:
            repeats: how often each kernel's plans are run on random operands to be timed; 0 for predictions only.
        """
        with self._lock:
            decided = self._decided or [decide([], self._benchmark, self.settings)]
            run = [(entry.decision, entry.calls) for entry in self._entries.values() if entry.decision is not None]
            return report_run(decided, run, self.backend, self.settings.policy.value, repeats)

    def _register(self, key: _Key) -> Entry:
        layer, problem, spare_bytes, fresh = key
        kernel = Kernel(layer=layer, problem=problem, spare_bytes=spare_bytes, fresh=fresh)
        return self._entries.setdefault(key, Entry(kernel))

    def _plan(self, key: _Key) -> Entry:
        known = key in self._entries
        entry = self._register(key)
        try:
            self._decide([entry])  # under WR, others that cannot be planned are none of its business
        except BaseException:
            if not known:
                del self._entries[key]  # one kernel that cannot be planned must not stop the others
            raise
        return entry
