"""Fitted steps of several processes: DistributedDataParallel averages gradients, and FSDP shards parameters."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import ucudnn.memory
from tests.support.forked_ranks import run_forked_ranks
from tests.support.ranked_training import NUMBERS, WAYS, train_ranks
from tests.support.small_networks import InPlace, small_network
from ucudnn.errors import InvalidValueError

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")

CASES = [
    {"policy": "stock", "options": {}},
    {"policy": "vdnn-ext-all-p", "options": {"gradient_as_bucket_view": True}},
    {"policy": "checkpoint", "options": {"find_unused_parameters": True}},
    {"policy": "vdnn-ext-all-p", "every": 3, "options": {}},
    {"policy": "checkpoint", "options": {"static_graph": True}},
]


def test_two_ranks_train_to_the_bits_of_plain_ranks(tmp_path):
    first, second = train_ranks(tmp_path / "store", "gloo", 2, WAYS, CASES)
    for found in (first, second):
        for case, (plain, *fitted) in zip(CASES, found, strict=True):
            for way, ours in zip(WAYS[1:], fitted, strict=True):
                assert [ours[each] for each in NUMBERS] == [plain[each] for each in NUMBERS], (way, case)
                assert (ours["moved"] > 0) == case["policy"].startswith("vdnn"), (way, case)
                assert ("buckets of DistributedDataParallel" in ours["report"]) == (way == "fit around"), case
                assert ("gradients of earlier steps" in ours["report"]) == ("every" in case), (way, case)
    for (one, *_), (other, *_) in zip(first, second, strict=True):
        assert one["losses"] != other["losses"], "the ranks had the same mini-batches"
        assert one["gradients"] == other["gradients"], "gradients were not averaged"


SHARDED = """
import copy
import os
import sys

import torch
import torch.distributed as distributed
import torch.distributed.nn  # before there is a process group: see tests/support/ranks.py
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from tests.support.small_networks import InPlace
from ucudnn.memory import fit

rank, store = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
model = InPlace()
generator = torch.Generator().manual_seed(5 + rank)
data = [(torch.randn(4, 3, 8, 8, generator=generator), torch.randint(5, (4,), generator=generator)) for _ in range(5)]
plain = fully_shard(copy.deepcopy(model), mesh=mesh)
step = fully_shard(fit(model, data[0], loss=functional.cross_entropy, policy="checkpoint", debug=True), mesh=mesh)
losses = []
for trained, call in ((plain, lambda x, y: functional.cross_entropy(plain(x), y)), (step, step)):
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    for x, y in data:
        optimizer.zero_grad()
        loss = call(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
pairs = zip(plain.parameters(), step.parameters(), strict=True)
assert all(torch.equal(one.to_local(), other.to_local()) for one, other in pairs)
assert all(one.to_local().numel() < one.numel() for one in step.parameters() if one.shape[0] % 2 == 0)
assert losses[:5] == losses[5:], losses
together = torch.nn.SyncBatchNorm.convert_sync_batchnorm(InPlace())
for refused in (plain, together):
    try:
        fit(refused, data[0], loss=functional.cross_entropy)
    except ValueError as error:
        print(error)
distributed.barrier()
distributed.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # FSDP keeps groups until Python ends, and so the threads of Gloo: see tests/support/ranks.py
"""


def test_a_sharded_step_trains_to_the_bits_of_a_sharded_model(tmp_path):
    for output, errors, status in run_forked_ranks(SHARDED, tmp_path / "store"):
        assert status == 0, errors
        assert "the model is sharded by FSDP" in output
        assert "call fully_shard on the fitted step" in output
        assert "module 'first.1' is a SyncBatchNorm, which waits for other processes" in output


@pytest.mark.usefixtures("alone")
def test_a_model_in_distributed_data_parallel_is_evaluated_and_planned_as_one(monkeypatch):
    torch.manual_seed(0)
    model, (x, y), loss = small_network("inplace")
    parallel = DistributedDataParallel(model)
    step = ucudnn.memory.fit(parallel, (x, y), loss=loss, policy="stock")
    step(x[:3], y[:3]).backward()
    step.eval()
    assert not model.training
    with torch.no_grad():
        assert torch.equal(step(x, y), loss(parallel(x), y))
        assert torch.equal(step(x), parallel(x))
    step.train()
    size = sum(each.nbytes for each in model.parameters())
    alone = ucudnn.memory.fit(model, (x, y), loss=loss, policy="stock")
    assert step.simulation.peak_bytes == alone.simulation.peak_bytes + size
    monkeypatch.setattr(step, "_planned", raises)
    with pytest.raises(ArithmeticError):
        step(x, y)
    assert parallel.module is model


def raises(*_):
    raise ArithmeticError


@pytest.mark.usefixtures("alone")
def test_what_communicates_within_the_step_is_refused_with_what_to_do():
    x, y = torch.randn(4, 3, 8, 8), torch.randint(5, (4,))
    within = nn.Sequential(DistributedDataParallel(InPlace()), nn.Identity())
    with pytest.raises(InvalidValueError, match="module '0' is a DistributedDataParallel within the model: put the"):
        ucudnn.memory.fit(within, (x, y), loss=functional.cross_entropy)
    with pytest.raises(InvalidValueError, match=r"DataParallel, which copies the model.*use DistributedDataParallel"):
        ucudnn.memory.fit(nn.DataParallel(InPlace()), (x, y), loss=functional.cross_entropy)
