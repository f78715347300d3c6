"""The program of a step with runs of its operations as regions: fewer operations, and no storages inside of regions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from ucudnn.memory.step.graph import Affine, Phase, StepGraph, Storage
from ucudnn.memory.torch.compiling.fusible_calls import out_of_place, takes_memory, wants_padding
from ucudnn.memory.torch.compiling.norms import with_native_norms
from ucudnn.memory.torch.compiling.region import FusedRegion, RegionForm, region_form
from ucudnn.memory.torch.compiling.rematerialization import Rematerialization, Rematerialized, with_rematerialized
from ucudnn.memory.torch.compiling.runs import Runs
from ucudnn.memory.torch.compiling.seeded_masks import NewOperation, seeded_rows
from ucudnn.memory.torch.sharding.agreement import structure
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.memory.torch.subject.traced_values import TracedCall, TracedTensor
from ucudnn.memory.torch.tracing.assemble import writes

SHARE = 2.0
"""How many times the bytes that the largest operation accesses a region may access."""


@final
@dataclass(frozen=True, kw_only=True)
class ChosenRegions:
    """How the regions of a step were chosen, so that the step of smaller arguments has the same ones.

    Attributes:
        seeded: whether masks of dropout are computed from seeds.
        share: as in `fused_program`.
        sizes: bytes of each storage, by which runs and what is computed again were chosen.
        padded: products that are regions of their own.
        again: first operations of the regions that compute operations of forward again.
        apart: first operations of the runs that are single operations.
    """

    seeded: bool
    share: float
    sizes: tuple[int, ...]
    padded: tuple[int, ...]
    again: frozenset[int]
    apart: frozenset[int]


@final
class RegionKinds:
    """Regions that are alike are one operator: it is made, and compiled, once.

    Attributes:
        chosen: how the regions of steps were chosen last, by the structure of these.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, FusedRegion] = {}
        self.chosen: dict[str, ChosenRegions] = {}

    def of(self, calls: Sequence[TracedCall], form: RegionForm, device: str) -> FusedRegion:
        """Return the region of calls."""
        numbered, own = form.numbered(calls)
        named = [(each.func.namespace, each.func._opname, each.func._overloadname) for each in own]
        key = repr((device, numbered, named, [(each.args, dict(each.kwargs), each.results) for each in own]))
        if key not in self.kinds:
            self.kinds[key] = FusedRegion(key, own, numbered)
        return self.kinds[key]


def fused_program(
    program: StepProgram,
    kinds: RegionKinds,
    share: float = SHARE,
    *,
    rematerializes: bool = True,
    seeded: bool = False,
    like: ChosenRegions | None = None,
) -> StepProgram:
    """Return a step whose runs of fusible operations are regions, which run their calls one after another.

    Regions of this step are added to the known kinds. A region may access a share of the bytes that the largest
    operation accesses, which may be above 1. `rematerializes` lets regions of backward compute cheap operations of
    forward again, and `seeded` computes masks of dropout from seeds rather than drawing them as the plain loop does.
    With `like` the regions are those of another step of the same structure.
    """
    before, of_step = program.graph, structure(program.graph)
    share, seeded = (share, seeded) if like is None else (like.share, like.seeded)
    program = _without_models(with_native_norms(program))
    if seeded and (masked := seeded_rows(program)) is not None:
        program = _written(program, masked[0], before, masked[1:])
        before = program.graph
    sizes = program.graph.sizes if like is None else like.sizes
    runs = Runs(program, share, sizes)
    found = [each for run in runs.find() for each in _expressible(program, runs, run)]
    large = (index for index, call in enumerate(program.calls) if wants_padding(call) and runs.may_be_one(index))
    padded = tuple(large) if like is None else like.padded
    again = {each.members[0]: each for each in _rematerialized(program, runs, found)} if rematerializes else {}
    if like is not None:
        again = {first: each for first, each in again.items() if first in like.again}
    while True:
        changed = with_rematerialized(program, again.values())
        # Where some regions have no room to compute again, what the others read may be saved beside what these read.
        steps = (changed.graph, program.graph) if again and like is None else ()
        saved = [sum(map(step.sizes.__getitem__, step.saved)) for step in steps]
        if saved and saved[0] > saved[1]:
            again = {}
            continue
        regions = _Regions(changed, Runs(changed, share, sizes), again, kinds)
        several = [each for each in found if len(each) > 1 or each[0] in again]
        fused = regions.fused(sorted([*several, *([each] for each in padded)]))
        failed = (one for one in fused if isinstance(one.call.func, FusedRegion) and one.call.func.is_apart)
        apart = frozenset(one.members[0] for one in failed) if like is None else like.apart
        if like is not None or apart.isdisjoint(again):
            kinds.chosen[of_step] = like or ChosenRegions(
                seeded=seeded, share=share, sizes=sizes, padded=padded, again=frozenset(again), apart=apart
            )
            single = [[*map(regions.alone, one.members)] if one.members[0] in apart else [one] for one in fused]
            return _written(changed, [one for each in single for one in each], before)
        again = {first: each for first, each in again.items() if first not in apart}


def _rematerialized(program: StepProgram, runs: Runs, found: Iterable[Sequence[int]]) -> Iterator[Rematerialized]:
    operations = program.graph.operations
    backward = [each for each in found if operations[each[0]].phase is Phase.BACKWARD]
    chosen = Rematerialization(program, backward, runs.sizes)
    for members in backward:
        again = chosen.of(members)
        if again is None:
            continue
        reads = {each for index in members for each in operations[index].reads} - again.storages.keys()
        writes = {each for index in members for each in operations[index].writes}
        calls, _ = _calls(program, runs, members, again)
        inner = runs.inner(members)
        if runs.have_room_for((reads | writes | again.reads) - inner) and region_form(calls, inner) is not None:
            yield again


def _without_models(program: StepProgram) -> StepProgram:
    """Return the program with memory that is taken by its size, rather than like that of a tensor that must be there.

    So masks of dropout can be drawn before the operations whose results they are for.
    """
    calls, operations = [*program.calls], [*program.graph.operations]
    for index, call in enumerate(calls):
        own = call.results
        if takes_memory(call) and isinstance(own, TracedTensor) and index not in program.outside:
            taken = {"dtype": own.dtype, "device": program.device}
            args = [*own.shape], [*own.stride]
            calls[index] = replace(call, func=torch.ops.aten.empty_strided.default, args=args, kwargs=taken)
            operations[index] = replace(operations[index], reads=(), kind="aten.empty_strided")
    return replace(program, calls=tuple(calls), graph=replace(program.graph, operations=tuple(operations)))


def _expressible(program: StepProgram, runs: Runs, run: Sequence[int]) -> Iterable[list[int]]:
    """Yield the longest parts of a run whose views are all known."""
    begin = 0
    while begin < len(run):
        end = len(run)
        while end > begin:
            part = run[begin:end]
            if region_form(_calls(program, runs, part)[0], runs.inner(part)) is not None:
                break
            end -= 1
        if end > begin:
            yield [*run[begin:end]]
        begin = max(end, begin + 1)


def _calls(
    program: StepProgram, runs: Runs, members: Sequence[int], rematerialized: Rematerialized | None = None
) -> tuple[list[TracedCall], frozenset[int]]:
    """Return the calls of a region, and the storages that it leaves as they are though one of its calls writes them.

    Operators of backward write over operands that nobody else reads. A kernel would write these bytes for nobody, so
    the calls make tensors of their own, which a kernel never does.
    """
    found = [] if rematerialized is None else [*rematerialized.calls]
    renamed = {} if rematerialized is None else dict(rematerialized.storages)
    spared, left = runs.last_read(members), set[int]()
    for index in members:
        call = program.calls[index].with_storages(renamed)
        for tensor in writes(program.calls[index]):
            whole = tensor.is_dense and tensor.bytes_touched == program.sizes[tensor.storage]
            new = -1 - len(found)
            other = out_of_place(call, renamed.get(tensor.storage, tensor.storage), new) if whole else None
            if tensor.storage in spared and other is not None:
                renamed[tensor.storage], call = new, other
                left.add(tensor.storage)
        found.append(call)
    return found, frozenset(left - {each.storage for call in found for each in writes(call)})


@final
class _Regions:
    def __init__(
        self, program: StepProgram, runs: Runs, again: Mapping[int, Rematerialized], kinds: RegionKinds
    ) -> None:
        self._program, self._runs, self._again, self._kinds = program, runs, again, kinds

    def fused(self, regions: Sequence[Sequence[int]]) -> list[NewOperation]:
        found: list[NewOperation] = []
        inside = {each for members in regions for each in members}
        begin, end = 0, len(self._program.calls)
        for members in [*regions, [end]]:
            found += (self.alone(each) for each in range(begin, members[-1]) if each not in inside)
            begin = members[-1] + 1
            if members[0] < end:
                found.append(self._region(members))
        return found

    def alone(self, index: int) -> NewOperation:
        return NewOperation((index,), self._program.graph.operations[index], self._program.calls[index])

    def _region(self, members: Sequence[int]) -> NewOperation:
        program, inner = self._program, self._runs.inner(members)
        operations = [program.graph.operations[each] for each in members]
        calls, spared = _calls(program, self._runs, members, self._again.get(members[0]))
        form = region_form(calls, inner)
        assert form is not None
        call = replace(
            program.calls[members[0]],
            func=self._kinds.of(calls, form, program.device.type),
            args=form.arguments,
            kwargs={},
            results=form.results,
            flops=0,
        )
        reads, writes = set[int](), set[int]()
        for each in operations:
            reads |= {*each.reads} - writes  # what its first writer overwrites whole it does not read
            writes |= {*each.writes}
        given, written = {each.storage for each in form.arguments}, writes - inner - spared
        changed = [each for each in form.arguments if each.storage in form.written]
        operation = replace(
            operations[-1],
            name=f"{operations[0].name}..{operations[-1].name}",
            kind="ucudnn.region",
            reads=tuple(sorted((reads - inner) | (given - written))),
            writes=tuple(sorted(written)),
            flops=operations[-1].flops if len(members) == 1 else Affine(0),
            traffic=Affine(sum(each.bytes_touched for each in (*form.arguments, *form.results, *changed))),
            module=operations[0].module,
            source=operations[0].source,
        )
        return NewOperation(tuple(members), operation, call)


def _written(
    program: StepProgram, fused: Sequence[NewOperation], before: StepGraph, new: Sequence[Storage] = ()
) -> StepProgram:
    """Return the program of some operations, without the storages that only operations before them accessed."""
    once = {each for operation in before.operations for each in (*operation.reads, *operation.writes)}
    accessed = {each for one in fused for each in (*one.operation.reads, *one.operation.writes)}
    kept = [each for each in range(len(program.graph.storages)) if each in accessed or each not in once]
    positions = {member: place for place, one in enumerate(fused) for member in one.members}
    positions[len(program.calls)] = len(fused)
    return program.rewritten((one.operation for one in fused), (one.call for one in fused), kept, new, positions)
