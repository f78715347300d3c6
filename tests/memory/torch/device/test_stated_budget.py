"""Tests of what a fitted step says of itself: who has how much memory, what was done to which layer, and times."""

import gc
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.support.shared_gpu import GPU, MIB, SharedGpu
from tests.support.training_steps import small_unet
from ucudnn.errors import BudgetError
from ucudnn.memory import fit
from ucudnn.memory.torch.device.stated_budget import (
    StatedBudget,
    memory_parts,
    other_bytes,
    outside_bytes,
    reserve_bytes,
    stated_budget,
)
from ucudnn.memory.torch.device.step_clock import StepClock

CPU = torch.device("cpu")


def fitted(policy, kind=torch.optim.Adam):
    torch.manual_seed(0)
    model, sample = small_unet(), (torch.randn(2, 3, 16, 16), torch.zeros(2, 16, 16, dtype=torch.int64))
    optimizer = kind(model.parameters())
    step = fit(model, sample, loss=torch.nn.functional.cross_entropy, optimizer=optimizer, policy=policy)
    return step, model, sample, optimizer


def test_each_part_has_its_bytes_before_a_step_has_run():
    step, model, sample, _ = fitted("stock")
    parts = memory_parts(step.plan.graph, step.costs)
    parameters = sum(each.nbytes for each in model.parameters())
    assert parts["parameters"] == parts["gradients"] == parameters
    assert 2 * parameters <= parts["optimizer state"] < 2 * parameters + 1000  # Adam makes its state in its first step
    assert parts["inputs"] == sum(each.nbytes for each in sample)
    assert parts["buffers"] == pytest.approx(sum(each.nbytes for each in model.buffers()), abs=1000)


def test_the_report_says_what_was_done_to_which_layer():
    step, _, sample, optimizer = fitted("vdnn-all-p")
    for _ in range(3):
        optimizer.zero_grad()
        step(*sample).backward()
        optimizer.step()
    text = step.report()
    assert text.startswith("UNet, mini-batch 2, predicted for h200, not measured: policy vdnn-all-p")
    assert "in 2 steps" in text  # the first one does not count
    for name in ("parameters", "gradients", "optimizer state", "host memory", "floor", "link"):
        assert re.search(rf"^{name}: .*\d", text, re.M), name
    assert re.search(r"^offloaded of \S+: \d+ storages?, ", text, re.M)
    assert "recomputed" not in text


def test_a_plan_that_recomputes_does_not_use_the_link():
    text = fitted("checkpoint")[0].report()
    assert "link: not used" in text
    assert re.search(r"^recomputed of ", text, re.M)
    assert ", measured" not in text
    assert "every storage stays" in fitted("stock")[0].report()


def test_a_forward_without_its_backward_is_no_step():
    clock = StepClock(CPU)
    clock.end()
    for _ in range(2):
        clock.begin()
        clock.begin()
        clock.end()
    clock.end()
    assert len(clock.times_ms()) == 2
    assert min(clock.times_ms()) >= 0


def test_a_stated_budget_is_a_total_of_which_the_plan_has_the_rest():
    stated = StatedBudget(budget=1000, library_bytes=100, outside_bytes=300)
    assert stated.tensor_bytes == 600
    kept = replace(stated, reserve_bytes=50)
    assert kept.tensor_bytes == 550
    assert "later: 50 B" in kept.lines()[0]
    with pytest.raises(BudgetError, match=r"50 bytes.*for kernels that are loaded later") as caught, kept.explained():
        raise BudgetError("too little", kernel="conv", limit_bytes=550, required_bytes=700)
    assert caught.value.required_bytes == 1150
    assert StatedBudget(budget=None).tensor_bytes is None
    with pytest.raises(BudgetError, match="the stated budget is 1000 bytes") as caught, stated.explained():
        raise BudgetError("too little", kernel="conv", limit_bytes=600, required_bytes=700)
    assert (caught.value.limit_bytes, caught.value.required_bytes, caught.value.kernel) == (1000, 1100, "conv")


def test_the_report_says_what_the_allocator_takes_and_why_it_may_take_more():
    fits = StatedBudget(budget=1000, outside_bytes=300, allocator_bytes=600)
    assert fits.lines() == ["taken from the device: predicted 900 B at most, holes between tensors included"]
    (line, why) = StatedBudget(budget=1000, outside_bytes=300, allocator_bytes=800, fixed_segments="because").lines()
    assert "predicted 1.07 KiB at most" in line
    assert "exceeds the budget" in line
    assert "because" in why
    back = replace(fits, returned_bytes=2**30, returned_ms=5.25).lines()[1]
    assert "1 GiB in each step, about 5.25 ms" in back


@pytest.fixture
def shared(monkeypatch):
    """Return a GPU, by processes: ours is number 7 and has 500 MiB in PyTorch's allocator."""
    return SharedGpu(monkeypatch, reserved=500 * MIB)


def test_what_the_process_has_beside_the_allocator_is_subtracted_and_what_others_have_is_not(shared):
    shared.processes = {7: 1200 * MIB}
    assert stated_budget(2000 * MIB, GPU).tensor_bytes == 1300 * MIB
    shared.processes[8] = 30000 * MIB
    stated = stated_budget(2000 * MIB, GPU)
    assert stated.tensor_bytes == 1300 * MIB
    assert stated.lines() == []
    assert stated_budget(None, GPU).tensor_bytes is None


def stored(address, size, **more):
    """Return what stands for a tensor on a GPU."""
    storage = SimpleNamespace(data_ptr=lambda: address, nbytes=lambda: size)
    return SimpleNamespace(is_cuda=True, untyped_storage=lambda: storage, **more)


def test_tensors_that_are_none_of_the_step_s_are_subtracted_when_the_collector_has_run(monkeypatch):
    own = [stored(1, 100 * MIB), stored(1, 100 * MIB), stored(2, 50 * MIB)]
    own.append(SimpleNamespace(is_cuda=True, _local_tensor=stored(3, 7 * MIB)))  # of a DTensor
    allocated, collected = [1157 * MIB, 657 * MIB], []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: allocated[len(collected)])
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    assert other_bytes(GPU, own) == 500 * MIB
    assert collected == [1]
    collected.clear()
    allocated[:] = [170 * MIB] * 2
    assert other_bytes(GPU, own) == 0, "libraries keep a little"
    assert other_bytes(GPU, own[:1], more=57 * MIB) == 0
    assert not collected
    assert other_bytes(CPU, own) == 0
    stated = StatedBudget(budget=1000, other_bytes=200, outside_bytes=300, allocator_bytes=400)
    assert stated.tensor_bytes == 500
    assert stated.lines()[0] == "tensors of this process that are none of the step's: 200 B"
    assert "predicted 900 B at most" in stated.lines()[1]
    with pytest.raises(BudgetError, match="200 bytes of tensors that are none of the step's"), stated.explained():
        raise BudgetError("too little", kernel="conv", limit_bytes=500, required_bytes=700)


def test_what_a_step_has_is_told_from_other_tensors_when_it_is_fitted(monkeypatch):
    _, model, sample, optimizer = fitted("stock")
    loss, given = torch.nn.functional.cross_entropy, []
    model.table = torch.zeros(3)  # no buffer
    loss(model(*sample[:1]), sample[1]).backward()
    optimizer.step()
    module = sys.modules["ucudnn.memory.torch.running.fit"]
    monkeypatch.setattr(module, "other_bytes", lambda *args: given.append(args) or 5_000_000)
    options = {"loss": loss, "optimizer": optimizer}
    with pytest.raises(BudgetError, match=r"4\.\d+ MiB of tensors that are none"):
        fit(model, sample, budget=5_001_000, **options)
    step = fit(model, sample, budget=50_000_000, **options)
    assert step.stated.tensor_bytes == 45_000_000
    _, own, buckets = given[-1]
    states = [each for state in optimizer.state.values() for each in state.values()]
    every = [*model.parameters(), *model.buffers(), *(each.grad for each in model.parameters()), *states, *sample]
    every.append(model.table)
    assert {id(each) for each in own} == {id(each) for each in every}
    assert buckets == 0
    optimizer.zero_grad()
    step(*sample)  # as planned; another mini-batch has the same other tensors
    step(*(each[:1] for each in sample))
    assert {each.stated.other_bytes for each in (step, *step._others)} == {5_000_000}
    assert len(given) == 2


def test_where_the_driver_does_not_tell_processes_apart_others_count_up_to_a_bound_and_that_is_said(
    shared, monkeypatch
):
    shared.processes = {107: 1200 * MIB}  # alone, under another name
    assert outside_bytes(GPU) == 700 * MIB
    shared.processes[108] = 1600 * MIB
    shared.silent = True
    stated = stated_budget(3000 * MIB, GPU)
    assert stated.outside_bytes == 2048 * MIB, "context and kernels take no more"
    assert re.search("does not tell .* other processes .* up to 2 GiB", "\n".join(stated.lines()))
    with (
        pytest.raises(BudgetError, match="2 GiB of context, modules and NCCL, or of other processes"),
        stated.explained(),
    ):
        raise BudgetError("too little", kernel="conv", limit_bytes=1, required_bytes=2)
    shared.processes[108] = 100 * MIB
    assert outside_bytes(GPU) == 800 * MIB
    shared.processes[108] = 30000 * MIB
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert outside_bytes(GPU) == 3072 * MIB, "NCCL has buffers"


def test_kernels_that_measuring_loads_count_and_what_others_take_meanwhile_does_not(shared):
    shared.processes = {7: 1200 * MIB, 8: 1900 * MIB}
    before = stated_budget(4000 * MIB, GPU)
    shared.processes = {7: 1210 * MIB, 8: 5000 * MIB}
    stated = stated_budget(4000 * MIB, GPU)
    shared.processes[7] = 1280 * MIB
    after = stated.with_loaded_kernels(GPU, since=before)
    assert (after.outside_bytes, after.reserve_bytes) == (780 * MIB, 20 * MIB)
    shared.silent = True  # now nothing tells how much was loaded
    after = before.with_loaded_kernels(GPU, since=before)
    assert after.outside_bytes == 700 * MIB
    assert 104 * MIB <= after.reserve_bytes <= 160 * MIB
    silent = stated_budget(4000 * MIB, GPU)
    silent = silent.with_loaded_kernels(GPU, since=silent)
    assert (silent.outside_bytes, silent.reserve_bytes) == (2048 * MIB, 16 * MIB)
    shared.processes = {7: 600 * MIB}
    before = stated_budget(4000 * MIB, GPU)
    shared.processes[8] = 10000 * MIB
    after = before.with_loaded_kernels(GPU, since=before)
    assert (before.outside_bytes, after.outside_bytes) == (100 * MIB, 2048 * MIB)
    assert after.reserve_bytes <= 64 * MIB, "what others take is no sign of kernels"
    shared.processes[7] = 1280 * MIB
    shared.silent = False
    after = silent.with_loaded_kernels(GPU, since=silent)
    assert (after.outside_bytes, after.told_apart, after.lines()[1:]) == (780 * MIB, True, [])


def test_kernels_that_are_loaded_later_have_a_reserve_by_what_was_loaded_so_far():
    gpu, mib = torch.device("cuda", 0), 2**20
    assert reserve_bytes(0, gpu) == reserve_bytes(-mib, gpu) >= 10 * mib  # what an H200 showed to grow later
    assert reserve_bytes(400 * mib, gpu) == 100 * mib
    assert reserve_bytes(400 * mib, CPU) == 0
