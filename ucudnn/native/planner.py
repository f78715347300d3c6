"""Planner: what the C++ handles of one GPU ask; decides once for each convolution, prepares for each handle.

The limit of a kernel's workspace:

- Where UCUDNN_TOTAL_WORKSPACE_SIZE is set, one workspace is divided among all kernels (WD).
- Else, where UCUDNN_DEFAULT_WORKSPACE_LIMIT is set, that: frameworks have theirs built in, as Caffe its 8 MiB.
- Else it is what the caller stated last for the problem; where it stated none, the default.
- A stated limit of 0 always holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from ucudnn.backends import candidates_of, open_backend
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.benchmarking.factory import open_benchmark
from ucudnn.configuration import Configuration
from ucudnn.errors import BackendError, StepError
from ucudnn.kernel import Kernel
from ucudnn.native.registry import Network
from ucudnn.native.steps import NativeStep, prepare
from ucudnn.planning.decision import decide, decide_rest
from ucudnn.problem import MOST_ALIGNMENT, ConvolutionProblem, MathMode, Operation
from ucudnn.settings import Settings, is_set
from ucudnn.units import exact_bytes
from ucudnn.workspace.segment import Segment

_MOST_REPLACEMENTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A plan that a handle wants.

    Attributes:
        handle: number of the handle.
        cudnn: address of its cudnnHandle_t.
        problem: what is computed, with the alignment of its tensors.
        alpha: factor of the convolution.
        beta: factor of what the output holds.
        start: samples before this one are computed already.
        failed: an algorithm that cuDNN did not run, or ''.
        most_bytes: workspace that memory has room for.
    """

    handle: int
    cudnn: int
    problem: ConvolutionProblem
    alpha: float
    beta: float
    start: int
    failed: str
    most_bytes: int

    @property
    def measured(self) -> bool:
        """Whether algorithms were measured with this alpha and beta, so that one that fails is no good at all."""
        usual = (0, 1) if self.problem.operation is Operation.BACKWARD_FILTER else (0,)
        return self.alpha == 1 and self.beta in usual


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a handle gets.

    Attributes:
        steps: the calls.
        workspace_bytes: what they need.
        segment: under WD, where that lies.
        text: what was decided, for people.
    """

    steps: Sequence[NativeStep]
    workspace_bytes: int
    segment: Segment | None
    text: str


@final
class Planner:
    """Plans for the handles of one GPU.

    Args:
        device: its number.
        cudnn_library: the cuDNN that the program uses.

    Attributes:
        generation: grows whenever plans that were given out are out of date.

    Raises:
        UcudnnError: if a variable has a value it may not have, or CuPy or cuDNN cannot be used.
    """

    def __init__(self, device: int, cudnn_library: str) -> None:
        self._settings = Settings.load(slabs=False)  # C++ makes calls on whole samples
        named = self._settings.backend
        asked = candidates_of(named if named.partition(":")[0] == "cudnn" else "cudnn", Candidates.BEST)
        # cuDNN's calls alone copy nothing.
        backend = open_backend("cudnn", candidates=asked.plain, cudnn_library=cudnn_library, device=device)
        assert isinstance(backend, CudnnBackend)
        self._backend = backend
        self._benchmark = open_benchmark(backend, self._settings)
        self._fixed = is_set("workspace_limit_bytes")
        self._fma = named == "cudnn:legacy-fma"
        self._network = None if self._settings.total_workspace_bytes is None else Network()
        self._limits: dict[ConvolutionProblem, int] = {}
        self._decided: dict[tuple[ConvolutionProblem, int], Configuration] = {}
        self._unfit: dict[tuple[ConvolutionProblem, float, float], set[str]] = {}
        self._planned: set[ConvolutionProblem] = set()
        self.generation = 1

    @property
    def arena_bytes(self) -> int:
        """Bytes of the workspace that is divided; 0 under WR."""
        return 0 if self._network is None else self._network.arena_bytes

    def state(self, problem: ConvolutionProblem, limit: int | None) -> None:
        """Take the limit that a caller states for a problem, in bytes; None where it states that there is none."""
        problem = self._as_asked(problem)
        before = self._limit(problem)
        if limit is None:
            self._limits.pop(problem, None)
        else:
            self._limits[problem] = limit
        if problem in self._planned and self._limit(problem) != before:
            self.generation += 1

    def register(self, handle: int, problem: ConvolutionProblem) -> None:
        """Note a kernel before it is first run (WD must know all of them)."""
        problem = self._as_asked(problem)
        if self._network is not None and self._limit(problem) is None:
            self._network.register(handle, problem)

    def forget(self, handle: int) -> None:
        """Forget the kernels of a handle that is no more."""
        if self._network is not None:
            self._network.forget(handle)

    def stop(self) -> None:
        """End what goes on in the background."""
        self._backend.stop()

    def plan(self, order: Order) -> Prepared:
        """Decide where nothing is decided yet, and prepare.

        Raises:
            UcudnnError: if no algorithm is left, or a limit is too small.
        """
        problem = self._as_asked(order.problem)
        order = replace(order, problem=problem)
        self._planned.add(_registered(problem))
        self._backend.set_stream(None)
        if order.failed:
            self._fail(order, order.failed)
        for _ in range(_MOST_REPLACEMENTS):
            configuration, room, segment = self._choose(order)
            try:
                steps = prepare(
                    self._backend.library,
                    order.cudnn,
                    problem,
                    configuration,
                    alpha=order.alpha,
                    beta=order.beta,
                    start=order.start,
                    room_bytes=room,
                )
            except StepError as error:
                self._fail(order, error.algorithm)
                continue
            need = max((step.workspace_bytes for step in steps), default=0)
            text = f"{problem}: {configuration}, workspace {exact_bytes(need)}"
            return Prepared(steps=steps, workspace_bytes=need, segment=segment, text=text)
        raise BackendError(f"{problem}: {_MOST_REPLACEMENTS} configurations failed one after another")

    def _as_asked(self, problem: ConvolutionProblem) -> ConvolutionProblem:
        """Return the problem without TF32 where the candidates are those of `legacy-fma`."""
        return replace(problem, math=MathMode.FMA) if self._fma else problem

    def _limit(self, problem: ConvolutionProblem) -> int | None:
        """Return a problem's own limit, or None where a total is divided."""
        stated = self._limits.get(_registered(problem))
        if stated == 0:
            return 0
        if self._network is not None:
            return None
        return self._settings.workspace_limit_bytes if self._fixed or stated is None else stated

    def _choose(self, order: Order) -> tuple[Configuration, int, Segment | None]:
        """Return a configuration, the workspace that it may take, and where that lies."""
        problem, limit, segment = order.problem, self._limit(order.problem), None
        if limit is None and self._network is not None:
            before = self._network.division
            configuration, segment = self._network.decision(order.handle, problem, self._benchmark, self._settings)
            if self._network.division != before:
                self.generation += 1
            limit = segment.size_bytes
        else:
            assert limit is not None
            configuration = self._decision(problem, limit)
        limit = min(limit, order.most_bytes)
        unfit = self._unfit.get((problem, order.alpha, order.beta), set())
        if order.start or configuration.workspace_bytes > limit or unfit & {p.algorithm for p in configuration.parts}:
            settings = replace(self._settings, total_workspace_bytes=None)
            rest = decide_rest(problem, order.start, self._benchmark, settings, limit, unfit)
            if rest is None:
                raise BackendError(f"{problem}: nothing is left that computes it within {exact_bytes(limit)}")
            configuration = rest
        return configuration, limit, segment

    def _decision(self, problem: ConvolutionProblem, limit: int) -> Configuration:
        key = problem, limit
        if key not in self._decided:
            settings = replace(self._settings, total_workspace_bytes=None, workspace_limit_bytes=limit)
            decisions = decide([Kernel(layer="", problem=problem)], self._benchmark, settings)
            self._decided[key] = decisions.kernels[0].configuration
        return self._decided[key]

    def _fail(self, order: Order, algorithm: str) -> None:
        """Choose without an algorithm from now on: for this alpha and beta, or, where it was measured so, for any."""
        problem = order.problem
        if not order.measured:
            self._unfit.setdefault((problem, order.alpha, order.beta), set()).add(algorithm)
            return
        self._benchmark.discard(problem, algorithm)
        for key in [key for key in self._decided if key[0] == problem]:
            del self._decided[key]
        if self._network is not None and self._limit(problem) is None:
            self._network.decide_again(order.handle, problem, self._benchmark, self._settings)


def _registered(problem: ConvolutionProblem) -> ConvolutionProblem:
    """Return a problem as it is registered, before addresses and wishes for determinism are known."""
    return replace(problem, alignment=MOST_ALIGNMENT, deterministic=False)
