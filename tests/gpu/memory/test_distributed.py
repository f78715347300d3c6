"""Fitted steps of several GPUs: NCCL averages gradients, and the buckets of DistributedDataParallel count."""

import json

import pytest
import torch

from tests.support.ranked_training import NUMBERS, WAYS, collectives_before, train_ranks
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.distributed.is_available()), reason="PyTorch has no GPU or no NCCL"
)

CASES = [
    {"policy": "stock", "options": {}},
    {"policy": "vdnn-ext-all-p", "options": {"gradient_as_bucket_view": True}},
    {"policy": "checkpoint", "every": 3, "options": {}},
]


def test_two_gpus_train_to_the_bits_of_plain_ranks(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    first, second = train_ranks(tmp_path / "store", "nccl", 2, WAYS, CASES)
    for found in (first, second):
        for case, (plain, *fitted) in zip(CASES, found, strict=True):
            for way, ours in zip(WAYS[1:], fitted, strict=True):
                assert [ours[each] for each in NUMBERS] == [plain[each] for each in NUMBERS], (way, case)
                assert (ours["moved"] > 0) == case["policy"].startswith("vdnn"), (way, case)
    for (one, *_), (other, *_) in zip(first, second, strict=True):
        assert one["losses"] != other["losses"], "the ranks had the same mini-batches"
        assert one["gradients"] == other["gradients"], "gradients were not averaged"


OVERLAPPED = [
    {"policy": "stock", "options": {}},
    {"policy": "vdnn-ext-all-p", "options": {"gradient_as_bucket_view": True}},
    {"policy": "checkpoint", "options": {}},
    {"policy": "moves", "seed": 0, "options": {}},
]


@pytest.mark.parametrize("world", [1, 2])
def test_buckets_are_averaged_while_backward_goes_on(tmp_path, world):
    """Collectives begin as early as in the plain loop, and all of backward runs in the thread of backward."""
    if torch.cuda.device_count() < world:
        pytest.skip("there is one GPU")
    ways, cases = (WAYS[0], WAYS[2]), [{**case, "watched": True} for case in OVERLAPPED]
    for found in train_ranks(tmp_path / "store", "nccl", world, ways, cases):
        for case, (plain, ours) in zip(OVERLAPPED, found, strict=True):
            assert [ours[each] for each in NUMBERS] == [plain[each] for each in NUMBERS], case
            assert ours["buckets"] == plain["buckets"], case
            assert ours["threads"] == plain["threads"] == 1, case
            if case["policy"] != "moves":
                early, total = collectives_before(ours["orders"][-1])
                assert (early, total) == collectives_before(plain["orders"][-1]), case
                assert 0 < early < total, case


BUDGET = """
import json
import sys

import torch
import torch.distributed as distributed
import torch.distributed.nn  # before there is a process group: see tests/support/ranks.py
from torch.nn.parallel import DistributedDataParallel

from tests.support.training_steps import training_step
from ucudnn.memory import fit
from ucudnn.memory.torch.device.stated_budget import outside_bytes, reserve_bytes

distributed.init_process_group("nccl", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
torch.cuda.set_device(0)
torch.manual_seed(0)
step = training_step("resnet18")
x, y = step.inputs[0].cuda().repeat(16, 1, 1, 1), step.targets[0].cuda().repeat(16)
parallel = DistributedDataParallel(step.model.cuda().train())
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01, momentum=0.9)


def peak(call):
    for number in range(4):
        if number == 2:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        call(x, y).backward()
        optimizer.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


plain = peak(lambda x, y: step.loss(parallel(x), y))
budget = int(float(sys.argv[3]) * plain)  # of what PyTorch's allocator gives out; the whole budget has more in it
device = torch.device("cuda", 0)
beside = outside_bytes(device) + reserve_bytes(0, device)
fitted = fit(parallel, (x, y), loss=step.loss, optimizer=optimizer, budget=budget + beside)
found = {"plain": plain, "budget": budget, "measured": peak(fitted), "report": fitted.report()}
last = fitted(x[:3], y[:3])
last.backward()
found["smaller"] = torch.cuda.max_memory_allocated()
print(json.dumps(found))
distributed.destroy_process_group()
"""


def test_buckets_count_in_the_budget(tmp_path):
    ((output, errors, status),) = run_ranks(BUDGET, tmp_path / "store", 0.98, world=1, timeout=500)  # two plans
    assert status == 0, errors
    found = json.loads(output.splitlines()[-1])
    assert found["measured"] <= found["budget"], found
    assert found["smaller"] <= found["budget"], found
    assert "among the buffers: buckets of DistributedDataParallel" in found["report"]
