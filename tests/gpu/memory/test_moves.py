"""Storages that move on a GPU: PyTorch's bits, a block that is taken before the first step, and no page given back."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from bench.memory.record_steps import RECIPES
from tests.gpu.memory.trials import trial
from tests.support.large_unet import RECIPE
from tests.support.moving_plans import shaken
from tests.support.plain_training import Race, train
from tests.support.small_networks import small_network
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.torch.codegen.code_support import arrive, leave
from ucudnn.memory.torch.comparison.trial_result import PYTORCH
from ucudnn.memory.torch.device.allocator_meter import AllocatorMeter, _Addresses, drop, pads
from ucudnn.memory.torch.device.stated_budget import library_workspace_bytes, outside_bytes
from ucudnn.memory.torch.device.stream_copies import slide
from ucudnn.memory.torch.running.fit import FitOptions, fit, fit_subject

pytestmark = pytest.mark.usefixtures("fixed_plans")

MIB = 2**20


@pytest.mark.parametrize("policy", ["checkpoint", "vdnn-ext-all-p"])
def test_storages_that_move_at_random_change_no_bit(policy):
    torch.manual_seed(0)
    trained = Race(small_network("resnet18"), steps=3, device="cuda")
    if [*map(float, trained.plain()[0])] != [*map(float, trained.losses)]:
        pytest.skip("PyTorch's own step does not repeat itself here")
    plan = make_plan(trained.program.graph, trained.costs, None, policy)
    step = trained.fitted(shaken(plan, trained.costs, 1))
    trained.check(step)
    step.close()


@pytest.mark.parametrize("distance", [8 * MIB, 3 * MIB + 512, 2 * MIB])
def test_a_freed_storage_slides_into_the_hole_beside_it_and_takes_no_more_memory(distance):
    size = 40 * MIB
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        whole = torch.empty(size + distance + 20 * MIB, dtype=torch.uint8, device="cuda")
        del whole
        first = torch.empty(distance, dtype=torch.uint8, device="cuda")
        tensor = torch.randint(256, (size,), dtype=torch.uint8, device="cuda")
        end = torch.empty(18 * MIB, dtype=torch.uint8, device="cuda")
        expected, before = tensor.cpu(), tensor.data_ptr()
        assert before == first.data_ptr() + distance, "the hole is elsewhere, so this tests nothing"
        reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        del first
        left = leave(tensor)
        del tensor
        tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
        arrive(tensor, left)
        assert tensor.data_ptr() == before - distance
        assert torch.equal(tensor.cpu(), expected)
        assert torch.cuda.memory_reserved() == reserved
        assert torch.cuda.max_memory_allocated() == allocated
        del end, tensor


@pytest.mark.parametrize("distance", [0, 512, 4096 + 512, MIB, 30 * MIB])
@pytest.mark.parametrize("up", [False, True])
def test_bytes_slide_in_both_directions(distance, up):
    size = 64 * distance if 0 < distance < 8192 else 20 * MIB
    memory = torch.randint(256, (size + distance,), dtype=torch.uint8, device="cuda")
    low, high = memory[:size], memory[distance:]
    source, target = (low, high) if up else (high, low)
    expected = source.cpu()
    slide(target, source.data_ptr())
    assert torch.equal(target.cpu(), expected)


def test_a_budget_takes_its_block_before_the_first_step_and_keeps_bytes_for_the_state_no_longer_than_the_update(device):
    torch.manual_seed(0)
    trained = Race(small_network("resnet18"), steps=1, device="cuda")
    trained.model.zero_grad()
    budget = 2**30 + torch.cuda.memory_allocated() + outside_bytes(device)
    step = fit_subject(trained.subject, FitOptions(budget=budget, policy="checkpoint", measured=True))
    assert step._block is not None
    assert step._block.taken
    assert torch.cuda.memory_reserved() + outside_bytes(device) <= budget
    before = torch.cuda.memory_reserved()
    train(step, trained.subject.optimizers[0], trained.inputs, steps=3)
    assert torch.cuda.memory_reserved() <= before + 4 * MIB  # small tensors have pages of their own
    assert step._block._kept == []
    assert step._block._pads == []
    step.close()


@pytest.mark.alone
def test_what_fills_holes_counts_for_no_step_and_goes_back_after_an_error(device):
    before, meter = torch.cuda.memory_allocated(), AllocatorMeter(device)
    meter.begin()
    filling = pads((30 * MIB, 20 * MIB, 10 * MIB), device, (1,))
    assert isinstance(filling, _Addresses), "the slower way ran"
    assert torch.cuda.memory_allocated() == before + 40 * MIB
    beside = torch.empty(8 * MIB, dtype=torch.uint8, device=device)
    drop(filling)
    assert torch.cuda.memory_allocated() == before + 8 * MIB
    assert meter.taken_bytes() == 8 * MIB
    del beside

    def fails():
        _held = pads((30 * MIB,), device, ())
        raise KeyError

    with suppress(KeyError):
        fails()
    assert torch.cuda.memory_allocated() == before


def beside_stock(recipe, share):
    """Return the budget of a share of PyTorch's peak, the figures of `auto` within it, and what they tell."""
    stock = trial(PYTORCH, recipe=recipe, steps=3, warmup=1)
    budget = int(share * stock.allocated) + stock.outside
    figures = trial("auto", budget, recipe, steps=3, warmup=1, capped=True)
    told = (
        f"moved {figures.moved}, reserved {figures.reserved}, predicted {figures.predicted_reserved}, allocated"
        f" {figures.allocated}, predicted {figures.predicted_peak}, {figures.step_ms} ms, predicted"
        f" {figures.predicted_ms}, given back {figures.predicted_returned}, retries {figures.retries}"
    )
    return budget, figures, told


@pytest.mark.alone
@pytest.mark.parametrize("recipe", [RECIPE, replace(RECIPES["vgg16_bn"], batch=64)], ids=["unet", "vgg"])
def test_a_plan_near_the_budget_gives_no_page_back(recipe):
    budget, figures, told = beside_stock(recipe, 0.7)
    assert figures.reserved + figures.outside <= budget, told
    if figures.predicted_returned == 0:
        assert figures.retries == 0, f"a tensor lies elsewhere than in the replay: {told}"
        assert figures.predicted_reserved == pytest.approx(figures.reserved, rel=0.03), told
    assert figures.predicted_peak == pytest.approx(figures.allocated, rel=0.02), told


@pytest.mark.alone
def test_a_block_is_whole_again_after_a_smaller_last_mini_batch(device):
    model, (x, y), loss = small_network("resnet18")
    model.cuda()
    sample = x.repeat(16, 1, 1, 1).cuda(), y.repeat(16).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    peak = fit(model, sample, loss=loss, optimizer=optimizer).simulation.peak_bytes
    budget = peak + outside_bytes(device) + library_workspace_bytes(device) + 160 * MIB  # pages have 20 MiB
    step = fit(model, sample, loss=loss, optimizer=optimizer, budget=budget)
    assert step.has_block, step.stated
    block = step._block
    for size in (64, 64, 40, 64, 40, 64):
        optimizer.zero_grad()
        step(sample[0][:size], sample[1][:size]).backward()
        optimizer.step()
        assert block.taken
        assert torch.cuda.memory_reserved() >= block._layout.block_bytes
        assert torch.cuda.memory_reserved() + outside_bytes(device) <= budget
    assert [other.plan.graph.batch for other in step._others] == [40]
    step.close()


@pytest.mark.alone
@pytest.mark.parametrize(
    ("recipe", "share"),
    [
        (replace(RECIPES["unet2d"], batch=8), 0.5),
        (replace(RECIPES["unet3d"], batch=4), 0.7),
        (replace(RECIPES["unet3d"], batch=4), 0.5),
        (replace(RECIPES["vgg16_bn"], batch=64), 0.5),
    ],
    ids=["unet2d-50", "unet3d-70", "unet3d-50", "vgg-50"],
)
def test_the_allocator_takes_at_most_a_twentieth_more_than_tensors_have(recipe, share):
    _, figures, told = beside_stock(recipe, share)
    assert figures.predicted_returned == 0, told
    assert figures.retries == 0, told
    assert figures.reserved <= 1.05 * figures.allocated, told
    assert figures.step_ms <= 1.05 * figures.predicted_ms, told
