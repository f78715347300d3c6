"""Compiles the regions of a step, each kind once, and says which run as they are, and why."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import Phase
from ucudnn.memory.torch.compiling.fused_program import SHARE, RegionKinds, fused_program
from ucudnn.memory.torch.compiling.inductor import compiled, shortened
from ucudnn.memory.torch.compiling.region import FusedRegion, region_graph
from ucudnn.memory.torch.compiling.seeded_masks import MASK
from ucudnn.memory.torch.measuring.made_operands import operand_storages, operator_on_made_up
from ucudnn.memory.torch.measuring.measured_peak import levels, profiled
from ucudnn.memory.torch.measuring.progress import Stages
from ucudnn.memory.torch.sharding.agreement import Agreement, structure
from ucudnn.memory.torch.subject.left_as_found import Snapshot
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.memory.torch.subject.traced_values import TracedCall

SMALL = 1.0
"""How many times the bytes that a step's largest operation accesses a region may access where a budget is tight."""


def compiled_program(
    program: StepProgram, kinds: RegionKinds, stages: Stages, ranks: Agreement, share: float = SHARE
) -> StepProgram:
    """Return a step whose runs of fusible operations are compiled regions, each kind compiled once.

    A region that Inductor does not compile, or whose code returns tensors that lie otherwise, runs its calls one after
    another. One whose calls return tensors that lie otherwise than they were traced becomes single operations again.
    Masks of dropout are computed from seeds if all of them lie in compiled regions, and are drawn as in the plain loop
    otherwise. `kinds` and `share` are those of `fused_program`.

    Each rank compiles, and a region runs compiled if it does so on all of them. While a rank follows the plan of all,
    smaller arguments have the regions of the sample.

    Raises:
        InvalidValueError: if ranks have other regions.
    """
    like = None if ranks.follows is None else kinds.chosen.get(structure(program.graph))
    seeded = True
    while True:
        fused = ranks.all(partial(fused_program, program, kinds, share, seeded=seeded, like=like))
        regions = {call.func: call for call in fused.calls if isinstance(call.func, FusedRegion)}
        ranks.check_same(str([each.func._opname for each in fused.calls]), "step")
        ranks.all(partial(_compile_all, regions, fused, stages))
        # On all ranks regions run as they are that do so on one of them, or are single operations there.
        for rank, found in enumerate(ranks.every([(each.is_apart, each.reason) for each in regions])):
            for region, (is_apart, reason) in zip(regions, found, strict=True):
                region.is_apart |= is_apart
                if reason and region.is_compiled:
                    region.leave(f"rank {rank}: {reason}")
        if like is None and any(each.is_apart for each in regions):
            continue
        if like is not None or all(region is not None and region.is_compiled for region in _with_masks(fused.calls)):
            return replace(fused, compiled=_told(fused))
        seeded = False


def _compile_all(regions: Mapping[FusedRegion, TracedCall], program: StepProgram, stages: Stages) -> None:
    """Compile and try the kinds of regions of which that was not tried before, each by one of its calls."""
    left = {region: call for region, call in regions.items() if not (region.is_compiled or region.reason)}
    stages.begin(f"compiling {len(left)} kinds of regions")
    with ExitStack() as after:
        after.callback(Snapshot().restore_modes)  # made-up operands draw random numbers
        for number, (region, call) in enumerate(left.items()):
            stages.done(number, len(left))
            _compile(region, program.device)
            _try(region, call, program)
    if program.device.type == "cuda":  # the blocks of operands would stay in the allocator's cache
        torch.cuda.empty_cache()


def with_scratch(program: StepProgram, costs: Costs) -> Costs:
    """Return costs of a step with the scratch of its regions as far as it is known."""
    known = zip(program.calls, costs.scratch_bytes, strict=True)
    scratch = (each.func.scratch_bytes if isinstance(each.func, FusedRegion) else size for each, size in known)
    return replace(costs, scratch_bytes=tuple(scratch))


def _with_masks(calls: Iterable[TracedCall]) -> Iterator[FusedRegion | None]:
    """Yield for each mask that is computed from a seed the region in which that is done; None where it is in none."""
    for call in calls:
        if isinstance(call.func, FusedRegion):
            yield from (call.func for each in call.func.calls if each.func is MASK)
        elif call.func is MASK:
            yield None


def _told(program: StepProgram) -> tuple[str, ...]:
    used = [call.func for call in program.calls if isinstance(call.func, FusedRegion)]
    done, kinds = [each for each in used if each.is_compiled], [*dict.fromkeys(used)]
    inside = sum(len(each.calls) for each in done)
    lines = [
        f"compiled: {len(done)} of {len(used)} regions, in the place of {inside} operations;"
        f" {sum(each.is_compiled for each in kinds)} kinds"
    ]
    if masks := [*_with_masks(call for call in program.calls if call.phase is Phase.FORWARD)]:
        lines.append(f"dropout: {len(masks)} masks from seeds, which are not what eager PyTorch draws")
    for each in kinds:
        if not each.is_compiled:
            names = " ".join(dict.fromkeys(call.func._opname for call in each.calls))
            lines.append(f"not compiled: {used.count(each)} regions of {names}: {each.reason}")
    return tuple(lines)


def _compile(region: FusedRegion, device: torch.device) -> None:
    form = region.form
    try:
        code = compiled(region_graph(region.calls, form, functional=True), form.arguments, form.results, device)
        if code is None:
            region.leave("nothing is gained")
            region.is_apart = True
        else:
            region.use(code)
    except Exception as error:  # noqa: BLE001  # whatever a compiler raises
        region.leave(shortened(error))


def _try(region: FusedRegion, call: TracedCall, program: StepProgram) -> None:
    operands = operand_storages(call)
    operator: Callable[[], Any] = operator_on_made_up(call, operands, program.device, len(program.graph.storages))
    found: list[Tensor] = []
    on_cpu = program.device.type == "cpu"  # on a GPU scratch is measured with that of all operations
    try:
        with torch.no_grad():
            if on_cpu:
                events = profiled(lambda: found.extend(operator()))
            else:
                found += operator()
        wrong = _difference(found, region)
    except Exception as error:  # noqa: BLE001  # whatever compiled code raises
        wrong = shortened(error)
    if wrong and region.is_compiled:
        region.leave(wrong)
        _try(region, call, program)
    elif wrong:
        region.is_apart = True
    elif on_cpu:
        region.scratch_bytes = max(0, max(levels(events)) - sum(each.untyped_storage().nbytes() for each in found))


def _difference(found: Sequence[Tensor], region: FusedRegion) -> str:
    """Return in what the results of a region differ from those of its calls; '' for nothing."""
    storages = {each.untyped_storage().data_ptr() for each in found}
    if len(storages) < len(found):
        return "results share memory"
    for tensor, traced in zip(found, region.form.results, strict=True):
        lies = tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype
        if lies != (traced.shape, traced.stride, 0, traced.dtype):
            return f"a result of shape, strides, offset and type {lies}"
    return ""
