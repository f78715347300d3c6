"""Ranks that train plainly and by plans under a profiler, as a program for `tests.support.ranks`.

Each rank prints a line of JSON: for each case a plain loop's results and those of a fitted step, with the order in
which collectives and gradients of convolutions began in each step.
"""

import json

from tests.support.ranks import run_ranks

PROGRAM = """
import copy
import hashlib
import json
import sys

import torch
import torch.distributed as distributed
import torch.distributed.nn  # before there is a process group: see tests/support/ranks.py
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.support.memory_plans import random_plan_in_parts
from tests.support.moving_plans import shaken
from tests.support.small_networks import InPlace
from ucudnn.memory import fit
from ucudnn.memory.planner.planner import make_plan

rank, store, backend = int(sys.argv[1]), sys.argv[2], sys.argv[3]
world, cases = int(sys.argv[4]), json.loads(sys.argv[5])
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
    torch.backends.cudnn.deterministic = True
distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
generator = torch.Generator().manual_seed(5 + rank)
data = [(torch.randn(4, 3, 8, 8, generator=generator), torch.randint(5, (4,), generator=generator)) for _ in range(5)]
data = [(x.to(device), y.to(device)) for x, y in data]


class Planned:
    def __init__(self, name, seed):
        self.name, self.seed = name, seed

    def plan(self, graph, costs, budget):
        if self.name == "random":
            return random_plan_in_parts(graph, costs, self.seed)
        return shaken(make_plan(graph, costs, None, "vdnn-ext-all-p"), costs, self.seed)


class Late(InPlace):
    # its last parameters have gradients that share memory, so that autograd copies them
    def __init__(self):
        super().__init__()
        self.one, self.two = (torch.nn.Parameter(torch.randn(4, 5)) for _ in range(2))

    def forward(self, x):
        return super().forward(x) + self.one + self.two


def digest(tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def train(case, fitted):
    torch.manual_seed(0)
    model = Late() if case.get("late") else InPlace()
    if case["options"].get("find_unused_parameters"):
        model.never = torch.nn.Linear(2, 2)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.0005, **case["options"])
    call, known = (lambda x, y: functional.cross_entropy(parallel(x), y)), {"loss": functional.cross_entropy}
    if fitted:
        named = case["policy"] not in ("random", "moves")
        policy = case["policy"] if named else Planned(case["policy"], case["seed"])
        call = fit(parallel, data[0], optimizer=optimizer, policy=policy, debug=True, **known)
    losses, gradients, orders = [], [], []
    for x, y in data:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            value = call(x, y)
            value.backward()
        names = ("c10d::allreduce_", "aten::convolution_backward")
        events = [each for each in profile.events() if each.name in names]
        events = sorted((each.time_range.start, each.name, each.thread) for each in events)
        orders.append([names.index(name) for _, name, _ in events])
        threads = {thread for _, _, thread in events}
        losses.append(value.item())
        found = [parameter.grad for parameter in model.parameters()]
        gradients += [torch.zeros(0) if each is None else each.clone() for each in found]
        optimizer.step()
        optimizer.zero_grad()
    buckets = parallel._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")
    state = digest([*model.parameters(), *model.buffers()])
    return {
        "numbers": [losses, digest(gradients), state],
        "buckets": buckets,
        "orders": orders,
        "threads": len(threads),
        "moved": call.transfers.offloaded_bytes if fitted else 0,
        "moves": "moved(" in call.code if fitted else False,
    }


print(json.dumps([[train(case, fitted) for fitted in (False, True)] for case in cases]))
distributed.barrier()
distributed.destroy_process_group()
"""


def train_overlapped(store, backend, world, cases):
    """Return what each rank found: for each case what plain training gave, and what training by plans gave.

    Args:
        store: a path of no file yet, where the ranks meet.
        backend: 'gloo' for CPUs, 'nccl' for a GPU each.
        world: the number of ranks.
        cases: for each case a policy and options of DistributedDataParallel; for 'random' and 'moves' also a seed.
    """
    arguments = store, backend, world, json.dumps(cases)
    ranks = run_ranks(PROGRAM, *arguments, world=world, OMP_NUM_THREADS="1")
    for _, errors, status in ranks:
        assert status == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _, _ in ranks]


def collectives_before(order):
    """Return how many collectives began before the last convolution of backward, and how many there were."""
    last = len(order) - 1 - order[::-1].index(1)
    return order[:last].count(0), order.count(0)
