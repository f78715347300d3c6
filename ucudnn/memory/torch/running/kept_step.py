"""KeptStep: costs and plans of a step that an earlier process found, which count where they are right in this one.

Of costs only times are believed, for the same code, device, versions and settings. On a GPU operations run here, too,
and take the same scratch or are measured anew. What a process has beside its tensors differs a little from process to
process. So a plan is kept by the budget as it was stated. By this process's costs it must keep what is left of the
budget here, have room, and be about as fast as where it was made.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any, final

import torch

import ucudnn.memory
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.benchmarking.storage.step_files import StepFiles
from ucudnn.memory.allocator.headroom import AllocatorRoom
from ucudnn.memory.planner.least import least_plan
from ucudnn.memory.planner.planner import make_plan, returns_ms
from ucudnn.memory.planner.search import PlanSearch
from ucudnn.memory.plans.actions import COMPUTES, Action, ActionKind
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.catalog import MemoryPolicy
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.file import decode_measured, encode_measured
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.torch.measuring.operation_costs import alike_operations
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.profiles.json_values import entries, number, text, whole
from ucudnn.settings import kernel_variables
from ucudnn.torch.device.gpu import TorchGpu

PlanLimits = tuple[int | None, AllocatorRoom | None, int | None]
"""Most bytes that are alive, what the allocator may take, and most bytes of the host."""

_CHOOSING = *("blas", "cpu_", "cublas", "cudnn", "deterministic"), *("float32", "linalg", "mkldnn", "nnpack", "onednn")
"""How functions of PyTorch's begin that return what chooses kernels, behind `_get_`."""
_PRECISIONS = "cudnn.conv", "cudnn.rnn", "cuda.matmul", "mkldnn.conv", "mkldnn.matmul", "mkldnn.rnn"
_OF_OPERATION = attrgetter("kind", "phase", "reads", "writes", "module", "repeatable", "problem", "problem_batch")
_KINDS = [*ActionKind]
_LOADED = 128 * 2**20  # bytes of kernels that are loaded where operations are timed, but not where times are known
_SLOWER = 1.005  # times the slowdown by a plan where it was made


@cache
def _code() -> str:
    """Return a digest of the code that measures and plans, so that nobody has to count its versions."""
    paths = sorted(Path(*ucudnn.memory.__path__).rglob("*.py"))
    return sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def _conditions(device: torch.device) -> str:
    """Return what times depend on beside operations and their operands: code, device, versions and settings."""
    found = {"code": _code(), "torch": torch.__version__, "threads": str(torch.get_num_threads()), **kernel_variables()}
    for name in (name for name in dir(torch._C) if name.startswith(tuple(f"_get_{each}" for each in _CHOOSING))):
        with suppress(TypeError, RuntimeError):  # it takes arguments, or there is none on this machine
            found[name] = str(getattr(torch._C, name)())
    for name in _PRECISIONS:
        with suppress(AttributeError, RuntimeError):
            found[name] = str(attrgetter(f"{name}.fp32_precision")(torch.backends))
    if device.type != "cuda":
        return str({**found, **CpuBackend().machine()})
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    return str({**found, **TorchGpu(ordinal).machine(), "cudnn": str(torch.backends.cudnn.version())})


def kept_costs(files: StepFiles, program: StepProgram, measure: Callable[[Costs | None], Costs]) -> Costs:
    """Return the costs of a step as a function measures it, given what an earlier process has measured."""

    def read(value: Any) -> Costs:
        costs = decode_measured(value)
        costs.check(len(program.graph.operations))
        return costs

    name = f"costs {_conditions(program.device)} {alike_operations(program)}"
    costs, is_known = files.found(name, read, partial(measure, None), encode_measured)
    return measure(costs) if is_known else costs


def _near(budget: int) -> float:
    """Return for how many bytes at least a plan was made that counts within a budget; kernels take some of it."""
    return budget - max(0.02 * budget, min(_LOADED, 0.05 * budget))


@final
class KeptPlans:
    """Makes plans of a step, unless an earlier process did.

    Files keep no plans of a policy that is no name, nor of configurations, which each process measures. Plans depend on
    what is asked, too, such as the budget as it was stated.
    """

    def __init__(
        self, files: StepFiles, program: StepProgram, costs: Costs, policy: str | MemoryPolicy, asked: Sequence[object]
    ) -> None:
        self._files = files if isinstance(policy, str) and not costs.configurations else StepFiles()
        self._graph, self._costs, self._policy, self._earlier = program.graph, costs, policy, list[MemoryPlan]()
        self._step = f"{policy} {asked} {_conditions(program.device)} {_digest(program.graph)}"

    def is_earlier(self, plan: MemoryPlan) -> bool:
        """Return whether an earlier process made a plan."""
        return any(each is plan for each in self._earlier)

    def least(self) -> MemoryPlan | None:
        """Return the policy's plan for the least budget that it keeps; None where there is none."""
        make = partial(least_plan, self._graph, self._costs, self._policy)
        found: tuple[MemoryPlan | None, bool] = self._files.found(
            f"least {self._step}", self._decoded, make, lambda plan: plan and _encoded(plan)
        )
        return found[0]

    def plan(self, limits: PlanLimits, search: Callable[[], PlanSearch], less: int) -> MemoryPlan:
        """Return a plan, as `make_plan` does. `less` is how much less than at first the limits are."""
        budget, room, host_bytes = limits

        def read(value: Any) -> MemoryPlan | None:
            plan, made_within = self._decoded(value, budget), whole(value["bytes"], "budget")
            done, before = simulate(plan, self._costs), number(value["slowdown"], "slowdown")
            over = budget is not None and (done.peak_bytes > budget or made_within < _near(budget))
            if over or (host_bytes is not None and done.pinned_bytes > host_bytes):
                return None
            if self._slowdown(plan, room) > _SLOWER * before:  # it is infinite where there is no room
                return None
            layout = room.compaction(plan, self._costs) if room else None
            return replace(plan, moves=layout.moves) if layout else plan

        def encode(plan: MemoryPlan) -> Any:
            slowdown = self._slowdown(plan, room)
            kept = plan.graph is self._graph and slowdown < inf
            return {**_encoded(plan), "bytes": budget or 0, "slowdown": slowdown} if kept else None

        of_room = room and (room.state_exists, room.keeps_state, room.in_one_block, sorted(room.fixed))
        name = f"plan {less} {of_room} {self._step}"
        of_step = self._graph, self._costs, budget, self._policy, room, host_bytes
        plan, is_earlier = self._files.found(name, read, lambda: make_plan(*of_step, search()), encode)
        self._earlier += [plan] if is_earlier else []
        return plan

    def _slowdown(self, plan: MemoryPlan, room: AllocatorRoom | None) -> float:
        """Return how many times as long as its operations a step takes, with what moves or goes back to the driver."""
        step_ms = simulate(plan, self._costs).step_ms
        if room is not None:
            layout = room.compaction(plan, self._costs)
            step_ms += returns_ms(room.returns(plan, self._costs)) if layout is None else room.moves_ms(layout)
        return step_ms / (sum(self._costs.time_ms) or 1.0)

    def _decoded(self, value: Any, budget: int | None = None) -> MemoryPlan:
        operations, storages = (len(each) - 1 for each in (self._graph.operations, self._graph.storages))
        actions = []
        for digit, target in zip(text(value["kinds"], "kinds"), entries(value["targets"], "targets"), strict=True):
            kind = _KINDS[int(digit)]
            least = -1 if kind is ActionKind.SYNCHRONIZE else 0
            actions.append(Action(kind, whole(target, "target", least, operations if kind in COMPUTES else storages)))
        buffers = (entries(row, "buffer") for row in entries(value["buffers"], "buffers"))
        return MemoryPlan(
            policy=text(value["policy"], "policy"),
            graph=self._graph,
            actions=tuple(actions),
            budget=budget,
            buffers=tuple(tuple(whole(each, "storage", 0, storages) for each in row) for row in buffers),
            scratch_buffer=value["scratch_buffer"] is True,
            overlapped=value["overlapped"] is True,
        )


def _encoded(plan: MemoryPlan) -> dict[str, Any]:
    kinds = "".join(str(_KINDS.index(kind)) for kind, _ in plan.actions)
    found = {"policy": plan.policy, "kinds": kinds, "targets": [target for _, target in plan.actions]}
    return {**found, "buffers": plan.buffers, "scratch_buffer": plan.scratch_buffer, "overlapped": plan.overlapped}


def _digest(graph: StepGraph) -> str:
    """Return a digest of what plans depend on: not of names, and not of lines of code, which change with comments."""
    rows: list[object] = [graph.batch, graph.gradients_kept, graph.sizes, [each.role for each in graph.storages]]
    return sha256(repr([*rows, *map(_OF_OPERATION, graph.operations)]).encode()).hexdigest()
