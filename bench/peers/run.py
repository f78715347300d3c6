"""Runs of peers on one device: plans of several backends and PyTorch, on the same tensors, stream and clock."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from bench.peers.pytorch import TorchPeer
from bench.tools.backends import open_computing
from bench.tools.script import note
from ucudnn.backends.base import ComputeBackend
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.algorithms.gathered import skips
from ucudnn.backends.cudnn.gpu.cupy_gpu import cupy_module
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.factory import open_benchmark
from ucudnn.configuration import Configuration
from ucudnn.errors import UcudnnError
from ucudnn.execution.plan import make_plan
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.reporting.plan_timing import samples_in_turn
from ucudnn.settings import Settings

FAILURES = (UcudnnError, MemoryError, RuntimeError)
"""Errors that end one measurement only; RuntimeError comes from CUDA and PyTorch."""

WRITTEN = {Operation.FORWARD: 2, Operation.BACKWARD_DATA: 0, Operation.BACKWARD_FILTER: 1}
"""Index of the output among x, w and y."""

LEAST_REPEATS = 3
SLOW_MS = 400.0
"""Milliseconds for all samples of one problem, beyond which there are fewer samples."""

PLAIN = (Candidates.GRAPH_PLAIN, Candidates.BEST_PLAIN)
"""Candidates without copies, whose configurations the backend of the best candidates runs as well."""

NOTHING_LIKE = 1e9
"""Distance of an output with elements that are no numbers."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A configuration on a backend, or PyTorch, which has no configuration.

    Runs with the same micro-batches are equal, whatever times were measured when they were chosen.
    """

    runner: str
    text: str = ""
    configuration: Configuration | None = field(default=None, compare=False)

    @classmethod
    def of(cls, runner: str, configuration: Configuration) -> "Run":
        """Return the run of a configuration on a backend."""
        return cls(runner=runner, text=str(configuration), configuration=configuration)

    @property
    def workspace_bytes(self) -> int | None:
        """The workspace of the configuration; None for PyTorch."""
        return None if self.configuration is None else self.configuration.workspace_bytes


@dataclass(kw_only=True)
class Outcome:
    """The result of one run on one problem."""

    workspace_bytes: int | None = None
    samples_ms: list[float] = field(default_factory=list)
    failed: str = ""
    first_seconds: float = 0.0
    distance: float | None = None

    @property
    def time_ms(self) -> float | None:
        """The median of the samples; None if there is none."""
        return median(self.samples_ms) if self.samples_ms else None


Outcomes = dict[Run, Outcome]
"""The results of several runs on one problem."""


class Rig:
    """Backends with their benchmarks, and PyTorch, on one device with one stream and one clock.

    Args:
        name: name of the backend: 'cudnn' or 'cpu'.
        database: file of measurements; None for that of the environment.
    """

    def __init__(self, name: str, database: str | None) -> None:
        # The CPU has one kind of algorithms, which serves for all kinds of candidates.
        kinds = (Candidates.BEST,) if name == "cpu" else (Candidates.BEST, *PLAIN, Candidates.LEGACY)
        settings = Settings.load(database=database)
        opened = {kind: open_computing(name, kind) for kind in kinds}
        self.backends = {each.name: each for each in opened.values()}
        self._benchmarks = {kind: open_benchmark(each, settings) for kind, each in opened.items()}
        self.clock = next(iter(self.backends.values()))
        self.arrays_of: Any = np
        self._stream: Any = None
        if name != "cpu":
            self.arrays_of = cupy_module()
            self._stream = self.arrays_of.cuda.Stream(non_blocking=True)
        self.peer: TorchPeer | None = None
        self.no_peer = ""
        try:
            self.peer = TorchPeer(None if name == "cpu" else self.clock.device())
        except (
            ImportError,
            OSError,
            RuntimeError,
            AssertionError,
        ) as error:  # AssertionError if PyTorch was built without CUDA
            self.no_peer = f"PyTorch cannot be used: {said(error)}"

    def conditions(self) -> dict[str, str]:
        """Return the device and all versions."""
        return {**self.clock.conditions(), **(self.peer.conditions() if self.peer else {"torch": "none"})}

    def benchmark(self, candidates: Candidates, problems: Iterable[ConvolutionProblem]) -> Benchmark:
        """Return the benchmark that measures these candidates for the problems of a network."""
        if candidates in PLAIN:  # algorithms that are measured already are not measured again
            problems = list(problems)
            transforms = any(Candidates.BEST.offers("legacy", each) for each in problems)
            if candidates is Candidates.BEST_PLAIN and not transforms:
                candidates = Candidates.GRAPH_PLAIN
            if not any(map(skips, problems)) and not (transforms and candidates is Candidates.GRAPH_PLAIN):
                candidates = Candidates.BEST
        return self._of(candidates)

    def runner(self, candidates: Candidates) -> str:
        """Return the backend that runs configurations of these candidates, so that equal configurations are one run."""
        return self._of(Candidates.BEST if candidates in PLAIN else candidates).backend.name

    def _of(self, candidates: Candidates) -> Benchmark:
        return self._benchmarks.get(candidates) or self._benchmarks[Candidates.BEST]

    @contextmanager
    def one_stream(self) -> Iterator[None]:
        """Queue all work inside the block on one stream: plans of all backends, PyTorch, and the clock's events.

        Events enclose only the work of their own stream. A way on another stream would seem to take no time.
        """
        with ExitStack() as stack:
            if self._stream is not None:
                self.arrays_of.cuda.runtime.deviceSynchronize()  # planning used another stream
                stack.enter_context(self._stream)
            for backend in self.backends.values():
                backend.queue()  # points each cuDNN handle to the stream
            if self.peer is not None:
                stack.enter_context(self.peer.on_stream(self._stream.ptr if self._stream is not None else None))
            yield

    def arrays(self, problem: ConvolutionProblem, tensors: Sequence[Any]) -> list[Any]:
        """Return the operands as NumPy or CuPy arrays over the same memory."""
        if self._stream is None:
            return list(tensors)
        cupy, shapes = self.arrays_of, (problem.x_shape, problem.w_shape, problem.y_shape)
        memory = (cupy.cuda.UnownedMemory(each.address, each.size_bytes, each) for each in tensors)
        pointers = (cupy.cuda.MemoryPointer(each, 0) for each in memory)
        return [
            cupy.ndarray(shape, problem.dtype.value, pointer) for shape, pointer in zip(shapes, pointers, strict=True)
        ]

    def release(self) -> None:
        """Give unused memory back to the GPU, so that the next problem finds room in each memory pool."""
        if self._stream is not None:
            self.arrays_of.get_default_memory_pool().free_all_blocks()
        if self.peer is not None:
            self.peer.release()


def execute(problem: ConvolutionProblem, runs: Collection[Run], rig: Rig, repeats: int, check: bool) -> Outcomes:
    """Run several ways on one problem in turn; a way that fails says so and spares the others."""
    outcomes = {run: Outcome(workspace_bytes=run.workspace_bytes) for run in runs}
    try:
        _execute(problem, outcomes, rig, repeats, check)
    except FAILURES as error:
        for outcome in outcomes.values():
            if outcome.time_ms is None and not outcome.failed:
                outcome.failed = said(error)
    try:
        rig.release()
    except FAILURES as error:
        note(f"memory was not given back: {said(error)}")
    return outcomes


def _execute(problem: ConvolutionProblem, outcomes: Outcomes, rig: Rig, repeats: int, check: bool) -> None:
    tensors = rig.clock.operands(problem)
    arrays = rig.arrays(problem, tensors)
    workspace = _workspace(outcomes.values(), rig.clock)
    calls: dict[Run, Callable[[], Any]] = {}
    once: dict[Run, float] = {}
    for run, outcome in outcomes.items():
        if outcome.failed:
            continue
        try:
            call = _call(run, problem, tensors, arrays, workspace, rig)
            begin = perf_counter()
            rig.clock.elapsed_ms(call)
            outcome.first_seconds = perf_counter() - begin
            if run.configuration is None and rig.peer is not None:
                outcome.workspace_bytes = rig.peer.workspace_bytes(call)
            once[run] = rig.clock.elapsed_ms(call)
            calls[run] = call
        except FAILURES as error:
            outcome.failed = said(error)
    spent_ms = sum(once_ms for run, once_ms in once.items() if run in calls)
    repeats = min(repeats, max(LEAST_REPEATS, int(SLOW_MS / (2 * spent_ms)))) if spent_ms else repeats
    for run, samples_ms in samples_in_turn(calls, rig.clock, repeats).items():
        outcomes[run].samples_ms = samples_ms
    if check:
        _compare(problem, calls, arrays, outcomes, rig)


def _workspace(outcomes: Collection[Outcome], backend: ComputeBackend) -> Any:
    """Return a workspace for all runs that fit the free memory; the others fail."""
    for size in sorted({outcome.workspace_bytes or 0 for outcome in outcomes}, reverse=True):
        try:
            return backend.allocate(size)
        except MemoryError as error:
            for outcome in outcomes:
                if outcome.workspace_bytes == size:
                    outcome.failed = said(error)
    return backend.allocate(0)


def _call(
    run: Run, problem: ConvolutionProblem, tensors: Sequence[Any], arrays: Sequence[Any], workspace: Any, rig: Rig
) -> Callable[[], Any]:
    if run.configuration is None:
        assert rig.peer is not None
        return rig.peer.call(problem, arrays)
    backend = rig.backends[run.runner]
    x, w, y, _ = backend.bind(*tensors)
    launch = make_plan(problem, run.configuration, backend).launch
    return partial(launch, x, w, y, workspace)


def _compare(
    problem: ConvolutionProblem,
    calls: Mapping[Run, Callable[[], Any]],
    arrays: Sequence[Any],
    outcomes: Outcomes,
    rig: Rig,
) -> None:
    """Measure the relative L2 distance of each output from that of an undivided algorithm, best of the graph API."""

    def plainness(run: Run) -> tuple[bool, bool]:
        whole = run.configuration is not None and len(run.configuration.parts) == 1
        divided = not whole or bool(run.configuration and run.configuration.parts[0].slabs)
        return divided, run.runner != rig.clock.name

    written = arrays[WRITTEN[problem.operation]]
    norm = rig.arrays_of.linalg.norm
    expected: Any = None
    for run in sorted(calls, key=plainness):
        written.fill(float("nan"))  # finds elements that are not computed
        output = calls[run]()
        found = written if output is None or rig.peer is None else rig.peer.arranged(output, problem)
        found = rig.arrays_of.asarray(found).astype(np.float64).ravel()
        expected = found if expected is None else expected
        distance = float(norm(found - expected) / norm(expected))
        outcomes[run].distance = distance if isfinite(distance) else NOTHING_LIKE


def said(error: Exception) -> str:
    """Return an error on one line; errors of other packages with their type."""
    return " ".join((str(error) if isinstance(error, UcudnnError) else f"{type(error).__name__}: {error}").split())
