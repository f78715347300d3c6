"""Masks of dropout from seeds: forward, recomputation and backward have one mask, and none is saved."""

import copy
import random

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from tests.support.compiled_steps import SmallNet, errors, gradients, images
from tests.support.memory_plans import random_plan_in_parts
from tests.support.plain_training import Race, race_or_none
from tests.support.random_networks import random_network
from tests.support.strategies import examples
from ucudnn.memory.policies.catalog import POLICIES
from ucudnn.memory.step.graph import Phase
from ucudnn.memory.torch.compiling import compiled_regions, step_race
from ucudnn.memory.torch.compiling.fused_program import RegionKinds, fused_program
from ucudnn.memory.torch.compiling.seeded_masks import MASK, seeded_mask
from ucudnn.memory.torch.measuring.operation_costs import step_costs
from ucudnn.memory.torch.running.fit import fit

KEEP = (0.7, 0.5, 0.8, 0.9)


class Dropping(nn.Module):
    """Layers with dropout in several forms, whose masks may be given instead."""

    def __init__(self, masks=None):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 5)
        self.masks = masks

    def dropped(self, x, number):
        keep = KEEP[number]
        if self.masks is not None:
            return x * self.masks[number].to(x.dtype) / keep
        if number == 1:
            return torch.native_dropout(x, 1.0 - keep, True)[0]  # as a GPU has it
        return (F.dropout2d if number == 2 else F.dropout)(x, 1.0 - keep)

    def forward(self, x):
        x = self.dropped(F.gelu(self.norm(self.first(x))), 0)
        x = self.dropped(F.silu(x) + x, 1)
        x = self.dropped(torch.tanh(x), 2).mean((2, 3))
        return self.last(self.dropped(F.gelu(self.second(x)), 3))


def masks_of(seed, data):
    """Return the masks that a step draws behind a seed, when nothing else was drawn."""
    torch.manual_seed(seed)
    seeds, rows, sides = torch.randint(0, 2**62, [8]), len(data[0]), data[0].shape[2:]
    forms = [torch.empty(rows, 8, *sides).contiguous(memory_format=last_of(data)) for _ in range(2)]
    forms += [torch.empty(rows, 8, 1, 1), torch.empty(rows, 16)]
    return [
        seeded_mask(seeds[2 * number], form.shape, form.stride(), KEEP[number], torch.float64)
        for number, form in enumerate(forms)
    ]


def last_of(data):
    return torch.contiguous_format if data[0].is_contiguous() else torch.channels_last


def loss_of(model):
    return lambda x, y: F.cross_entropy(model(x), y)


def seeded(race, share=2.0, *, rematerializes=True):
    """Let the masks of a race's step have seeds, and return the program of it as it was."""
    before = race.program
    race.program = fused_program(before, RegionKinds(), share, rematerializes=rematerializes, seeded=True)
    race.costs = step_costs(race.program.graph, torch.device("cpu"))
    return before


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("policy", ["stock", "checkpoint", "vdnn-ext-all-p", None])
def test_forward_recomputation_and_backward_have_the_mask_of_their_seed(policy, last):
    torch.manual_seed(0)
    model, (x, y) = Dropping().double(), images()
    data = x.double().contiguous(memory_format=torch.channels_last) if last else x.double(), y
    race = Race((model, data, F.cross_entropy), steps=1)
    seeded(race)
    step = race.fitted(policy or random_plan_in_parts(race.program.graph, race.costs, 7))
    for seed in (3, 4):
        plain = copy.deepcopy(model)
        plain.masks = masks_of(seed, data)
        torch.manual_seed(seed)
        ours, own = gradients(model, step, data), gradients(plain, loss_of(plain), data)
        torch.testing.assert_close(ours, own, rtol=1e-9, atol=1e-12)


def test_no_mask_is_saved_and_no_region_saves_what_it_can_compute_from_a_seed():
    torch.manual_seed(0)
    race = Race((Dropping(), images(), F.cross_entropy), steps=1)
    before = seeded(race)
    graph, rows = race.program.graph, race.program.calls
    (seeds,) = [number for number, each in enumerate(graph.storages) if each.name == "dropout.seeds"]
    assert graph.sizes[seeds] == 4 * 16
    assert seeds in graph.saved
    without = fused_program(before, RegionKinds()).graph
    saved, drawn = (sum(each.sizes[number] for number in each.saved) for each in (graph, without))
    masks = 4 * 8 * 8 * 8
    assert drawn - saved >= masks * 4 + masks  # one of float32, and one of bool
    inside = [call for each in rows for call in getattr(each.func, "calls", ()) if call.func is MASK]
    assert {each.phase for each in inside} == {Phase.FORWARD}
    regions = [each for each in rows if any(call.func is MASK for call in getattr(each.func, "calls", ()))]
    assert {each.phase for each in regions} == {Phase.FORWARD, Phase.BACKWARD}
    assert [str(each.func) for each in rows if each.draws] == ["aten.randint.low"]


@given(st.integers(0, 10_000))
@examples(1 / 6)
def test_random_networks_have_one_mask_whatever_the_plan_does(seed):
    race = race_or_none(random_network(seed), steps=2)
    assume(race is not None)
    assume(max(race.losses) < 100)
    before = seeded(race, 0.0, rematerializes=False)
    assume(any(each.func is MASK for each in race.program.calls))
    exact = race.trained(race.fitted("stock"))
    race.program = before
    seeded(race)
    for plan in (random.Random(seed).choice([*POLICIES]), random_plan_in_parts(race.program.graph, race.costs, seed)):
        losses, after = race.trained(race.fitted(plan))
        for one, other in zip([*losses, *after], [*exact[0], *exact[1]], strict=True):
            torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-4, equal_nan=True)


def test_a_mask_keeps_as_many_as_it_should_and_no_two_are_alike():
    torch.manual_seed(0)
    seeds, size = torch.randint(0, 2**62, [8]), 200_000
    for keep in (0.1, 0.5, 0.9):
        masks = torch.stack([seeded_mask(each, (size,), (1,), keep, torch.float64) for each in seeds])
        masks = torch.cat([masks, seeded_mask(seeds[0] + 1, (size,), (1,), keep, torch.float64)[None]])
        spread = (keep * (1 - keep) / size) ** 0.5
        assert (masks.mean(1) - keep).abs().max() < 5 * spread
        alike = torch.corrcoef(masks) - torch.eye(len(masks), dtype=torch.float64)
        assert alike.abs().max() < 5 / size**0.5
        for shift in (1, 2, 3, 32, 64, 1024):
            beside = torch.stack([torch.corrcoef(torch.stack([each[:-shift], each[shift:]]))[0, 1] for each in masks])
            assert beside.abs().max() < 5 / size**0.5


def test_a_mask_lies_as_it_is_asked_and_follows_the_places_in_memory():
    seed = torch.tensor(2**61 + 12345)
    form = torch.empty(3, 4, 5, 6).contiguous(memory_format=torch.channels_last)
    for each in (form, form.transpose(1, 3), torch.empty(3, 1, 4).as_strided((3, 1, 4), (4, 7, 1)), torch.empty(())):
        mask = seeded_mask(seed, each.shape, each.stride(), 0.5, torch.bfloat16)
        assert (mask.stride(), mask.dtype, mask.shape) == (each.stride(), torch.bfloat16, each.shape)
    flat = seeded_mask(seed, (360,), (1,), 0.5, torch.bool)
    assert torch.equal(
        seeded_mask(seed, form.shape, form.stride(), 0.5, torch.bool).permute(0, 2, 3, 1).flatten(), flat
    )


@pytest.mark.slow
def test_compiled_regions_have_the_mask_of_their_seed():
    torch.manual_seed(0)
    model, data = Dropping(), images()
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    step = fit(model, data, loss=F.cross_entropy, policy="checkpoint", compile=True)
    assert "dropout: 4 masks from seeds, which are not what eager PyTorch draws" in step.report().splitlines()
    for seed in (3, 4):
        exact.masks = plain.masks = masks_of(seed, data)
        torch.manual_seed(seed)
        found = gradients(model, step, data)
        right = gradients(exact, loss_of(exact), (data[0].double(), data[1]))
        own = gradients(plain, loss_of(plain), data)
        zero = [float(each.abs().max()) < 1e-12 for each in right]  # as the bias before a batch norm's
        ours, eager = (
            [each for each, skip in zip(errors(of, right), zero, strict=True) if not skip] for of in (found, own)
        )
        assert max(ours) <= 1.5 * max(max(eager), 1e-6)


def test_without_a_compiler_masks_are_those_of_the_plain_loop(monkeypatch):
    def no_compiler(*_):
        raise RuntimeError("there is no compiler")

    monkeypatch.setattr(compiled_regions, "compiled", no_compiler)
    monkeypatch.setattr(step_race, "compiled_whole", lambda function: function)
    torch.manual_seed(0)
    model, data = SmallNet(drop=0.4), images()
    step = fit(model, data, loss=F.cross_entropy, compile=True)
    assert not any(
        each.func is MASK for call in step.program.calls for each in (call, *getattr(call.func, "calls", ()))
    )
    assert "from seeds" not in step.report()
