"""From a trace to a step graph: each operator that launches something becomes an operation of the step.

* Operators that only make views become nothing.
* Where autograd adds two gradients of a tensor, PyTorch writes into the first one if nobody else has it. A tracer keeps
  PyTorch from that, so it is undone here: such an addition becomes one in place.
* In a step that is to run, other operators of backward write over operands, too, where that gives the same bits.
* A convolution's backward becomes two operations, because they are two kernels with workspaces of their own.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from ucudnn.memory.step.graph import Affine, Phase, Role, StepGraph, StepOperation, Storage
from ucudnn.memory.torch.subject.traced_values import (
    Trace,
    TracedCall,
    TracedTensor,
    is_written,
    tensors_in,
    unused_name,
)
from ucudnn.memory.torch.tracing.in_place import written_in_place
from ucudnn.problem import ConvolutionProblem, MathMode
from ucudnn.torch.calls.problem import convolution_of, memory_format_of

aten = torch.ops.aten

_CONVOLUTION_BACKWARD = aten.convolution_backward.default
_CONVOLUTIONS = ("convolution", "_convolution", "convolution_overrideable")
_OVERWRITING = frozenset({
    "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_", "random_",
    "uniform_", "zero_", "_foreach_copy_", "_foreach_zero_",
})  # fmt: skip
_STATISTICS = ("running_mean", "running_var")  # batch norm writes them, though its schema does not say so
_PICKING = frozenset({"embedding", "index_select", "index", "gather", "nll_loss_forward", "nll_loss2d_forward"})
_TO_INPUT, _TO_WEIGHT = [True, False, False], [False, True, True]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TracedSubject:
    """What a trace is of.

    Attributes:
        device: type of the device whose memory counts; tensors elsewhere are left out.
        roles: role and name of storages that are no activations, by their index in the trace.
        gradients_kept: whether gradients exist before the step.
        runs: whether the step is to run by plans. Then storages without bytes count, too, because plans keep the order
            of operations that make and read them, and operators of backward write over operands where they may.
        in_pieces: whether more of them do so, piece by piece, which takes longer.
    """

    name: str
    batch: int
    device: str
    roles: Mapping[int, tuple[Role, str]]
    math: MathMode = MathMode.TF32
    gradients_kept: bool = False
    runs: bool = False
    in_pieces: bool = False
    conditions: Mapping[str, str]


@final
@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step graph with the operator calls behind it.

    Attributes:
        calls: the call of each operation; its tensors have the graph's storages, or -1 where the graph has none.
        dispatched: all operators of the step in order, also those that only make views; `calls` have indices into it.
        executed: the calls of the operations, and those of operators that are no operation because all that they write
            is on another device or, in a record, empty, in order, each with whether it is an operation; with the
            trace's storages, of which those that became one are renamed.
        rows: the graph's index of the trace's storages, where it has them.
        merged: storages of the trace that became another one, because autograd adds in place.
    """

    graph: StepGraph
    calls: tuple[TracedCall, ...]
    dispatched: tuple[Any, ...]
    executed: tuple[tuple[bool, TracedCall], ...]
    rows: Mapping[int, int]
    merged: Mapping[int, int]


def assemble(trace: Trace, subject: TracedSubject) -> TracedStep:
    """Return the step graph of a trace; raise a StepGraphError if the trace makes no step."""
    calls, merged = _accumulated_in_place(trace)
    roles = {merged.get(storage, storage): given for storage, given in subject.roles.items()}
    if subject.runs:
        after = {merged.get(storage, storage) for storage, each in enumerate(trace.storages) if each.died is None}
        in_pieces, own = subject.in_pieces, roles.keys() | after
        calls, others = written_in_place(trace, calls, own, subject.device, in_pieces=in_pieces)
        merged = {storage: others.get(other, other) for storage, other in merged.items()} | others
    counted = {
        row: each.size
        for row, each in enumerate(trace.storages)
        if each.device == subject.device and (each.size or subject.runs)
    }
    parts = [(part, _access(part, counted)) for call in calls for part in _parts(call)]
    accesses = _with_held(trace, [each for each in parts if each[1].writes], merged, Phase.OPTIMIZER)
    if not (subject.runs or subject.in_pieces):
        accesses = _with_held(trace, accesses, merged, Phase.BACKWARD)
    touched = [storage for _, access in accesses for storage in sorted(access.reads | access.writes)]
    named = [storage for storage in roles if storage in counted]
    rows = {storage: row for row, storage in enumerate(dict.fromkeys([*named, *touched]))}
    names, counts = {name for _, name in roles.values()}, Counter[str]()
    made: dict[int, Storage] = {}
    operations = []
    for call, access in accesses:
        operation = _operation(call, access, rows, counts, subject)
        operations.append(operation)
        for storage in sorted(each for each in access.writes if each not in roles and each not in made):
            made[storage] = _storage(trace, storage, Role.ACTIVATION, unused_name(operation.name, names))
    for storage in rows:
        if storage in roles:
            made[storage] = _storage(trace, storage, *roles[storage])
        elif trace.storages[storage].born < 0:  # it was there before, and nothing says what it is
            made[storage] = _storage(trace, storage, Role.BUFFER, unused_name("constant", names))
        elif trace.storages[storage].died is None:
            made[storage] = replace(made[storage], role=Role.OUTPUT)
    graph = StepGraph(
        name=subject.name,
        batch=subject.batch,
        operations=tuple(operations),
        storages=tuple(made[storage] for storage in rows),
        recorded=(subject.batch,),
        gradients_kept=subject.gradients_kept,
        conditions=subject.conditions,
    )
    numbers = {storage: rows.get(storage, -1) for storage in range(len(trace.storages))}
    return TracedStep(
        graph=graph,
        calls=tuple(call.with_storages(numbers) for call, _ in accesses),
        dispatched=tuple(call.func for call in trace.calls),
        executed=tuple(_executed(parts)),
        rows=rows,
        merged=merged,
    )


def _with_held(
    trace: Trace, accesses: Sequence[tuple[TracedCall, "_Access"]], merged: Mapping[int, int], phase: Phase
) -> list[tuple[TracedCall, "_Access"]]:
    """Let operations of a phase read, too, what their code holds until they have ended.

    Loops of an optimizer hold the temporaries of one parameter until those of the next one are made. A node of autograd
    holds its gradients until its last operator has ended, as where an activation was written in place of a view.
    """
    places = [(call.index, place) for place, (call, _) in enumerate(accesses) if call.phase is phase]
    ends = [made.died for made in trace.storages]
    for storage, other in merged.items():  # in the order of time
        ends[other] = ends[storage]
    last = {storage: place for place, (_, access) in enumerate(accesses) for storage in access.reads | access.writes}
    held = defaultdict[int, set[int]](set)
    for storage in {each for _, place in places for each in accesses[place][1].writes}:
        if (died := ends[storage]) is not None and places[0][0] <= trace.storages[storage].born:
            place = places[bisect_left(places, (died, 0)) - 1][1]
            if phase is Phase.OPTIMIZER or accesses[place][0].node == accesses[last[storage]][0].node:
                held[place].add(storage)
    return [
        (call, replace(access, reads=access.reads | (held[place] - access.writes)) if place in held else access)
        for place, (call, access) in enumerate(accesses)
    ]


def _executed(parts: Iterable[tuple[TracedCall, "_Access"]]) -> Iterator[tuple[bool, TracedCall]]:
    for call, access in parts:
        makes = not {each.storage for each in call.outputs} <= {each.storage for each in call.inputs}
        if access.writes or makes or writes(call):
            yield bool(access.writes), call


def writes(call: TracedCall) -> list[TracedTensor]:
    """Return the arguments that a call writes."""
    return [tensor for _, tensor in _written(call)]


def _written(call: TracedCall) -> Iterator[tuple[Any, TracedTensor]]:
    if call.turns:  # code that called it would change what a name stands for, which others may read as it was
        return
    for argument in call.func._schema.arguments:
        if is_written(argument) or (argument.name in _STATISTICS and bool(call.argument("training"))):
            yield from ((argument, each) for each in tensors_in(call.argument(argument.name)))


def _accumulated_in_place(trace: Trace) -> tuple[list[TracedCall], dict[int, int]]:
    """Return the calls with autograd's additions in place, and which storage is another one then.

    Autograd adds to the gradient that came first, which another node made, if nobody else has that
    (`InputBuffer::accumulate` in PyTorch): then its storage ends with the addition. Autograd never adds to a view, nor
    a view to the tensor whose bytes it shows, because a view holds that.
    """
    calls: list[TracedCall] = []
    merged: dict[int, int] = {}
    makers: dict[TracedTensor, int | None] = {}
    for index, call in enumerate(trace.calls):
        current = call.with_storages(merged)
        first = current.args[0] if current.args else None
        if call.func is aten.add.Tensor and call.node is not None and isinstance(first, TracedTensor):
            old, out = call.args[0], call.results
            ends = trace.storages[old.storage].died == index + 1
            alike = (
                old.geometry == out.geometry and trace.storages[old.storage].size == trace.storages[out.storage].size
            )
            own = not any(each.storage == first.storage for each in current.inputs[1:])
            if ends and alike and own and makers.get(old) not in (None, call.node):
                merged[out.storage] = first.storage
                current = replace(call.with_storages(merged), func=aten.add_.Tensor)
        if call.node is not None:
            for output in call.outputs:
                makers[output] = call.node if trace.storages[output.storage].born == index else None
        calls.append(current)
    return calls, merged


def _parts(call: TracedCall) -> list[TracedCall]:
    if call.func is not _CONVOLUTION_BACKWARD:
        return [call]
    *rest, mask = call.args
    found = []
    for kept in (_TO_INPUT, _TO_WEIGHT):
        wanted = [wish and keep for wish, keep in zip(mask, kept, strict=True)]
        if any(wanted):
            results = tuple(each if keep else None for each, keep in zip(call.results, wanted, strict=True))
            flops = call.flops // (bool(mask[0]) + bool(mask[1])) if any(wanted[:2]) else 0  # a bias alone is a sum
            found.append(replace(call, args=(*rest, wanted), results=results, flops=flops))
    return found


@final
@dataclass(frozen=True, slots=True)
class _Access:
    """What a call reads and writes: storages, and the bytes that it moves."""

    reads: frozenset[int]
    writes: frozenset[int]
    traffic: int


def _access(call: TracedCall, counted: Mapping[int, int]) -> _Access:
    """Return what a call accesses of the storages that count, whose sizes are given.

    An operator that only makes views writes nothing.
    """
    written, overwritten = [], set[int]()
    for argument, tensor in _written(call):
        if tensor.storage in counted:
            written.append(tensor)
            whole = call.func._opname in _OVERWRITING or argument.is_out
            if whole and tensor.is_dense and tensor.bytes_touched >= counted[tensor.storage]:
                overwritten.add(tensor.storage)  # it needs nothing from before
    overwritten -= {each.storage for each in Counter(call.inputs) - Counter(written)}
    given = call.inputs
    if call.func is _CONVOLUTION_BACKWARD:  # a part of it does not need all that it is given
        grad, x, weight, *_, mask = call.args
        given = [grad, weight] if mask[0] else [grad, x]
    inputs = [each for each in given if each.storage in counted]
    there = {each.storage for each in inputs}
    fresh = [each for each in call.outputs if each.storage in counted and each.storage not in there]
    reads = [each for each in inputs if each.storage not in overwritten]
    produced = sum({each: each.bytes_touched for each in (*fresh, *written)}.values())
    picked = call.func._opname in _PICKING  # they read as much of their first argument as they write
    consumed = sum({each: each.bytes_touched for each in (reads[1:] if picked else reads)}.values())
    return _Access(
        frozenset(each.storage for each in reads),
        frozenset(each.storage for each in (*fresh, *written)),
        produced * (2 if picked else 1) + consumed,
    )


def _operation(
    call: TracedCall, access: _Access, rows: Mapping[int, int], counts: Counter[str], subject: TracedSubject
) -> StepOperation:
    kind = call.func._opname
    name = kind.strip("_")
    if call.func is _CONVOLUTION_BACKWARD:
        name += "_data" if call.args[-1][0] else "_filter"
    counts[name] += 1
    problem = _problem(call, subject.math)
    first = next(iter(call.outputs or call.inputs), None)
    return StepOperation(
        name=f"{name}_{counts[name] - 1}" if counts[name] > 1 else name,
        kind=f"{call.func.namespace}.{kind}",
        phase=call.phase,
        dtype="" if first is None else str(first.dtype).removeprefix("torch."),
        reads=tuple(sorted(rows[storage] for storage in access.reads)),
        writes=tuple(sorted(rows[storage] for storage in access.writes)),
        flops=Affine(call.flops),
        traffic=Affine(access.traffic),
        problem=problem,
        problem_batch=Affine(problem.batch) if problem else Affine(0, 1),
        module=call.module,
        source=call.source,
        repeatable=not call.draws and not _counts_on(call, subject),
    )


def _counts_on(call: TracedCall, subject: TracedSubject) -> bool:
    """Return whether a call updates bytes that exist before the step, and has other results that may depend on them.

    A recomputation leaves such bytes alone and would compute from the updated ones. Batch normalization's other results
    do not depend on its running statistics while it updates them.
    """
    written = writes(call)
    there = {each.storage for each in written if each.storage in subject.roles}
    updated = {storage for storage in there if subject.roles[storage][0].exists_before}
    others = any(each.storage not in updated for each in (*call.outputs, *written))
    return bool(updated) and others and not any(call.argument(name) is not None for name in _STATISTICS)


def _problem(call: TracedCall, math: MathMode) -> ConvolutionProblem | None:
    if call.func is _CONVOLUTION_BACKWARD:
        _, x, weight, _, *geometry, mask = call.args
        if not any(mask[:2]):  # the gradient of a bias alone
            return None
    elif call.func._opname in _CONVOLUTIONS:
        x, weight, _, *geometry = call.args[:9]
    else:
        return None
    stride, padding, dilation, transposed, output_padding, groups = geometry
    lists = tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups
    form = memory_format_of(x.empty(), weight.empty())
    found = convolution_of(x.shape, weight.shape, x.dtype, *lists, memory_format=form, math=math, deterministic=False)
    if found is None or call.func is not _CONVOLUTION_BACKWARD:
        return None if found is None else found.forward
    return found.backward_input if mask[0] else found.backward_weight


def _storage(trace: Trace, storage: int, role: Role, name: str) -> Storage:
    return Storage(name=name, role=role, size=Affine(trace.storages[storage].size))


def executable(
    graph: StepGraph, calls: Sequence[TracedCall], outside: Mapping[int, int], beside: Mapping[str, int]
) -> StepGraph:
    """Return a step as code runs it: operations read all that their calls are given, and the caller's part runs once.

    PyTorch's gradient of a convolution's input is given the input, too, of which it needs only the geometry. Operations
    that draw random numbers stay in the program's order, whatever a plan does: they read and write one storage of no
    bytes, which stands for the generator. `beside` are bytes of storages that no operation accesses and that are there
    all the time, by name.
    """
    generator = len(graph.storages)
    operations = []
    for index, (operation, call) in enumerate(zip(graph.operations, calls, strict=True)):
        given = {each.storage for each in call.inputs if each.storage < generator}
        drawn = () if operation.repeatable else (generator,)
        reads = {*operation.reads, *drawn} | (given - {*operation.writes})
        repeatable = operation.repeatable and index not in outside
        operations.append(
            replace(operation, reads=tuple(sorted(reads)), writes=(*operation.writes, *drawn), repeatable=repeatable)
        )
    sizes = {"random number generator": 0, **beside}
    found = tuple(Storage(name=name, role=Role.BUFFER, size=Affine(size)) for name, size in sizes.items())
    return replace(graph, operations=tuple(operations), storages=(*graph.storages, *found))
