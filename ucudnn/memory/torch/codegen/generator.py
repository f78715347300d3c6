"""Generates the code of a plan: two straight-line Python functions, forward and backward.

Each line calls one operator, frees tensors, or begins or awaits a copy. A storage is freed by deleting all Python names
of tensors that lie in it, so the code keeps no other reference. Tensors that lie elsewhere in a storage that is there
are made by `as_strided` when they are first needed, and kept with it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from torch import Tensor

from ucudnn.errors import MemoryPlanError
from ucudnn.memory.plans.actions import COMPUTES, Action, ActionKind
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.step.graph import Phase
from ucudnn.memory.torch.codegen.emitter import Emitter
from ucudnn.memory.torch.subject.step_program import StepProgram

_SETTLES = (ActionKind.FREE, ActionKind.WAIT, ActionKind.SYNCHRONIZE)
_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedCode:
    """The code of a plan.

    Attributes:
        forward: is called with transfers, the persistent tensors and the inputs; returns the outputs and a list of what
            backward needs.
        backward: is called with transfers, the persistent tensors, that list, which it empties, and `grad_outputs`;
            returns the gradients of the one part. With more parts it is a generator, which yields the gradients of each
            part but the last, whose gradients it returns.
        parts: for each part of backward the sources whose gradients it ends with.
        reads: for each part the storages that its operations read.
    """

    forward: Callable[..., tuple[tuple[Tensor, ...], list[Any]]]
    backward: Callable[..., Any]
    parts: tuple[tuple[int, ...], ...]
    reads: tuple[frozenset[int], ...]
    text: str
    filename: str


def generate(
    program: StepProgram,
    plan: MemoryPlan,
    delayed: Mapping[int, int],
    *,
    checked: bool = False,
    debug: bool = False,
    marked: bool = False,
) -> GeneratedCode:
    """Return the code of a plan of a program.

    Args:
        program: the step.
        plan: the plan.
        delayed: for each free that waits, the action before which the bytes go (`Simulation.delayed`).
        checked: whether the code compares what operators return with the trace.
        debug: whether storages are poisoned before they are freed, and must be gone after it.
        marked: whether the code marks the begin and the end of each operation for PyTorch's profiler.
    """
    turn, end = _phases(plan)
    parts = _parts(program, plan, turn, end)
    ends = {part.end: part for part in parts[:-1]}
    beside = plan.graph.collectives if plan.overlapped else frozenset[int]()
    emitter = Emitter(program, checked=checked, debug=debug, beside=beside)
    late: dict[int, list[int]] = {}
    for freed_at, released_at in delayed.items():
        late.setdefault(released_at, []).append(freed_at)
    emitter.begin()
    for index, action in enumerate(plan.actions[:end]):
        if index == turn:
            emitter.begin_backward()
        for freed_at in late.get(index, ()):
            emitter.release(freed_at)
        for move in plan.moves.get(index, ()):
            emitter.move(move)
        marks = marked and action.kind in COMPUTES
        if marks:
            emitter.mark(str(index))
        _emit(emitter, index, action, held=index in delayed)
        emitter.drop_pads()
        if marks:
            emitter.mark("")
        if index in ends:
            emitter.hand_over(ends[index].sources)
    code = emitter.end(parts[-1].sources)
    text, namespace = code.text(), code.namespace
    begins = [turn, *(part.end + 1 for part in parts[:-1])]
    filename = f"<plan {plan.policy} of {plan.graph.name}>"
    exec(compile(text, filename, "exec"), namespace)
    return GeneratedCode(
        forward=namespace["forward"],
        backward=namespace["backward"],
        parts=tuple(part.sources for part in parts),
        reads=tuple(_reads(program, plan, begin, part.end) for begin, part in zip(begins, parts, strict=True)),
        text=text,
        filename=filename,
    )


def _emit(emitter: Emitter, index: int, action: Action, *, held: bool) -> None:
    kind, target = action
    if kind is ActionKind.FREE:
        emitter.free(target, index if held else None)
    elif kind in COMPUTES:
        emitter.run(target, again=kind is ActionKind.RECOMPUTE)
    elif kind is ActionKind.OFFLOAD:
        emitter.offload(target)
    elif kind is ActionKind.PREFETCH:
        emitter.prefetch(target)
    else:
        emitter.wait(target if kind is ActionKind.WAIT else None)


class _Part(NamedTuple):
    """A part of backward: its last action, and the sources whose gradients it ends with."""

    end: int
    sources: tuple[int, ...]


def _parts(program: StepProgram, plan: MemoryPlan, turn: int, end: int) -> list[_Part]:
    """Return the parts of backward, between two actions; groups that end with the same action are one part.

    A group ends when no later action accesses the storage of a gradient of it, as an operator or to copy or move it.
    Nor does one access a parameter of it, which may be updated as soon as its gradient is handed over.
    """
    last: dict[int, int] = {}
    for index, (kind, target) in enumerate(plan.actions[:end]):
        operation = plan.graph.operations[target] if kind in COMPUTES else None
        accessed = [target] if operation is None else [*operation.reads, *operation.writes]
        moved = [storage for move in plan.moves.get(index, ()) for storage in move.storages]
        last.update(dict.fromkeys((*accessed, *moved), index))
    groups: dict[int, tuple[int, ...]] = {}
    first = at = min(turn, end - 1)
    for sources in program.groups[:-1]:
        held = [each.storage for each in map(program.gradients.__getitem__, sources) if each is not None]
        held += [
            program.persistent[index][1].storage for own, index in map(program.sources.__getitem__, sources) if own
        ]
        at = max([at, *(last.get(storage, first) for storage in held)])
        groups[at] = (*groups.get(at, ()), *sources)
    rest = program.groups[-1] if program.groups else tuple(range(len(program.sources)))
    if end - 1 in groups:
        rest = (*groups.pop(end - 1), *rest)
    return [*(_Part(index, sources) for index, sources in groups.items()), _Part(end - 1, rest)]


def _reads(program: StepProgram, plan: MemoryPlan, begin: int, end: int) -> frozenset[int]:
    """Return the storages that operations of the actions from one to another read.

    Autograd of the plain loop keeps what backward reads. What the plan computes again reads more. What stands for the
    caller's part of the step reads nothing: he may have changed the outputs, and gives their gradients.
    """
    graph, found = plan.graph, set[int]()
    for kind, target in plan.actions[begin : end + 1]:
        if kind is ActionKind.RUN and target not in program.outside:
            found.update(graph.operations[target].reads)
        elif kind is ActionKind.RECOMPUTE:
            found.update(storage for storage, _ in graph.recompute_reads[target])
    return frozenset(found)


def _phases(plan: MemoryPlan) -> tuple[int, int]:
    """Return the action at which backward begins, and the one behind the last that belongs to backward.

    What follows the last operation of forward and frees or waits belongs to forward. It raises a MemoryPlanError if the
    parts of the step do not follow each other.
    """
    last = [-1, -1, -1]
    reached = 0
    for index, (kind, target) in enumerate(plan.actions):
        if kind is not ActionKind.RUN:
            continue
        part = _PHASES.index(plan.graph.operations[target].phase)
        if part < reached:
            raise MemoryPlanError(
                f"action {index}: {plan.graph.operation_name(target)} runs after an operation of a later part of the"
                " step, and the caller stands between the parts",
                action=index,
                operation=target,
            )
        reached, last[part] = part, index
    return _behind(plan.actions, last[0]), _behind(plan.actions, max(last[:2]))


def _behind(actions: Sequence[Action], index: int) -> int:
    later = range(index + 1, len(actions))
    return next((each for each in later if actions[each].kind not in _SETTLES), len(actions))
