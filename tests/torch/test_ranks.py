"""Ranks of torch.distributed measure together and end with the same plans."""

import pytest
import torch

from tests.support.forked_ranks import run_forked_ranks

RANK = """
import glob
import sys
import torch
import torch.distributed as distributed
import torch.distributed.nn  # before there is a process group: see tests/support/ranks.py
import ucudnn.torch

rank, store = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
on = ucudnn.torch.enable(benchmark_devices="ranks", effort=ucudnn.Effort(warmup=0, repeats=1, time_limit_ms=1))
x, w = torch.randn(4, 3, 8, 8), torch.randn(4, 3, 3, 3)
torch.nn.functional.conv2d(x, w)  # before there are ranks: PyTorch's own
assert on.report().calls == 0, on.report()
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.nn.functional.conv2d(x, w)  # skipped once after the failure
module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 3))
module = torch.nn.parallel.DistributedDataParallel(module)
for _ in range(2):
    module(x + rank).square().mean().backward()
del module  # the reducer goes before its process group
distributed.barrier()
distributed.destroy_process_group()
alive = [open(name).read().strip() for name in glob.glob("/proc/self/task/*/comm")]
assert not any("gloo" in each for each in alive), alive
summary = on.report()
for layer in summary.layers:
    print(layer.layer, layer.problem, layer.configuration, layer.planned_ms, layer.calls)
print("left", sum(summary.left.values()), summary.left, file=sys.stderr)
"""


def test_ranks_plan_once_and_the_same(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("PyTorch without torch.distributed")
    ranks = run_forked_ranks(RANK, tmp_path / "store", UCUDNN_BACKEND="cpu")
    (first, errors, status), (second, other_errors, other_status) = ranks
    assert (status, other_status) == (0, 0), errors + other_errors
    assert first == second
    assert len(first.splitlines()) == 5  # two layers, whose first has no gradient of its input
    for each in (errors, other_errors):
        assert "left 2 " in each
        assert "torch.distributed is not initialized" in each
