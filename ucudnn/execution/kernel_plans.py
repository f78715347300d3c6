"""The kernels of one handle: which are registered, and which configuration each got."""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple, final

from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import requests_of
from ucudnn.bounded import BoundedDict
from ucudnn.configuration import Configuration
from ucudnn.errors import InfeasibleError
from ucudnn.execution.dispatcher import Dispatcher
from ucudnn.execution.entry import Entry
from ucudnn.execution.launcher import Launcher
from ucudnn.execution.layer_identity import LayerIdentities, checked_name, is_made_up
from ucudnn.execution.plan import Plan
from ucudnn.kernel import Kernel, KernelKey
from ucudnn.planning.choices import Origin
from ucudnn.planning.concurrency import Groups
from ucudnn.planning.decision import Decision, Decisions, decide
from ucudnn.planning.plan_file import NO_PLANS, LoadedPlans, SavedPlan
from ucudnn.planning.replanning import requests_behind
from ucudnn.problem import ConvolutionProblem
from ucudnn.settings import Settings
from ucudnn.units import bytes_down
from ucudnn.workspace.spare import own_bytes, tail_step

_MOST_KERNELS = 1 << 14  # of a program whose shapes change for ever; what is forgotten is planned again if it recurs

_LOG = logging.getLogger("ucudnn.handle")  # users know plans as news of their handle


class Replaced(NamedTuple):
    """What a kernel had before it took another configuration for a while.

    The plan is kept because cuDNN compiles an engine again once no plan of it is left.
    """

    decision: Decision | None
    plan: Plan | None


@final
class KernelPlans:
    """Plans the kernels of one handle, one by one under WR, all together under WD.

    Where the backend only plans, there is no dispatcher.

    Attributes:
        entries: the kernels by key.
        layers: under WD, the names of layers that have none.
        decisions: the decisions that hold, in the order in which they were made.
        epoch: how often plans were adopted, taken for a while, put back or loaded.
        seconds: wall-clock time of all decisions, in which calls waited for plans.
    """

    def __init__(self, benchmark: Benchmark, settings: Settings, groups: Groups, dispatcher: Dispatcher | None) -> None:
        self._benchmark = benchmark
        self._settings = settings
        self._groups = groups
        self._divides = settings.total_workspace_bytes is not None
        self._dispatcher = dispatcher
        self._loaded = NO_PLANS
        self.entries: dict[tuple[str, ConvolutionProblem, int, bool], Entry]
        self.entries = {} if self._divides else BoundedDict(_MOST_KERNELS)  # a division has a segment for each kernel
        self.layers = LayerIdentities()
        self.decisions: list[Decisions] = []
        self.epoch = 0
        self.seconds = 0.0

    def register(self, key: KernelKey) -> Entry:
        """Return the entry of a kernel, which is new if the kernel was not registered."""
        return self.entries.setdefault(key, Entry(key.kernel()))

    def plan(self, key: KernelKey) -> Entry:
        """Register a kernel and choose its configuration.

        Raises:
            InfeasibleError: if a workspace limit is too small.
            MeasurementError: if no algorithm could be measured.
        """
        known = key in self.entries
        entry = self.register(key)
        try:
            self._decide([entry])  # under WR, another kernel that cannot be planned does not concern this one
        except BaseException:
            if not known:
                del self.entries[key]  # a kernel that cannot be planned must not stop the others
            raise
        return entry

    def plan_call(self, key: KernelKey, filters: Hashable) -> Entry:
        """Plan a kernel at its first call. Unnamed layers that no segment is left for share that of another."""
        try:
            return self.plan(key)
        except InfeasibleError:
            shared = self.layers.share(key.problem, filters) if is_made_up(key.layer) else None
            if shared is None:
                raise
            return self.plan(KernelKey(shared, key.problem))

    def spare_workspace_bytes(self, spare_bytes: int) -> int:
        """Return how many bytes of spare memory serve as workspace: 0 up to the limit, else one of a few sizes.

        Each size has a plan of its own, so they are rounded down to three or four binary digits.
        """
        step = 1 << max(0, spare_bytes.bit_length() - 4)
        rounded = spare_bytes // step * step
        return 0 if self._divides or rounded <= self._settings.workspace_limit_bytes else rounded

    def launcher(
        self,
        problem: ConvolutionProblem,
        layer: str = "",
        spare_bytes: int = 0,
        *,
        fresh: bool = False,
        plan: bool = False,
    ) -> Launcher | None:
        """Return the short way to compute a planned problem with alpha = 1 and beta = 0; it raises what `plan` does.

        Args:
            problem: the problem to compute.
            layer: name of the layer.
            spare_bytes: bytes of spare memory that each call brings, as `spare_workspace_bytes` returns them.
            fresh: whether outputs hold nothing that is wanted.
            plan: whether to plan the problem now if it is not planned yet.

        Returns:
            The launcher. None if the problem is not planned, or under WD, where each call must find its layer.
        """
        if self._dispatcher is None or self._divides:
            return None
        key = KernelKey(checked_name(layer), problem, spare_bytes, fresh and tail_step(problem) > 0)
        with self._dispatcher.backend.lock:
            entry = self.entries.get(key)
            if plan and (entry is None or entry.decision is None):
                entry = self.plan(key)
        return None if entry is None or entry.decision is None else Launcher(entry, self._dispatcher)

    @property
    def measures_each(self) -> bool:
        """Whether a kernel is measured before its first run, by this process alone and apart from other kernels."""
        return self._benchmark.measures and not self._benchmark.collective and not self._divides

    def planned(self, key: KernelKey) -> Entry:
        """Return a kernel with a decision, which is planned now if it has none; raises what `plan` raises."""
        entry = self.entries.get(key)
        return self.plan(key) if entry is None or entry.decision is None else entry

    def plan_without(self, key: KernelKey, unwanted: Callable[[str], bool]) -> Entry | None:
        """Register a kernel and choose its configuration, without algorithms whose names are unwanted.

        These count as discarded from then on. Returns None if no others are listed; raises what `plan` raises.
        """
        kernel = key.kernel()
        within, *_ = requests_of(kernel, self._settings, self._settings.workspace_limit_bytes)
        names = self._benchmark.backend.names(kernel.problem, [kernel.problem.batch, *within.sizes])
        if all(map(unwanted, names)):
            return None
        for name in filter(unwanted, names):
            self._benchmark.discard(kernel.problem, name)
        return self.plan(key)

    def forget(self, key: KernelKey) -> None:
        """Forget a kernel, which was not launched."""
        self.entries.pop(key, None)

    def plan_all(self) -> None:
        """Choose a configuration for every registered kernel that has none."""
        missing = [entry for entry in self.entries.values() if entry.decision is None]
        if missing:
            self._decide(missing)

    def measure_again(self, entries: Sequence[Entry]) -> bool:
        """Measure kernels again, in place of what is known of them, and choose their configurations again.

        Returns:
            Whether that was done. It is not where ranks measure together, because they must all ask for it.
        """
        if self._benchmark.collective:
            return False
        decisions = [each.decision for each in entries if each.decision is not None]
        asked = [request for each in decisions for request in requests_behind(each, self._benchmark, self._settings)]
        self._benchmark.remeasure(asked)
        self._decide(list(entries))
        return True

    def decided(self) -> Sequence[Decisions]:
        """Return the decisions, or that about no kernel if there are none."""
        return self.decisions or [decide([], self._benchmark, self._settings)]

    def saved(self) -> list[SavedPlan]:
        """Return the plans of all kernels that have one."""
        return [
            SavedPlan(kernel=each.kernel, configuration=each.decision.configuration, timed=each.decision.timed)
            for each in self.entries.values()
            if each.decision is not None
        ]

    def load(self, plans: LoadedPlans) -> None:
        """Take plans from a file from now on, also for kernels that have other ones by now.

        Raises:
            PlanFileError: if one of these does not fit; then nothing changes.
        """
        before, self._loaded = self._loaded, plans
        known = [entry for entry in self.entries.values() if entry.decision is not None and plans.find(entry.kernel)]
        try:
            if known:
                self._decide(known)
        except BaseException:
            self._loaded = before
            raise
        for key, entry in list(self.entries.items()):
            if entry.kernel.problem.biased and not self._divides and self._decides_without_bias(entry.kernel):
                entry.drop_plan()
                del self.entries[key]
        self.epoch += 1

    def origins(self, problem: ConvolutionProblem) -> set[Origin]:
        """Return where the plans of a problem come from so far."""
        return {each.decision.origin for each in self._planned(problem) if each.decision is not None}

    def with_bias(self, key: KernelKey) -> Configuration | None:
        """Return the configuration of a kernel with a bias, if one was adopted, planned or loaded; None if none was.

        A file that has only a plan of the kernel without the bias takes the place of both.
        """
        entry = self.entries.get(key)
        if entry is not None and entry.decision is not None:
            return entry.decision.configuration
        saved = self._loaded.find(key.kernel())
        return None if saved is None else saved.configuration

    def _decides_without_bias(self, kernel: Kernel) -> bool:
        plain = replace(kernel, problem=kernel.problem.without_bias())
        return self._loaded.find(kernel) is None and self._loaded.find(plain) is not None

    def adopt(self, problem: ConvolutionProblem, configuration: Configuration) -> None:
        """Take a configuration that was timed in the program for all kernels of a problem that have a plan.

        A configuration with a bias is also taken for kernels that have a plan without it, which they keep beside it.
        """
        self.take(problem, configuration)
        self._benchmark.rule.learn(problem, self._settings.workspace_limit_bytes, configuration)

    def take(self, problem: ConvolutionProblem, configuration: Configuration) -> Mapping[KernelKey, Replaced]:
        """Take a configuration for a while, and return what kernels had before, for `put_back`; see `adopt`.

        Kernels that are new meanwhile do not learn from it.

        Raises:
            InfeasibleError: if it needs more workspace than the limit; then nothing changes.
        """
        limit_bytes = self._settings.workspace_limit_bytes
        planned = [*self._planned(problem.without_bias()), *(self._planned(problem) if problem.biased else ())]
        taken: list[tuple[Entry, Decision]] = []
        for entry in planned:
            assert entry.decision is not None
            kernel = replace(entry.kernel, problem=problem)
            within = max(limit_bytes, kernel.spare_bytes)
            decision = replace(
                entry.decision,
                kernel=replace(entry.decision.kernel, problem=problem),
                configuration=configuration,
                origin=Origin.PROGRAM,
                timed=True,
            )
            if own_bytes(problem, configuration, fresh=kernel.fresh) > within:
                raise InfeasibleError(
                    f"{kernel}: {configuration} needs more than {bytes_down(within)}",
                    kernel=str(kernel),
                    limit_bytes=within,
                    required_bytes=decision.workspace_bytes,
                )
            taken.append((entry, decision))
        before: dict[KernelKey, Replaced] = {}
        for entry, decision in taken:
            own = self.register(replace(entry.kernel, problem=problem).key())
            for each in (entry, own):
                before.setdefault(each.kernel.key(), Replaced(each.decision, each.plan))
            entry.drop_plan()  # calls that are bound to a plan without the bias are to look for the other one
            own.decide(decision)
        self.epoch += 1
        return before

    def put_back(self, before: Mapping[KernelKey, Replaced]) -> None:
        """Take the decisions that `take` has replaced; a kernel that had none has no plan then."""
        for key, replaced in before.items():
            entry = self.entries.get(key)
            if entry is not None and replaced.decision is not None:
                entry.decide(replaced.decision, replaced.plan)
            elif entry is not None:
                entry.drop_plan()
                del self.entries[key]
        self.epoch += 1

    def _planned(self, problem: ConvolutionProblem) -> list[Entry]:
        return [each for each in self.entries.values() if each.decision is not None and each.kernel.problem == problem]

    def _decide(self, missing: list[Entry]) -> None:
        begin = perf_counter()
        try:
            if self._divides:
                missing = list(self.entries.values())  # a late kernel takes part in a new division
            kernels = [entry.kernel for entry in missing]
            decisions = decide(kernels, self._benchmark, self._settings, self._groups, self._loaded)
            if self._divides:  # only the latest division counts, but the time of all of them does
                decisions = decisions.after(self.decisions)
                self.decisions.clear()
            self.decisions.append(decisions)
            if len(self.decisions) > _MOST_KERNELS:
                self.decisions[:2] = [self.decisions[1].after(self.decisions[:1])]
            for entry, decision in zip(missing, decisions.kernels, strict=True):
                entry.decide(decision)
            if self._divides and self._dispatcher is not None:
                self._dispatcher.divide(self.entries.values())
            one = decisions.kernels[0]
            what = f"{one.kernel}: {one.configuration}" if len(missing) == 1 else f"{len(missing)} kernels"
            _LOG.info("planned %s, in %.2f s", what, decisions.benchmark_seconds)
        finally:
            self.seconds += perf_counter() - begin
