"""Planner: plans for the C++ handles of one GPU; decides once for each convolution, and prepares for each handle.

The workspace limit of a kernel:

- If UCUDNN_TOTAL_WORKSPACE_SIZE is set, one workspace is divided among all kernels (WD).
- Else UCUDNN_DEFAULT_WORKSPACE_LIMIT, if it is set. It wins over the caller's limits, because frameworks have theirs
  built in, as Caffe has 8 MiB.
- Else the limit that the caller stated last for the problem, or the default if it stated none.
- A stated limit of 0 always holds.
"""

from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from ucudnn.backends import candidates_of, open_backend
from ucudnn.backends.base import Backend, Scaling
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.benchmarking.factory import open_benchmark
from ucudnn.configuration import Configuration
from ucudnn.errors import BackendError, StepError
from ucudnn.execution.entry import Entry
from ucudnn.execution.recovery import MOST_FAILURES, Replacement, given_up, is_lasting, is_measured
from ucudnn.kernel import Kernel
from ucudnn.native.registry import KernelRegistry, as_registered
from ucudnn.native.steps import PlanRequest, Recipe, StepStruct, native_steps
from ucudnn.planning.decision import Decision, Decisions, decide
from ucudnn.planning.plan_file import NO_PLANS, load_plans
from ucudnn.planning.replanning import Replanner
from ucudnn.problem import ConvolutionProblem, MathMode
from ucudnn.reporting.report import Report
from ucudnn.reporting.run_report import report_run
from ucudnn.settings import Settings, is_set
from ucudnn.units import bytes_down, bytes_up
from ucudnn.workspace.stream_order import Segment


@final
class _Line:
    def __init__(self, decision: Decision, limit_bytes: int | None) -> None:
        self.entry = Entry(decision.kernel)
        self.limit_bytes = limit_bytes  # under WR; None under WD
        self.calls = self.entry.count_natively()  # C++ counts in the first number
        self.failed = ""  # why its configuration was given up, until there is another one


@final
class Ledger:
    """What C++ handles of one GPU computed, for a report: kernels, each with a key, decisions, calls, replacements."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}
        self._decided: dict[int, list[Decisions]] = {}  # of WR, by limit

    def decide(
        self, key: Hashable, decision: Decision, limit_bytes: int | None = None, made: Decisions | None = None
    ) -> None:
        """Take a decision; the one that holds already changes nothing.

        Under WR, `limit_bytes` is the kernel's limit, and `made` has the decisions of which this is one.
        """
        line = self._lines.setdefault(key, _Line(decision, limit_bytes))
        before = line.entry.decision
        if decision is before:
            return
        if before is not None and line.failed:
            old, new = before.configuration, decision.configuration
            line.entry.note(Replacement(before=old, after=new, reason=line.failed, timed=decision.timed))
        elif made is not None and limit_bytes is not None:
            self._decided.setdefault(limit_bytes, []).append(made)
        line.failed = ""
        line.entry.decide(decision)

    def fail(self, key: Hashable, reason: str) -> None:
        """Take that a kernel's configuration is given up; the next decision replaces it."""
        if key in self._lines:
            self._lines[key].failed = reason

    def replaced(self, key: Hashable, after: Configuration, reason: str, calls: str = "") -> None:
        """Take that another configuration computes a kernel, or some of its calls, without another decision."""
        entry = self._lines[key].entry
        if entry.decision is not None:
            before, timed = entry.decision.configuration, entry.decision.timed
            entry.note(Replacement(before=before, after=after, reason=reason, calls=calls, timed=timed))

    def calls(self, key: Hashable) -> "array[int]":
        """Return the numbers of which the first 64 bits count the calls of a kernel. They live until `end`."""
        return self._lines[key].calls

    def end(self, key: Hashable) -> None:
        """Take that a kernel's handle was destroyed. Ended kernels with one problem and configuration are one line."""
        line = self._lines.pop(key, None)
        if line is None or line.entry.decision is None:
            return
        decision = line.entry.decision
        kept = self._lines.setdefault((decision.kernel.problem, decision.configuration), line)
        if kept is not line:
            kept.calls[0] += line.calls[0]

    def reports(
        self, backend: Backend, policy: str, divided: Sequence[Decisions], now: Mapping[str, Decision]
    ) -> list[Report]:
        """Return a report for each limit, that of the division first.

        Under WD, `divided` is the latest division, and `now` has the decisions that hold, by the keys of their kernels.
        """
        for name, decision in now.items():
            self.decide(name, decision)
        groups: dict[int | None, list[_Line]] = {}
        for line in self._lines.values():
            groups.setdefault(line.limit_bytes, []).append(line)
        found = []
        for limit in sorted(groups, key=lambda limit: -1 if limit is None else limit):
            entries = [line.entry for line in groups[limit]]
            report = report_run(divided if limit is None else self._decided[limit], entries, backend, policy)
            changed = sum(any(not each.calls for each in entry.replacements) for entry in entries)
            found.append(replace(report, changed=changed))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class NativePlan:
    """A plan for a handle, whose calls need what it keeps.

    Attributes:
        segment: the part of the divided workspace under WD; else None.
        text: the decision as text for people.
        calls: 64 bits that count the calls of the kernel; they live as long as the plan.
    """

    steps: Sequence[StepStruct]
    keeps: Sequence[Recipe]
    workspace_bytes: int
    segment: Segment | None
    text: str
    calls: "array[int]"


@final
class NativePlanner:
    """Plans for the handles of one GPU, given by its number, with the cuDNN that the program uses.

    Attributes:
        generation: a number that grows whenever earlier plans are out of date.

    Raises:
        UcudnnError: if an environment variable has a wrong value, or CuPy or cuDNN cannot be used.
    """

    def __init__(self, device: int, cudnn_library: str) -> None:
        self._settings = Settings.load(slabs=False)  # C++ calls cuDNN on whole samples
        named = self._settings.backend
        asked = candidates_of(named if named.partition(":")[0] == "cudnn" else "cudnn", Candidates.BEST)
        # C++ makes only calls of cuDNN, so algorithms that copy are left out.
        backend = open_backend("cudnn", candidates=asked.plain, cudnn_library=cudnn_library, device=device)
        assert isinstance(backend, CudnnBackend)
        backend.keeps_sums = False  # nor does it add parts in float32
        self._backend = backend
        self._benchmark = open_benchmark(backend, self._settings)
        self._fixed = is_set("workspace_limit_bytes")
        self._fma = named == "cudnn:legacy-fma"
        plans = self._settings.plans
        self._loaded = NO_PLANS if plans is None else load_plans(plans, backend)
        self._registry = None if self._settings.total_workspace_bytes is None else KernelRegistry(self._loaded)
        self._replanner = Replanner(self._benchmark, replace(self._settings, total_workspace_bytes=None))
        self._limits: dict[ConvolutionProblem, int] = {}
        self._decided: dict[tuple[ConvolutionProblem, int], Decision] = {}
        self._ledger = Ledger()
        self._unfit: dict[tuple[ConvolutionProblem, Scaling], set[str]] = {}
        self._planned: set[ConvolutionProblem] = set()
        self.generation = 1

    @property
    def arena_bytes(self) -> int:
        """Bytes of the divided workspace; 0 under WR."""
        return 0 if self._registry is None else self._registry.arena_bytes

    def state(self, problem: ConvolutionProblem, limit: int | None) -> None:
        """Take the limit in bytes that a caller states for a problem; None if the caller states that there is none."""
        problem = self._as_asked(problem)
        before = self._limit(problem)
        if limit is None:
            self._limits.pop(problem, None)
        else:
            self._limits[problem] = limit
        if problem in self._planned and self._limit(problem) != before:
            self.generation += 1

    def register(self, handle: int, problem: ConvolutionProblem) -> None:
        """Register a kernel before its first run, because WD must know all kernels."""
        problem = self._as_asked(problem)
        if self._registry is not None and self._limit(problem) is None:
            self._registry.register(handle, problem)

    def forget(self, handle: int) -> None:
        """Forget the kernels of a handle that was destroyed."""
        if self._registry is not None:
            for name in self._registry.forget(handle):
                self._ledger.end(name)

    def reports(self) -> list[Report]:
        """Return what was decided and computed: a report for each limit."""
        divided, now = ([], {}) if self._registry is None else (self._registry.decisions, self._registry.decided)
        return self._ledger.reports(self._backend, self._settings.policy.value, divided, now)

    def stop(self) -> None:
        """End all background work."""
        self._backend.stop()

    def plan(self, request: PlanRequest) -> NativePlan:
        """Return a plan, from an earlier decision if there is one.

        Raises:
            UcudnnError: if no algorithm is left, or a limit is too small.
        """
        problem = self._as_asked(request.problem)
        request = replace(request, problem=problem)
        self._planned.add(as_registered(problem))
        self._backend.set_stream(None)
        if request.failed and problem.deterministic:
            raise BackendError(
                f"{problem}: {request.failed} failed, and no other algorithm takes its place, because results must"
                " repeat"
            )
        if request.failed:
            self._fail(request, request.failed, f"cuDNN failed to run {request.failed}")
        for _ in range(MOST_FAILURES):
            key, configuration, limit, segment = self._choose(request)
            try:
                steps, keeps = native_steps(self._backend.library, request, configuration, limit)
            except StepError as error:
                if problem.deterministic and not is_lasting(error):
                    raise
                self._fail(request, error.algorithm, str(error))
                continue
            need = max((step.workspace_bytes for step in steps), default=0)
            return NativePlan(
                steps=steps,
                keeps=keeps,
                workspace_bytes=need,
                segment=segment,
                text=f"{problem}: {configuration}, workspace {bytes_up(need)}",
                calls=self._ledger.calls(key),
            )
        raise given_up(problem)

    def _as_asked(self, problem: ConvolutionProblem) -> ConvolutionProblem:
        """Return the problem, without TF32 if the candidates are those of `legacy-fma`."""
        return replace(problem, math=MathMode.FMA) if self._fma else problem

    def _limit(self, problem: ConvolutionProblem) -> int | None:
        """Return the limit of a problem, or None if it takes part in a division."""
        stated = self._limits.get(as_registered(problem))
        if stated == 0:
            return 0
        if self._registry is not None:
            return None
        return self._settings.workspace_limit_bytes if self._fixed or stated is None else stated

    def _choose(self, request: PlanRequest) -> tuple[Hashable, Configuration, int, Segment | None]:
        """Return the key of a kernel in the ledger, its configuration, workspace limit, and segment under WD."""
        problem = request.problem
        key, decision, limit = self._decision(request)
        configuration = decision.configuration
        if problem.deterministic and configuration.workspace_bytes > request.most_bytes:
            raise BackendError(
                f"{problem}: no room for a workspace of {bytes_up(configuration.workspace_bytes)}, and a plan that"
                " repeats its results does not depend on what memory is free"
            )
        limit = min(limit, request.most_bytes)
        all_unfit = self._unfit.get((problem, request.scaling), set())
        unfit = all_unfit & {part.algorithm for part in configuration.parts}
        need = configuration.workspace_bytes
        if request.start or need > limit or unfit:
            # Only the samples from the first missing one on are computed by it.
            rest = self._replanner.rest(problem, request.start, limit, all_unfit)
            if rest is None:
                raise BackendError(f"{problem}: no algorithm is left that computes it within {bytes_down(limit)}")
            configuration = rest
        if not request.start and need > limit:
            self._ledger.replaced(key, configuration, f"there was no room for a workspace of {bytes_up(need)}")
        elif not request.start and unfit:
            alpha, beta = request.scaling
            reason = f"{' and '.join(sorted(unfit))} failed"
            self._ledger.replaced(key, configuration, reason, f"alpha {alpha} and beta {beta}")
        return key, configuration, limit, decision.segment

    def _decision(self, request: PlanRequest) -> tuple[Hashable, Decision, int]:
        """Return the key of a kernel, its decision, and its workspace limit."""
        problem, limit = request.problem, self._limit(request.problem)
        if limit is None and self._registry is not None:
            before = self._registry.divisions
            decision = self._registry.decision(request.handle, problem, self._benchmark, self._settings)
            if self._registry.divisions != before:
                self.generation += 1
            assert decision.segment is not None
            self._ledger.decide(decision.kernel.layer, decision)
            return decision.kernel.layer, decision, decision.segment.size_bytes
        assert limit is not None
        key = problem, limit
        if key not in self._decided:
            settings = replace(self._settings, total_workspace_bytes=None, workspace_limit_bytes=limit)
            made = decide([Kernel(layer="", problem=problem)], self._benchmark, settings, loaded=self._loaded)
            (self._decided[key],) = made.kernels
            self._ledger.decide(key, self._decided[key], limit, made)
        return key, self._decided[key], limit

    def _fail(self, request: PlanRequest, algorithm: str, reason: str) -> None:
        """Exclude an algorithm from now on; only for this alpha and beta if it was not measured with them."""
        problem = request.problem
        if not is_measured(problem, request.scaling):
            self._unfit.setdefault((problem, request.scaling), set()).add(algorithm)
            return
        self._replanner.discard(problem, algorithm)
        for key in [key for key in self._decided if key[0] == problem]:
            if algorithm in {part.algorithm for part in self._decided[key].configuration.parts}:
                self._ledger.fail(key, reason)
            del self._decided[key]
        if self._registry is not None and self._limit(problem) is None:
            name = self._registry.decide_again(request.handle, problem, self._replanner)
            self._ledger.fail(name, reason)
