"""Handle: stands in for a cuDNN handle; plans each convolution once, dispatches ever after."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from threading import RLock
from typing import TypedDict, Unpack

from ucudnn.backends import open_backend
from ucudnn.backends.base import Backend, ComputeBackend, Effort, Tensor
from ucudnn.benchmark import Benchmark, ProgressListener
from ucudnn.decision import Decision, Decisions, decide
from ucudnn.errors import BackendError, UcudnnError
from ucudnn.kernel import Kernel
from ucudnn.plan import Plan, make_plan
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem, Layout, MathMode, Operation
from ucudnn.report import Report, report_decisions, report_kernel
from ucudnn.settings import VARIABLES, Settings, SolverName
from ucudnn.tensors import problem_of
from ucudnn.workspace import DividedWorkspace, SharedWorkspace, Workspace

_LOG = logging.getLogger(__name__)
_Key = tuple[str, ConvolutionProblem]


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualAlgorithm:
    """What a framework is told in place of an algorithm: the handle decides, and owns the workspace.

    Attributes:
        name: 'UCUDNN'.
        workspace_bytes: 0: the framework need not allocate any (paper, section 3.4).
    """

    name: str = "UCUDNN"
    workspace_bytes: int = 0


class Parameters(TypedDict, total=False):
    """Keyword arguments of a convolution, as `ucudnn.tensors.problem_of` takes them."""

    padding: int | Sequence[int]
    stride: int | Sequence[int]
    dilation: int | Sequence[int]
    groups: int
    layout: str | Layout | None
    math: str | MathMode
    deterministic: bool


class Handle:
    """Convolutions in micro-batches: the same results, the same call, within a workspace limit.

    Each problem is benchmarked and planned at its first call, or earlier where it was registered with
    `get_algorithm`. Arguments that are None come from the environment, else from defaults. Calls on one
    handle from several threads wait for each other, for they share its workspace.

    Args:
        backend: 'auto', 'cpu', 'replay:NAME-or-path' (plans only), or a backend (UCUDNN_BACKEND).
        policy: 'undivided', 'powerOfTwo' or 'all' (UCUDNN_BATCH_SIZE_POLICY).
        workspace_limit: bytes or '64MiB' for each kernel, WR (UCUDNN_DEFAULT_WORKSPACE_LIMIT).
        total_workspace: bytes or '120MiB' for all kernels, WD (UCUDNN_TOTAL_WORKSPACE_SIZE).
        solver: solver of WD's integer program (UCUDNN_SOLVER).
        effort: how much time goes into one measurement.
        listener: is told of the benchmarks' progress.

    Raises:
        SettingsError: if an argument or variable has a value it may not have.
        BackendUnavailableError: if the backend is not known or not installed.
        ProfileError: if the profile to replay cannot be read.
    """

    def __init__(
        self,
        *,
        backend: str | Backend | None = None,
        policy: str | BatchSizePolicy | None = None,
        workspace_limit: int | str | None = None,
        total_workspace: int | str | None = None,
        solver: str | SolverName | None = None,
        effort: Effort | None = None,
        listener: ProgressListener | None = None,
    ) -> None:
        self.settings = Settings.load(
            backend=None if isinstance(backend, Backend) else backend,
            policy=policy,
            workspace_limit_bytes=workspace_limit,
            total_workspace_bytes=total_workspace,
            solver=solver,
        )
        for field in ("database", "benchmark_devices"):
            if getattr(self.settings, field) != getattr(Settings(), field):
                _LOG.warning("%s has no effect on backend %s in this version", VARIABLES[field], self.settings.backend)
        self._backend = backend if isinstance(backend, Backend) else open_backend(self.settings.backend)
        self._benchmark = Benchmark(self._backend, effort=effort, listener=listener)
        self._lock = RLock()
        self._kernels: dict[_Key, Kernel] = {}
        self._decided: list[Decisions] = []
        self._decisions: dict[_Key, Decision] = {}
        self._plans: dict[_Key, Plan] = {}
        self._calls: dict[_Key, int] = {}
        self._workspace: Workspace[_Key] | None = None

    def get_algorithm(self, problem: ConvolutionProblem, *, layer: str = "") -> VirtualAlgorithm:
        """Register a kernel before the first run, as frameworks do through cudnnGetConvolution*Algorithm.

        WD must know all kernels before it divides the workspace (paper, section 3.5). Registering a kernel
        again changes nothing.

        Args:
            problem: what will be computed.
            layer: name of the layer; kernels of the same problem and name share a plan and a segment.

        Returns:
            A virtual algorithm that needs no workspace of the caller's.
        """
        with self._lock:
            self._register((layer, problem))
        return VirtualAlgorithm()

    def optimize(self) -> None:
        """Benchmark and plan all that is registered now, so that no later call has to.

        Raises:
            InfeasibleError: if a workspace limit is too small; it says which kernel needs how much.
            MeasurementError: if no algorithm of a kernel could be measured.
        """
        with self._lock:
            missing = [key for key in self._kernels if key not in self._decisions]
            if not missing:
                return
            divides = self.settings.total_workspace_bytes is not None
            if divides:
                missing = list(self._kernels)  # what comes late takes part in a new division
            decisions = decide([self._kernels[key] for key in missing], self._benchmark, self.settings)
            if divides:
                self._decided.clear()
                self._plans.clear()
                self._workspace = None
            self._decided.append(decisions)
            self._decisions.update(zip(missing, decisions.kernels, strict=True))
            _LOG.info("planned %d kernels in %.2f s", len(missing), decisions.benchmark_seconds)

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
    ) -> None:
        """Compute out = alpha * conv + beta * out for a problem; the operation says which tensor is out.

        Args:
            problem: what is computed.
            x: input or its gradient, in the problem's layout and strides.
            w: filters or their gradient.
            y: output or its gradient.
            alpha: factor of the convolution.
            beta: factor of what the output holds; at 0 the output is not read.
            layer: name of the layer, as registered.

        Raises:
            InfeasibleError: if a workspace limit is too small.
            MeasurementError: if no algorithm could be measured.
            BackendError: if the backend cannot execute.
        """
        key = (layer, problem)
        with self._lock:
            plan = self._plans.get(key) or self._plan(key)
            workspace = self._workspace_for(key, plan)
            plan.launch(x, w, y, alpha=alpha, beta=beta, workspace=workspace)
            self._calls[key] = self._calls.get(key, 0) + 1

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
        problem = problem_of(Operation.FORWARD, x, w, y, **parameters)
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
        problem = problem_of(Operation.BACKWARD_DATA, dx, w, dy, **parameters)
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
        problem = problem_of(Operation.BACKWARD_FILTER, x, dw, dy, **parameters)
        self.convolve(problem, x, dw, dy, alpha=alpha, beta=beta, layer=layer)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that the handle holds now."""
        return self._workspace.size_bytes if self._workspace else 0

    def report(self) -> Report:
        """Return what was decided so far, what it was decided from, and how often each kernel ran."""
        with self._lock:
            decided = self._decided or [decide([], self._benchmark, self.settings)]
            merged = Decisions(
                method=decided[0].method,
                limit_bytes=decided[0].limit_bytes,
                kernels=tuple(self._decisions.values()),
                benchmark_seconds=sum(each.benchmark_seconds for each in decided),
                solver_seconds=sum(each.solver_seconds for each in decided),
            )
            kernels = [
                report_kernel(decision, calls=self._calls.get(key, 0)) for key, decision in self._decisions.items()
            ]
            return report_decisions(
                merged,
                kernels,
                network="",
                policy=self.settings.policy.value,
                backend=self._backend.name,
                conditions=self._backend.conditions(),
            )

    def _register(self, key: _Key) -> None:
        layer, problem = key
        self._kernels.setdefault(key, Kernel(layer=layer, problem=problem))

    def _plan(self, key: _Key) -> Plan:
        backend = self._compute_backend()
        known = key in self._kernels
        self._register(key)
        try:
            self.optimize()
        except UcudnnError:
            if not known:
                del self._kernels[key]  # one kernel that cannot be planned must not stop the others
            raise
        self._plans[key] = make_plan(key[1], self._decisions[key].configuration, backend)
        return self._plans[key]

    def _workspace_for(self, key: _Key, plan: Plan) -> object:
        if self._workspace is None:
            backend = self._compute_backend()
            if self.settings.total_workspace_bytes is None:
                self._workspace = SharedWorkspace(backend)
            else:
                needs = {each: decision.configuration.workspace_bytes for each, decision in self._decisions.items()}
                self._workspace = DividedWorkspace(backend, needs)
        return self._workspace.buffer(key, plan.configuration.workspace_bytes)

    def _compute_backend(self) -> ComputeBackend:
        if not isinstance(self._backend, ComputeBackend):
            raise BackendError(f"backend {self._backend.name} plans but cannot execute: open a handle on 'cpu'")
        return self._backend
