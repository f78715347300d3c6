"""Sharded steps with regions: what ranks agree on, and numbers beside those of FSDP2 and of a compiled step alone."""

import copy

import pytest
import torch

from tests.support.compiled_steps import errors
from tests.support.sharded_ranks import batches, counted_collectives, fsdp2, made_optimizer, on_ranks, sharded_network
from ucudnn.memory.plans.actions import COMPUTES
from ucudnn.memory.torch.compiling import compiled_regions
from ucudnn.memory.torch.compiling.region import FusedRegion
from ucudnn.memory.torch.running.fit import fit

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
EPSILON = 8 * torch.finfo(torch.float32).eps


def averaged(tensors):
    """Return the means over ranks of tensors; those of a DTensor are means already."""
    found = []
    for each in tensors:
        is_sharded = hasattr(each, "full_tensor")
        found.append((each.full_tensor() if is_sharded else each.clone()).reshape(-1))  # FSDP2 has no scalars
        if not is_sharded:
            torch.distributed.all_reduce(found[-1])
            found[-1] /= torch.distributed.get_world_size()
    return found


def step_of(model, call, batch):
    """Return the means over ranks of the loss and of whole gradients of a step."""
    torch.manual_seed(3 + torch.distributed.get_rank())
    model.zero_grad()
    loss = call(*batch)
    loss.backward()
    return averaged([loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)])


def regions_of(step):
    """Return how many regions a step has, and how many of them run compiled code."""
    found = [each.func for each in step.program.calls if isinstance(each.func, FusedRegion)]
    return [len(found), sum(each.is_compiled for each in found)]


def collectives_of(step, names):
    """Return the collectives of a step that ran, and those of its plan."""
    kinds = [each.kind for each in step.plan.graph.operations]
    planned = [kinds[target] for kind, target in step.plan.actions if kind in COMPUTES]
    group = step._sharding.group.group_name
    return [names.count(group), sum(each.startswith("ucudnn_ranks.") for each in planned)]


def without_compiling(graph, *_):
    """Return code of a region that runs its calls, as Inductor's stand-in."""
    return lambda *args: [*graph(*args)]


def trained_with_regions(mesh, cases, compiler):
    """Return for each case the errors of a sharded step with regions, those of a reference, and what has run.

    They are shares of the numbers in double precision. A step that drops something is compared with the one that is
    compiled on each rank alone, because it has other masks than that in double precision.
    """
    if not compiler:
        compiled_regions.compiled = without_compiling
    found = []
    for case in cases:
        model, inputs, loss = sharded_network(case["network"])
        data, numbers = [*batches(inputs, 2)], []
        plain = copy.deepcopy(model)
        alone = fit(plain, data[0], loss=loss, compile=True, policy="stock")
        options, budget = {"loss": loss, "mesh": mesh, "compile": True}, None
        if "share" in case:
            whole = fit(copy.deepcopy(model), data[0], policy="stock", **options)
            budget = int(case["share"] * whole.simulation.peak_bytes)
        options |= {"optimizer": made_optimizer("sgd", model.parameters()), "policy": case["policy"], "budget": budget}
        step = fit(model, data[0], debug=True, **options)
        for batch in data:
            with counted_collectives() as names:
                ours = step_of(model, step, batch)
            own = step_of(plain, alone, batch)
            right = own
            if not case.get("drops"):
                exact = copy.deepcopy(plain).double()
                wide = [each.double() if each.is_floating_point() else each for each in batch]
                right = step_of(exact, lambda *args, exact=exact, loss=loss: loss(exact(*args[:-1]), args[-1]), wide)
            numbers.append([max(errors(each, [e.double() for e in right])) for each in (ours, own)])
        moved = step.simulation.recompute_ms + step.simulation.offloaded_bytes > 0
        ran = [*regions_of(step), *collectives_of(step, names), moved, step.simulation.peak_bytes <= (budget or 1e9)]
        found.append({"errors": numbers, "ran": ran})
    return found


def check_numbers(cases, ranks):
    """Check the results of cases on all ranks."""
    for case, *found in zip(cases, *ranks, strict=True):
        assert all(each["ran"] == found[0]["ran"] for each in found)
        regions, compiled, run, planned, moved, is_within = found[0]["ran"]
        assert regions == compiled > 0, case
        assert run == planned > 0, case
        assert is_within, case
        assert moved is (case["policy"] != "stock"), case
        for each in found:
            for ours, own in each["errors"]:
                assert ours <= 1.5 * max(own, EPSILON), case


@pytest.mark.parametrize("together", ["0", "20000"])
def test_sharded_steps_have_regions_beside_their_collectives(together, tmp_path):
    cases = [
        {"network": "gpt", "policy": "checkpoint-selective", "drops": True},
        {"network": "gpt without dropout", "policy": "auto", "share": 0.7},
        {"network": "unet", "policy": "stock"},
        {"network": "odd", "policy": "checkpoint"},
        *({"network": each, "policy": "stock", "drops": True} for each in ("0", "7")),
    ]
    check_numbers(cases, on_ranks(trained_with_regions, tmp_path / "store", cases, None, BUCKET_BYTES=together))


@pytest.mark.slow
def test_compiled_sharded_steps_are_as_near_to_double_precision_as_those_of_one_rank(tmp_path):
    cases = [{"network": "odd", "policy": "checkpoint"}, {"network": "gpt", "policy": "stock", "drops": True}]
    check_numbers(cases, on_ranks(trained_with_regions, tmp_path / "store", cases, "inductor"))


def decided(mesh):
    """Return what a rank has where another one does not compile a region, and then has smaller arguments."""
    rank = mesh.get_local_rank()

    def compiler(graph, *_):
        if rank == 1 and any("tanh" in str(node.target) for node in graph.graph.nodes):
            raise RuntimeError("no compiler")
        return without_compiling(graph)

    compiled_regions.compiled = compiler
    model, inputs, loss = sharded_network("odd")
    data, found = [*batches(inputs, 3)], []
    plain, own = fsdp2(copy.deepcopy(model), mesh), copy.deepcopy(model)
    step = fit(own, data[0], loss=loss, mesh=mesh, policy="checkpoint", compile=True, debug=True)
    for number, batch in enumerate(data):
        given = [each[:2] if rank == number - 1 else each for each in batch]
        right = step_of(plain, lambda *args: loss(plain(*args[:-1]), args[-1]), given)
        with counted_collectives() as names:
            ours = step_of(own, step, given)
        found.append([max(errors(ours, [each.double() for each in right])), *collectives_of(step, names)])
    lines = [each for each in step.report().splitlines() if "not compiled: " in each]
    (smaller,) = step._others
    return found, regions_of(step), regions_of(smaller), lines, smaller.plan.actions == step.plan.actions


def test_no_rank_compiles_what_one_does_not_and_smaller_arguments_have_the_same_regions(tmp_path):
    ranks = on_ranks(decided, tmp_path / "store")
    for told, (numbers, regions, smaller, lines, follows) in zip(("rank 1: ", ""), ranks, strict=True):
        assert all(error < EPSILON and run == planned > 0 for error, run, planned in numbers)
        assert lines == [f"not compiled: 1 regions of tanh mul add: {told}RuntimeError: no compiler"]
        assert regions[1] == regions[0] - 1
        assert regions[0] == smaller[0]
        assert follows
