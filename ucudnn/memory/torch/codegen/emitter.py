"""Emitter: writes the lines of a plan's code, and knows at each line which names hold which bytes."""

from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, final

import torch

from ucudnn.errors import StepGraphError
from ucudnn.memory.plans.actions import Move
from ucudnn.memory.step.graph import RANKS, Phase
from ucudnn.memory.torch.codegen.code_support import SUPPORT
from ucudnn.memory.torch.codegen.code_text import CodeText
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.memory.torch.subject.traced_values import Geometry, TracedCall, TracedTensor, listed
from ucudnn.memory.torch.tracing.assemble import writes
from ucudnn.memory.torch.tracing.provenance import told

_LIFT = torch.ops.aten.lift_fresh.default
_CLONE = torch.ops.aten.clone.default


@final
class Emitter:
    """Writes the code of one plan; `checked` and `debug` as in `generate`. `beside` are operations that only start."""

    def __init__(
        self, program: StepProgram, *, checked: bool = False, debug: bool = False, beside: Set[int] = frozenset()
    ) -> None:
        self._program, self._beside = program, beside
        self._checked, self._debug = checked, debug
        self._names: dict[int, dict[Geometry, str]] = {}  # of tensors in each storage that is there
        self._version: dict[int, int] = {}  # of the bytes of each storage
        self._host: dict[int, tuple[int, TracedTensor]] = {}  # the version there, and the tensor as which it went
        self._leaving, self._arriving = set[int](), set[int]()  # storages whose copies nothing has waited for
        self._held: dict[int, tuple[int, str]] = {}  # by frees that wait: the storage, and the name that holds it
        self._started: dict[int, tuple[int, ...]] = {}  # operands of collectives, by the storages of their results
        self._code = CodeText(SUPPORT | {"device": program.device})
        self._has_pads = False
        self._uncounted, self._ran, self._next = list(program.uncounted), set[int](), 0
        self._made = [dict(each) for each in program.graph.makes]

    def begin(self) -> None:
        """Bind what exists before the step."""
        for number, (_, tensor) in enumerate(self._program.persistent):
            self._know(tensor, f"p{number}")
        for number, tensor in enumerate(self._program.inputs):
            self._know(tensor, f"x{number}")

    def begin_backward(self) -> None:
        """End forward: what is there now can be handed to backward. No collective runs while the caller does."""
        self._await()
        self._call_uncounted(Phase.FORWARD, len(self._program.calls))
        # The caller's tensors are others than the code's: autograd ties the former to the node that holds the latter.
        outputs = [*map(self._output, self._program.outputs)]
        held = [[name] for _, name in self._held.values()]
        self._code.end_forward(outputs, [[*names.values()] for names in self._names.values()] + held)

    def hand_over(self, sources: Sequence[int]) -> None:
        """Hand the gradients of some sources over, while backward goes on.

        The code keeps their storages until it ends, as the plan says, so nothing else is moved into their places. The
        caller gets tensors of his own, because autograd takes the memory of a tensor that nobody else has.
        """
        gradients = [self._program.gradients[source] for source in sources]
        for each in gradients:
            if each is not None:
                self.wait(each.storage)
        names = [None if each is None else self._name(each) for each in gradients]
        values = ["None" if name is None else f"alias({name})" for name in names]
        self._code.hand_over(values, [name for name in names if name is not None])

    def end(self, sources: Sequence[int]) -> CodeText:
        """End backward, when all copies have ended, with the gradients of some sources, and return the code."""
        self.wait(None)
        self._call_uncounted(Phase.BACKWARD, len(self._program.calls))
        gradients = [self._program.gradients[source] for source in sources]
        self._code.end_backward([None if each is None else self._name(each) for each in gradients])
        return self._code

    def run(self, operation: int, *, again: bool) -> None:
        """Call the operator of an operation."""
        program, made = self._program, self._made[operation]
        call = program.calls[operation]
        if not again:
            self._ran.add(operation)
            while self._next in self._ran:
                self._next += 1
            # What begins early comes before operators that the program calls before it.
            self._call_uncounted(call.phase, min(operation, self._next) if self._beside else operation)
        grad_output, function = program.outside.get(operation), program.functions.get(operation)
        reads = program.graph.operations[operation].reads
        self._await({*reads, *made}, made)
        if operation in self._beside:
            for storage in self._leaving.intersection(reads):
                self._wait_offload(storage)
            function = _of_ranks(f"start_{call.func.__name__.partition('.')[0]}")
        if grad_output is None:
            self._call(call, made, again=again, function=function)
        else:
            self._know(program.grad_outputs[grad_output], self._code.assign(f"grad_outputs[{grad_output}]", made))
        for storage, version in made.items():
            self._version[storage] = max(version, self._version.get(storage, 0))
        if operation in self._beside:
            self._started.update(dict.fromkeys(made, reads))

    def mark(self, action: str) -> None:
        """Mark for PyTorch's profiler that an action begins, or with '' that it has ended."""
        self._code.line(f"mark({action!r})")

    def offload(self, storage: int) -> None:
        """Begin the copy of a storage to the host."""
        self._await({storage}, {storage})
        if storage in self._leaving:
            self._wait_offload(storage)
        whole = self._whole(storage)
        name = self._name(whole)
        self._code.line(f"transfers.offload({storage}, {name})", uses=[name])
        self._leaving.add(storage)
        self._host[storage] = self._version.get(storage, 0), whole

    def prefetch(self, storage: int) -> None:
        """Begin the copy from the host, into memory that is taken for it unless the copy to the host still has it."""
        self._await({storage}, {storage})
        version, whole = self._host[storage]
        name = self._held_name(storage)
        if name is None:
            name = self._allocate(whole)
        else:
            self._leaving.remove(storage)
            self._know(whole, name)
        self._code.line(f"transfers.prefetch({storage}, {name})", uses=[name])
        self._arriving.add(storage)
        self._version[storage] = version

    def wait(self, storage: int | None) -> None:
        """Let compute wait for the copies of a storage and collectives that access it, or for all of them."""
        self._await(*(() if storage is None else ({storage}, {storage})))
        for each in sorted(self._leaving if storage is None else self._leaving & {storage}):
            self._wait_offload(each)
        for each in sorted(self._arriving if storage is None else self._arriving & {storage}):
            self._code.line(f"transfers.wait_prefetch({each})")
            self._arriving.remove(each)

    def free(self, storage: int, held_by: int | None) -> None:
        """Free a storage, or hold it for an offload or a collective until the free of this action is released."""
        self._await({storage}, () if held_by is not None else {storage})
        leaves = storage in self._leaving and held_by is not None
        whole = self._name(self._host[storage][1]) if leaves else None
        if any(storage in operands for operands in self._started.values()):
            whole = whole or next(iter(self._names[storage].values()))
        names = [name for name in self._names.pop(storage).values() if name != whole]
        self._version.pop(storage, None)
        if held_by is not None and whole is not None:
            self._held[held_by] = storage, whole
            self._code.delete(names)
            return
        if storage in self._leaving:
            self._wait_offload(storage)
        self._delete(storage, names)

    def move(self, move: Move) -> None:
        """Copy storages to other places, one after another, while tensors of some bytes fill holes.

        Where none moves, the holes stay filled until `drop_pads`.
        """
        if move.pads:
            self._code.line(f"pads_ = pads({move.pads}, device, {move.opens})")
            self._has_pads = not move.storages
        for storage in move.storages:
            self.wait(storage)
            whole = self._whole(storage)
            before = self._name(whole)
            names = [*self._names.pop(storage).values()]
            if move.slides:
                # Nothing is between that could take the place of the freed bytes or write there, nor are they poisoned.
                self._code.line(f"left_ = leave({before})", uses=[before])
                self._delete(storage, names, poison="watched")
                name = self._allocate(whole)
                self._code.line(f"arrive({name}, left_)", uses=[name])
                self._code.delete(["left_"])
            else:
                self._know(whole, self._code.assign(f"moved({before})", [storage], uses=[before]))
                self._delete(storage, names)
        if move.pads and move.storages:
            self._code.line("drop(pads_)")

    def drop_pads(self) -> None:
        """Free what fills holes while an action takes memory, once it has ended."""
        if self._has_pads:
            self._code.line("drop(pads_)")
        self._has_pads = False

    def release(self, free: int) -> None:
        """Free what the free of an action holds, if it still does."""
        storage = self._held.get(free, (None,))[0]
        if storage in self._leaving:
            self._wait_offload(storage)
        elif storage is not None:
            self._await((), {storage})

    def _await(self, accessed: Collection[int] | None = None, written: Collection[int] = ()) -> None:
        """Wait for collectives whose results are accessed, or whose operands are written; None waits for all."""
        for result, operands in [*self._started.items()]:
            if accessed is not None and result not in accessed and not {*operands}.intersection(written):
                continue
            del self._started[result]
            name = next(iter(self._names[result].values()))
            self._code.line(f"{self._code.operator(_of_ranks('wait'))}({name})", [name])
            for storage in operands:
                if storage not in self._leaving and (held := self._held_name(storage)) is not None:
                    self._delete(storage, [held])

    def _wait_offload(self, storage: int) -> None:
        self._code.line(f"transfers.wait_offload({storage})")
        self._leaving.remove(storage)
        name = self._held_name(storage)
        if name is not None:
            self._delete(storage, [name])

    def _held_name(self, storage: int) -> str | None:
        """Return the name that holds a storage for its offload, and hold it no longer; None if there is none."""
        free = next((free for free, (held, _) in self._held.items() if held == storage), None)
        return None if free is None else self._held.pop(free)[1]

    def _delete(self, storage: int, names: Sequence[str], poison: str = "poisoned") -> None:
        if self._debug and names:
            self._code.line(f"gone_ = {poison}({names[0]})", uses=names[:1])
        self._code.delete(names)
        if self._debug and names:
            self._code.line(f"check_gone(gone_, {self._program.graph.storage_name(storage)!r})")

    def _call_uncounted(self, phase: Phase, operation: int) -> None:
        while self._uncounted and self._uncounted[0][0] <= operation and self._uncounted[0][1].phase is phase:
            call = self._uncounted.pop(0)[1]
            accessed = {each.storage for each in (*call.inputs, *writes(call))}
            self._await(accessed, accessed)
            self._call(call, {}, again=False)

    def _call(self, call: TracedCall, made: Mapping[int, int], *, again: bool, function: Any = None) -> None:
        stand_ins = self._stand_ins(call, made, again=again)
        uses: list[str] = []

        def text(tensor: TracedTensor) -> str:
            uses.append(stand_ins.get(tensor) or self._name(tensor))
            return uses[-1]

        function = function or (_CLONE if call.func is _LIFT else call.func)
        arguments = [self._code.expression(each, text) for each in call.args]
        arguments += [f"{key}={self._code.expression(value, text)}" for key, value in call.kwargs.items()]
        self._receive(call, f"{self._code.operator(function)}({', '.join(arguments)})", uses)
        self._code.delete([*stand_ins.values()])

    def _stand_ins(self, call: TracedCall, made: Mapping[int, int], *, again: bool) -> dict[TracedTensor, str]:
        """Return names of tensors that an operator writes in the place of arguments, whose bytes are to stay.

        Memory that the operator writes whole and that is not there is taken.
        """
        found: dict[TracedTensor, str] = {}
        graph = self._program.graph
        for tensor in dict.fromkeys(writes(call)):
            storage = tensor.storage
            if storage not in self._names:
                self._allocate(self._flat(storage, tensor.dtype))
            elif again and storage < len(graph.storages) and graph.left_alone[storage]:
                name = self._name(tensor)
                found[tensor] = self._code.assign(f"clone({name})", [storage], uses=[name])
            elif again and storage in made and self._version.get(storage, 0) >= made[storage]:  # it is not read either
                found[tensor] = self._code.assign(self._empty(tensor), [storage])
        return found

    def _receive(self, call: TracedCall, text: str, uses: Sequence[str]) -> None:
        """Write a call, and give names to those of its results that are new.

        A result that is one of the call's arguments has a name already. A result that is still in memory from before
        has one, too, and its copy is dropped.
        """
        results = listed(call.results)
        if any(isinstance(each, (tuple, list, dict)) for each in results):
            raise StepGraphError(f"{call.func} returns nested results, which a plan cannot hold")
        inputs = {each.storage for each in call.inputs}
        there = inputs | {*self._names}
        targets = [
            self._code.name(each.storage) if isinstance(each, TracedTensor) and each.storage not in there else "_"
            for each in results
        ]
        named = [(each, name) for each, name in zip(results, targets, strict=True) if name != "_"]
        if not named:
            self._code.line(text, uses=uses)
            return
        several = isinstance(call.results, (tuple, list))
        self._code.line(f"{', '.join(targets)}{',' if several else ''} = {text}", uses=uses)
        if "_" in targets:
            self._code.line("del _")
        for tensor, name in named:
            self._know(tensor, name)
            position = [each is tensor for each in results].index(True)
            if self._checked:
                size = self._program.sizes[tensor.storage]
                moves = size and tensor.storage < len(self._program.graph.storages)  # others lie anywhere
                traced = tensor.shape, tensor.stride, tensor.offset, size
                told_call = f"{call.func} of {told((call.module, call.source))}"
                rest = f"{'device' if moves else None}, {told_call!r}, {self._code.constant(tensor.dtype)}"
                place = call.index, position
                self._code.line(f"check_geometry({name}, {traced}, {rest}, {place})", [name])

    def _name(self, tensor: TracedTensor) -> str:
        """Return the name of a tensor, which is made as a view where there is none."""
        names = self._names.get(tensor.storage)
        if names is None:
            raise StepGraphError(f"a tensor of {tensor.shape} in storage {tensor.storage} is not there")
        found = names.get(tensor.geometry)
        if found is not None:
            return found
        known = [(TracedTensor(tensor.storage, *geometry), name) for geometry, name in names.items()]
        shape, stride, offset, dtype, *_ = tensor.geometry
        alike = next((each for each in known if each[0].dtype is dtype), None)
        if alike is not None:  # a view of a conjugate is a conjugate, too
            seen, base = alike
            text = f"as_strided({base}, {list(shape)}, {list(stride)}, {offset})"
            conjugated, negated = seen.conjugated, seen.negated
        else:
            base = known[0][1]
            text = f"retyped({base}, {shape}, {stride}, {offset}, {self._code.constant(dtype)})"
            conjugated = negated = False
        text = f"conjugated({text})" if conjugated is not tensor.conjugated else text
        text = f"negated({text})" if negated is not tensor.negated else text
        name = self._code.assign(text, [tensor.storage], uses=[base])
        self._know(tensor, name)
        return name

    def _output(self, tensor: TracedTensor) -> str:
        """Return a tensor for the caller; a view only where another of his tensors lies in the same storage.

        Autograd lets nobody change a view in place that a function like `_Replay` returns.
        """
        program, name = self._program, self._name(tensor)
        his = (*program.outputs, *program.inputs, *(each for _, each in program.persistent))
        alone = sum(each.storage == tensor.storage for each in his) == 1
        return self._code.assign(f"{'detach' if alone else 'alias'}({name})", [tensor.storage], uses=[name])

    def _know(self, tensor: TracedTensor, name: str) -> None:
        self._names.setdefault(tensor.storage, {})[tensor.geometry] = name

    def _whole(self, storage: int) -> TracedTensor:
        """Return a contiguous tensor that is all of a storage: one that is there, or a flat one."""
        for geometry in self._names[storage]:
            tensor = TracedTensor(storage, *geometry)
            whole = not tensor.offset and tensor.bytes_touched == self._program.sizes[storage]
            if whole and tensor.is_contiguous and tensor.is_plain:
                return tensor
        return self._flat(storage, next(iter(self._names[storage]))[3])

    def _flat(self, storage: int, dtype: torch.dtype) -> TracedTensor:
        elements, rest = divmod(self._program.sizes[storage], dtype.itemsize)
        if rest:
            raise StepGraphError(f"{self._program.graph.storage_name(storage)} is no whole number of {dtype}")
        return TracedTensor(storage, (elements,), (1,), 0, dtype)

    def _allocate(self, tensor: TracedTensor) -> str:
        name = self._code.assign(self._empty(tensor), [tensor.storage])
        self._know(tensor, name)
        return name

    def _empty(self, tensor: TracedTensor) -> str:
        dtype = self._code.constant(tensor.dtype)
        return f"empty_strided({tensor.shape}, {tensor.stride}, dtype={dtype}, device=device)"


def _of_ranks(name: str) -> Any:
    return getattr(getattr(torch.ops, RANKS), name).default
