"""A GPU that another process uses, too: what that takes is not taken for this process's, and changes no plan."""

import subprocess
import sys
import warnings

import pytest
import torch

from tests.support.training_steps import training_step
from ucudnn.memory import fit
from ucudnn.memory.torch.device.stated_budget import outside_bytes, read_outside

MIB = 2**20
OTHER = """
import sys
import torch
held = []
for line in sys.stdin:
    held.append(torch.zeros(int(line), dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    print("taken", flush=True)
"""


@pytest.fixture
def other():
    """Return a function that lets another process take bytes of the GPU."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )

    def take(size):
        process.stdin.write(f"{size}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "taken\n"

    yield take
    with process:  # closes both pipes and waits
        pass


def test_what_another_process_takes_is_not_this_ones(other, device):
    held = torch.zeros(64 * MIB, dtype=torch.uint8, device=device)
    before = read_outside(device)
    other(4096 * MIB)
    after = read_outside(device)
    if before.told_apart and after.told_apart:
        assert abs(after.bytes - before.bytes) < 64 * MIB
    else:
        assert after.bytes <= 3 * 1024 * MIB
    assert held.is_cuda


def test_what_another_process_takes_while_a_plan_runs_leaves_it(other, device):
    torch.manual_seed(0)
    step = training_step("resnet18")
    model = step.model.cuda().train()
    x, y = step.inputs[0].cuda().repeat(16, 1, 1, 1), step.targets[0].cuda().repeat(16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    peak = fit(model, (x, y), loss=step.loss, optimizer=optimizer).simulation.peak_bytes
    budget = peak + outside_bytes(device) + 512 * MIB  # room for workspaces, the reserve and kernels that come late
    fitted = fit(model, (x, y), loss=step.loss, optimizer=optimizer, budget=budget)
    plans = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="kernels that were loaded")
        for _ in range(9):
            optimizer.zero_grad()
            fitted(x, y).backward()
            optimizer.step()
            plans.append(fitted.plan)
            other(1024 * MIB)
    assert fitted._guard._steps >= 8, "nothing looked at what grew"
    assert all(plan is plans[2] for plan in plans[2:]), fitted.report()
    fitted.close()
