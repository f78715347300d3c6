"""Gradients of several steps add up without an average between, to FSDP2's bits."""

import copy

import pytest
import torch
from torch import nn

from tests.support.sharded_ranks import (
    batches,
    counted_collectives,
    fsdp2,
    made_optimizer,
    on_ranks,
    sharded_network,
    whole_parameters,
)
from ucudnn.errors import InvalidValueError
from ucudnn.memory.step.graph import Role

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")

CASES = [
    {"network": "odd", "policy": "checkpoint"},
    {"network": "odd", "policy": "stock", "mixed": ["bfloat16", "float32"]},
    {"network": "gpt without dropout", "policy": "checkpoint", "mixed": ["bfloat16", None]},
    {"network": "odd", "policy": "checkpoint", "mixed": [None, "bfloat16"]},
]


def accumulated(mesh, cases):
    """Train by three steps to an update, by FSDP2 and by a fitted step, and return whether both went alike."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from ucudnn.memory import fit

    found = []
    for case in cases:
        model, inputs, loss = sharded_network(case["network"])
        data = [*batches(inputs, 6)]
        precision = None
        if "mixed" in case:
            precision = MixedPrecisionPolicy(*(each and getattr(torch, each) for each in case["mixed"]))
        ways = []
        for way in ("fsdp2", "fit"):
            own = copy.deepcopy(model)
            if way == "fsdp2":
                own = step = fsdp2(own, mesh, **({"mp_policy": precision} if precision else {}))
            optimizer = made_optimizer("adamw", own.parameters())
            call = lambda *args, own=own, loss=loss: loss(own(*args[:-1]), args[-1])  # noqa: E731
            if way == "fit":
                options = {"policy": case["policy"], "debug": True, "mixed_precision": precision}
                call = step = fit(own, data[0], loss=loss, optimizer=optimizer, mesh=mesh, **options)
            losses, counts = [], []
            for number, batch in enumerate(data):
                step.set_requires_gradient_sync(number % 3 == 2)
                with counted_collectives() as names:
                    value = call(*batch)
                    names.clear()
                    value.backward()
                losses.append(value.item())
                counts.append(len(names))
                if number % 3 == 2:
                    losses.append(nn.utils.clip_grad_norm_(own.parameters(), 0.5).full_tensor().item())
                    optimizer.step()
                    optimizer.zero_grad()
            step.set_requires_gradient_sync(True)
            call(*data[0]).backward()
            losses.append(nn.utils.clip_grad_norm_(own.parameters(), 0.5).full_tensor().item())
            ways.append((losses, whole_parameters(own)))
        other = step._steps[True]
        graph, line = other.plan.graph, step.report().splitlines()[-1]
        gradients = [size for size, each in zip(graph.sizes, graph.storages, strict=True) if each.role is Role.GRADIENT]
        result = {"kept": [other._subject.beside["gradients of earlier steps"], sum(gradients), line]}
        trained = sum(each.requires_grad for each in own.parameters())
        same = ways[0][0] == ways[1][0] and all(map(torch.equal, ways[0][1], ways[1][1]))
        result["numbers"] = sum(each.numel() for each in own.parameters() if each.requires_grad)
        found.append(
            result | {"same": same, "averaged": [counts[2] - counts[1], counts[5] - counts[4]], "trained": trained}
        )
    return found


def test_gradients_add_up_without_an_average_between_to_the_bits_of_fsdp2(tmp_path):
    for found in on_ranks(accumulated, tmp_path / "store", CASES, BUCKET_BYTES="1000"):
        for case, each in zip(CASES, found, strict=True):
            assert each["same"], case
            kept, size, line = each["kept"]
            assert kept >= size
            assert size == each["numbers"] * (2 if case.get("mixed", [0, 0])[1:] == [None] else 4)  # they are whole
            assert line.startswith(f"without an average: policy {case['policy']}, peak predicted ")
            assert each["averaged"] == [each["trained"]] * 2, case  # once, with the last of three steps


def mixed_up(mesh):
    """Return what ranks are told of which one leaves out the average, before and after it was planned."""
    from ucudnn.memory import fit

    model, inputs, loss = sharded_network("odd")
    step = fit(model, inputs, loss=loss, mesh=mesh)
    step(*inputs).backward()
    told = []
    for averages in (mesh.get_local_rank() == 1, False, mesh.get_local_rank() == 1):
        step.set_requires_gradient_sync(averages)
        try:
            step(*inputs).backward()
        except InvalidValueError as error:
            told.append(str(error))
    return told


def test_ranks_that_differ_in_the_average_refuse_together(tmp_path):
    first, second = on_ranks(mixed_up, tmp_path / "store")
    assert len(first) == len(second) == 2
    assert first[0].startswith("in its first step without an average")
    assert second[0] == first[1] == second[1]
    assert second[0].startswith("rank 1: other collectives than those of rank 0 would run")
