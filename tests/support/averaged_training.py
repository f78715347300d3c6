"""Two ranks that train plainly and by plans, as a program for `tests.support.ranks`.

Each rank prints a line of JSON: for each way of training and each case the losses and a digest of parameters, buffers
and gradients, and what the plan moved.
"""

import json

from tests.support.ranks import run_ranks

WAYS = ("plain", "fit within", "fit around")
"""DistributedDataParallel alone; DistributedDataParallel(fit(model)); fit(DistributedDataParallel(model))."""

PROGRAM = """
import contextlib
import copy
import hashlib
import json
import sys

import torch
import torch.distributed as distributed
import torch.distributed.nn  # before there is a process group: see tests/support/ranks.py
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.support.small_networks import InPlace
from ucudnn.memory import fit

rank, store, backend, cases = int(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
    torch.backends.cudnn.deterministic = True
distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)


def batches(count):
    generator = torch.Generator().manual_seed(5 + rank)
    for _ in range(count):
        x = torch.randn(4, 3, 8, 8, generator=generator)
        yield x.to(device), torch.randint(5, (4,), generator=generator).to(device)


def digest(tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def train(way, case):
    torch.manual_seed(0)
    model = InPlace()
    if case["options"].get("find_unused_parameters"):
        model.never = torch.nn.Linear(2, 2)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    options = case["options"] | ({"device_ids": [rank]} if device.type == "cuda" else {})
    loss, sample, step = functional.cross_entropy, next(batches(1)), None
    known = {"loss": loss, "optimizer": optimizer, "debug": True, "keep_gradients": case["every"] > 1}
    if way == "fit within":
        step = fit(model, sample, policy=case["policy"], **known)
        parallel = call = DistributedDataParallel(step, **options)
    else:
        parallel = call = DistributedDataParallel(model, **options)
        if way == "fit around":
            step = call = fit(parallel, sample, policy=case["policy"], **known)
    losses, gradients = [], []
    for number, (x, y) in enumerate(batches(5 * case["every"]), start=1):
        last = number % case["every"] == 0
        with contextlib.nullcontext() if last else parallel.no_sync():
            value = loss(call(x), y) if step is None else call(x, y)
            value.backward()
        losses.append(value.item())
        if last:
            found = [parameter.grad for parameter in model.parameters()]
            gradients += [torch.zeros(0) if each is None else each.clone() for each in found]
            optimizer.step()
            optimizer.zero_grad()
    assert parallel.module is (step if way == "fit within" else model)
    moved = 0 if step is None else step.transfers.offloaded_bytes
    state, report = [*model.parameters(), *model.buffers()], "" if step is None else step.report()
    return {"losses": losses, "gradients": digest(gradients), "state": digest(state), "moved": moved, "report": report}


found = {way: [train(way, case) for case in cases] for way in ("plain", "fit within", "fit around")}
print(json.dumps(found))
distributed.barrier()
distributed.destroy_process_group()
"""


def train_ranks(store, backend, cases):
    """Return what two ranks found, each {way: [result of each case]}.

    Args:
        store: a path of no file yet, where the ranks meet.
        backend: 'gloo' for CPUs, 'nccl' for a GPU each.
        cases: for each case a policy, options of DistributedDataParallel, and micro-steps for each update.
    """
    ranks = run_ranks(PROGRAM, store, backend, json.dumps(cases), OMP_NUM_THREADS="1")
    for _, errors, status in ranks:
        assert status == 0, errors
    return [json.loads(output) for output, _, _ in ranks]
