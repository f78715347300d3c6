"""Plans on a GPU: PyTorch's bits, copies beside compute, budgets that hold, and host memory that is given back."""

import copy
import gc
import os
import subprocess
import sys
import textwrap
from time import sleep

import pytest
import torch

from tests.gpu.memory.trials import outcome, trial
from tests.support.training_steps import training_step
from ucudnn.memory.pools.host_slots import HostSlots
from ucudnn.memory.simulation.result import Queue
from ucudnn.memory.simulation.simulator import predicted_bytes, simulate
from ucudnn.memory.torch.comparison.device_timeline import measure_timeline
from ucudnn.memory.torch.device.nvml import process_bytes
from ucudnn.memory.torch.device.stated_budget import library_workspace_bytes, outside_bytes, reserve_bytes
from ucudnn.memory.torch.measuring.operation_costs import measure_operator
from ucudnn.memory.torch.running.fit import fit
from ucudnn.memory.torch.running.transfers import Transfers

pytestmark = pytest.mark.usefixtures("fixed_plans")
ALONE = pytest.mark.alone  # others' memory may count as ours, and their work changes which algorithms trials choose

MIB = 2**20
STEPS = 5
LARGEST = 256 * MIB  # more than any tensor of UNET has, and any scratch


def model_and_data(name):
    torch.manual_seed(0)
    step = training_step(name)
    return step.model.cuda().train(), step.loss, (step.inputs[0].cuda(), step.targets[0].cuda())


def train(fitted, model, sample):
    """Train by a fitted step from the same random numbers; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    torch.manual_seed(1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = fitted(*sample)
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return losses


def beside_plans(device):
    """Return the bytes of a budget that no plan can use, but for what is outside of PyTorch's allocator.

    They are libraries' workspaces, the reserve for kernels, and holes between what earlier tests left.
    """
    gc.collect()
    library = library_workspace_bytes(device)
    torch.cuda.empty_cache()
    holes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return library + reserve_bytes(0, device) + holes


def transfers_of_two(size, device):
    slots = HostSlots(sizes={0: size, 1: size}, addresses={0: 0, 1: size}, extent_bytes=2 * size)
    return Transfers(slots, device)


def test_bytes_come_back_while_compute_goes_on(device):
    size = 64 * MIB
    transfers = transfers_of_two(size, device)
    weights = torch.randn(4096, 4096, device=device)
    for step in range(3):
        for number in (0, 1):
            sent = torch.full((size // 4,), float(step + number), device=device)
            transfers.offload(number, sent)
            weights = (weights @ weights).clamp_(-1, 1)
            transfers.wait_offload(number)
            del sent  # its memory is used again at once
            torch.full((size // 4,), -1.0, device=device)
        for number in (0, 1):
            torch.full((size // 4,), -2.0, device=device)
            back = torch.empty(size // 4, device=device)
            transfers.prefetch(number, back)
            weights = (weights @ weights).clamp_(-1, 1)
            transfers.wait_prefetch(number)
            assert bool((back == step + number).all())
            del back
    transfers.close()


def test_copies_both_ways_run_beside_a_long_product(device):
    size = 256 * MIB  # 5 ms on a fast link: longer than the host takes to launch the product
    transfers = transfers_of_two(size, device)
    weights, sent = torch.randn(8192, 8192, device=device), torch.ones(size // 4, device=device)
    back = torch.empty(size // 4, device=device)

    def run():
        transfers.offload(1, sent)
        transfers.wait_offload(1)
        transfers.offload(0, sent)
        transfers.prefetch(1, back)
        weights @ weights
        transfers.wait_offload(0)
        transfers.wait_prefetch(1)

    run()
    found = measure_timeline(run, device, transfers)
    assert found is not None, "PyTorch's profiler does not see this GPU"
    assert found.busy_ms(Queue.TO_HOST) > 0
    assert found.busy_ms(Queue.FROM_HOST) > 0
    assert found.overlap > 0.4  # the first of three copies runs beside nothing
    transfers.close()


def test_the_block_is_released_with_its_step_and_after_an_error(device):
    slots = HostSlots(sizes={0: MIB}, addresses={0: 0}, extent_bytes=MIB)
    for end in ("collected", "abandoned"):
        transfers = Transfers(slots, device)
        memory = transfers._block.memory
        transfers.offload(0, torch.zeros(MIB, dtype=torch.uint8, device="cuda"))
        assert memory.is_pinned()
        if end == "collected":
            del transfers
            gc.collect()
        else:
            transfers.abandon()
        assert not memory.is_pinned(), end


def test_an_error_in_a_step_leaves_the_next_one_right():
    model, loss, sample = model_and_data("resnet18")
    untouched = copy.deepcopy(model.state_dict())
    fitted = fit(model, sample, loss=loss, policy="vdnn-all-p")
    expected = train(fitted, model, sample)
    model.load_state_dict(untouched)
    value = fitted(*sample)
    del value  # its backward never runs, and copies are under way
    model.load_state_dict(untouched)
    assert all(map(torch.equal, train(fitted, model, sample), expected))
    fitted.close()


@ALONE
def test_the_clocks_own_events_count_as_nothing(device):
    assert measure_operator(lambda: None, device, 5).time_ms < 0.001
    assert measure_operator(lambda: torch.ones(2**28, device=device), device, 5).time_ms > 0.1


@ALONE
def test_the_hosts_time_to_issue_an_operator_is_not_the_devices(device):

    def slowly():
        sleep(0.003)
        torch.ones(8, device=device)

    quick, slow = (measure_operator(each, device, 5) for each in (lambda: torch.ones(2**28, device=device), slowly))
    assert quick.issue_ms < quick.time_ms
    assert slow.issue_ms > 3 > slow.time_ms


@ALONE
def test_copies_run_beside_compute():
    figures = trial("vdnn-ext-all-p")
    assert figures.offloaded == figures.prefetched > 100 * MIB
    assert figures.pinned >= figures.offloaded
    assert figures.overlap is not None, "PyTorch's profiler does not see this GPU"
    assert figures.overlap > 0.01  # a fast GPU computes in a small part of the time that copies take


@ALONE
def test_a_budget_holds_where_the_allocator_may_take_no_more():
    stock = trial("pytorch")
    budget = int(0.8 * stock.allocated) + stock.outside
    result = outcome("checkpoint", budget, capped=True)
    if result.least_bytes is not None:  # what a refusal names is enough
        assert budget < result.least_bytes < 1.1 * budget, result.reason
        budget = result.least_bytes
    figures = trial("checkpoint", budget, capped=True)
    assert figures.reserved + figures.outside <= budget, (
        f"kernels: {figures.outside} of {figures.counted_outside} bytes: {figures.reached}"
    )
    assert figures.predicted_peak == pytest.approx(figures.allocated, rel=0.02)
    # PyTorch compares its bound with the reserved bytes and a whole tensor, though the range grows by less than that
    if figures.predicted_reserved + LARGEST + figures.outside <= budget:
        assert figures.retries == 0, "the plan does not fit side by side"
        assert figures.predicted_reserved == pytest.approx(figures.reserved, rel=0.05)


@ALONE
def test_the_allocator_takes_what_the_replay_says():
    stock = trial("pytorch")
    budget = int(0.85 * stock.allocated) + stock.outside
    figures = trial("checkpoint", budget)
    assert figures.predicted_reserved == pytest.approx(figures.reserved, rel=0.05)
    assert figures.predicted_reserved + figures.outside <= budget
    assert figures.reserved + figures.outside <= budget, (
        f"kernels: {figures.outside} of {figures.counted_outside} bytes: {figures.reached}"
    )
    assert figures.retries == 0
    assert figures.allocated > 1.05 * figures.floor, "the plan of the first step stayed"


@ALONE
@pytest.mark.parametrize("trials", [False, True])
def test_the_first_step_within_a_budget_takes_less_than_the_others(monkeypatch, trials, device):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", trials)
    model, loss, (x, y) = model_and_data("resnet18")
    sample = x.repeat(16, 1, 1, 1), y.repeat(16)  # activations are most of it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    peak = fit(model, sample, loss=loss, optimizer=optimizer).simulation.peak_bytes
    beside = beside_plans(device)  # before what is outside is measured, because it loads kernels
    fitted = fit(model, sample, loss=loss, optimizer=optimizer, budget=int(0.9 * peak) + beside + outside_bytes(device))
    taken, plans = [], []
    for _ in range(3):
        optimizer.zero_grad()
        level = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        fitted(*sample).backward()
        taken.append(torch.cuda.max_memory_allocated() - level)
        plans.append(fitted.plan if fitted._first is None else fitted._first.run.plan)
        optimizer.step()
    assert plans[0] is not plans[1], f"the plan of the first step stayed: {fitted.stated}"
    assert plans[1] is plans[2], f"kernels grew beyond the reserve: {fitted.stated}, now {outside_bytes(device)}"
    predicted = [predicted_bytes(plan, fitted.costs, simulate(plan, fitted.costs)) for plan in plans]
    scratch = sorted(zip(fitted.costs.scratch_bytes, map(str, fitted.plan.graph.operations), strict=True))[-3:]
    assert taken == pytest.approx(predicted, rel=0.02), f"cuDNN chose other algorithms than measured: {scratch}"
    assert taken[0] < taken[1]
    assert taken[1] == pytest.approx(taken[2], rel=0.02)
    assert fitted.simulation.peak_bytes <= fitted.stated.tensor_bytes <= int(0.9 * peak) + beside


def test_a_budget_lets_segments_grow_while_the_program_runs():
    script = """
        import torch
        from ucudnn.memory.torch.device.allocator import expand_segments
        kept = torch.ones(3 << 20, device="cuda")
        assert expand_segments(torch.device("cuda", 0)) == "", "PyTorch refuses"
        more = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
        kinds = {each["is_expandable"] for each in torch.cuda.memory_snapshot()}
        assert kinds == {False, True}, kinds
        assert bool((kept == 1).all())
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTORCH")}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=environment)


@ALONE
def test_what_the_process_has_beside_the_allocator_is_measured(device):
    torch.zeros(1, device=device)
    before = outside_bytes(device)
    assert 100 * MIB < before < 4096 * MIB
    held = torch.zeros(512 * MIB, dtype=torch.uint8, device=device)
    assert abs(outside_bytes(device) - before) < 64 * MIB, "what the allocator has counts as outside of it"
    own = process_bytes(device, least=torch.cuda.memory_reserved(device))
    assert own is None or own >= torch.cuda.memory_reserved(device) > held.nbytes


@ALONE
def test_measuring_operations_keeps_the_budget(device):
    model, loss, sample = model_and_data("resnet18")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.get_per_process_memory_fraction()
    others = torch.cuda.memory_reserved() - sum(each.nbytes for each in model.state_dict().values())
    torch.cuda.reset_peak_memory_stats()
    floor = fit(model, sample, loss=loss, policy="checkpoint").simulation.peak_bytes
    inside = int(1.3 * floor) + beside_plans(device)
    torch.cuda.reset_peak_memory_stats()
    fitted = fit(model, sample, loss=loss, budget=inside + outside_bytes(device), policy="checkpoint")
    taken = torch.cuda.max_memory_reserved() - others
    assert taken <= inside, f"{taken} of {inside} bytes beside {others} of others: {fitted.stated}"
    assert torch.cuda.get_per_process_memory_fraction() == before
