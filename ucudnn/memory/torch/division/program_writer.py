"""ProgramWriter: writes the program of a step with other calls in the place of some of its own."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import Affine, Phase, Role, StepGraph, StepOperation, Storage
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.memory.torch.subject.traced_values import TracedCall, TracedTensor, listed, tensors_in, unused_name
from ucudnn.memory.torch.tracing.real_geometry import noted_layouts

aten = torch.ops.aten
_LEAST_MS = 0.003  # of a part, however small it is


class Divided(NamedTuple):
    """The program of a divided step; for each of its calls that of the step as it is, and its share of that.

    The share is 0 for calls that the step as it is does not have.
    """

    program: StepProgram
    origins: tuple[tuple[int, float], ...]

    def costs(self, graph: StepGraph, costs: Costs) -> Costs:
        """Return costs, from those of the step as it is: a part has its share of time and scratch."""
        bytes_per_ms = fastest(graph, costs)
        times = []
        for operation, (index, share) in zip(self.program.graph.operations, self.origins, strict=True):
            own_ms = share * costs.time_ms[index] if share else operation.traffic.fixed / bytes_per_ms
            times.append(max(own_ms, min(_LEAST_MS, costs.time_ms[index])))
        return replace(
            costs,
            time_ms=tuple(times),
            scratch_bytes=tuple(int(share * costs.scratch_bytes[index]) for index, share in self.origins),
            issue_ms=tuple(costs.issue_ms[index] for index, _ in self.origins) if costs.issue_ms else (),
            configurations={},
            scratch_pieces={},
        )


def fastest(graph: StepGraph, costs: Costs) -> float:
    """Return the most bytes that an operation moves in a millisecond."""
    pairs = zip(graph.operations, costs.time_ms, strict=True)
    return max((each.traffic.at(graph.batch) / ms for each, ms in pairs if ms), default=1.0)


class ProgramWriter:
    """Writes calls and their operations; new storages have negative numbers meanwhile.

    The first `own` storages of the step as it is stay even if no call has them, by default all of them.

    Attributes:
        calls: what has been written.
        origins: for each of these its call of the step as it is, and its share of that.
        phase: the part of the step that new calls belong to; None for that of the call on whose behalf they are.
    """

    def __init__(self, of: StepProgram, own: int | None = None) -> None:
        self.of, self._graph = of, of.graph
        self.calls: list[TracedCall] = []
        self.origins: list[tuple[int, float]] = []
        self.phase: Phase | None = None
        self._own = len(of.graph.storages) if own is None else own
        self._operations: list[StepOperation] = []
        self._storages: list[Storage] = []
        self._names = {each.name for each in self._graph.operations} | {each.name for each in self._graph.storages}
        self._moved: dict[int, int] = {}  # calls that run whole, to where they are now
        self._index = 1 + max((each.index for each in of.every_call()), default=0)  # of new calls

    def whole(self, index: int) -> None:
        """Write a call as it is."""
        self._moved[index] = len(self.calls)
        self.calls.append(self.of.calls[index])
        self._operations.append(self._graph.operations[index])
        self.origins.append(self.origin(index, 1.0))

    def origin(self, index: int, share: float) -> tuple[int, float]:
        """Return what is noted of where a share of a call of `of` comes from."""
        return index, share

    def storage(self, like: int, size: int) -> int:
        """Return a new storage, named after one of the step as it is."""
        named = self._storages[-like - 1] if like < 0 else self._graph.storages[like]
        name = unused_name(named.name, self._names)
        self._storages.append(Storage(name=name, role=Role.ACTIVATION, size=Affine(size)))
        return -len(self._storages)

    def add(self, index: int, func: Any, args: tuple[Any, ...], results: Any, **kwargs: Any) -> None:
        """Write a call that the step as it is does not have, on behalf of one that it has."""
        call = replace(self.of.calls[index], func=func, args=args, kwargs=kwargs, results=results, flops=0)
        made = [*tensors_in(results)]
        reads = {each.storage for each in call.inputs}
        if func is aten.copy_.default and not made[0].offset:  # the first part of what nobody has written yet
            reads.discard(made[0].storage)
        operation = replace(
            self._graph.operations[index],
            kind=f"aten.{func._opname}",
            dtype=str(made[0].dtype).removeprefix("torch."),
            reads=tuple(reads),
            writes=tuple({each.storage for each in made}),
            flops=Affine(0),
            traffic=Affine(sum(each.bytes_touched for each in (*call.inputs, *made))),
            problem=None,
            problem_batch=Affine(0, 1),
            repeatable=True,
        )
        self.append(index, call, operation, 0.0)

    def append(self, index: int, call: TracedCall, operation: StepOperation, share: float) -> None:
        """Write a call on behalf of another one, and its operation, which gets a name of its own.

        What an earlier step found to lie otherwise than expected is copied.
        """
        phase, copies = self.phase or call.phase, list[tuple[TracedTensor, TracedTensor]]()
        results = listed(call.results)
        for position, found in noted_layouts(call.func, call.args, call.kwargs).items():
            expected = results[position]
            if found.shape == expected.shape and found.device == self.of.device.type:
                own = self.storage(expected.storage, found.size)
                results[position] = TracedTensor(own, found.shape, found.stride, found.offset, found.dtype)
                copies.append((expected, results[position]))
        if copies:
            call = replace(call, results=tuple(results) if isinstance(call.results, (tuple, list)) else results[0])
            moved = {expected.storage: own.storage for expected, own in copies}
            operation = replace(operation, writes=tuple(moved.get(each, each) for each in operation.writes))
        self.calls.append(replace(call, phase=phase, index=self._index))
        self._index += 1
        self._operations.append(replace(operation, name=unused_name(operation.name, self._names), phase=phase))
        self.origins.append(self.origin(index, share))
        for copied in copies:
            self.add(index, aten.copy_.default, copied, copied[0])

    def program(self, positions: Sequence[int]) -> StepProgram:
        """Return the program; the position of each call of the step as it is is given, and behind them their end."""
        used = {each for operation in self._operations for each in (*operation.reads, *operation.writes)}
        kept = [each for each in range(len(self._graph.storages)) if each < self._own or each in used]
        written = self.of.rewritten(self._operations, self.calls, kept, self._storages, positions)
        return replace(written, outside={self._moved[index]: grad for index, grad in self.of.outside.items()})
