"""Ranks that train plainly and by plans, each in a process of its own, as `tests.support.ranks` runs them."""

import contextlib
import hashlib
import json
import sys

import torch

from tests.support.forked_ranks import run_forked_ranks
from tests.support.memory_plans import random_plan_in_parts
from tests.support.moving_plans import shaken
from tests.support.ranks import run_ranks
from tests.support.small_networks import InPlace
from ucudnn.memory import fit
from ucudnn.memory.planner.planner import make_plan

WAYS = ("plain", "fit within", "fit around")
"""DistributedDataParallel alone; DistributedDataParallel(fit(model)); fit(DistributedDataParallel(model))."""

NUMBERS = ("losses", "gradients", "state")
"""What of a case's result is the same bits for all ways; the last two are digests."""


def train_ranks(store, backend, world, ways, cases):
    """Return what each rank found: for each case the result of each way.

    Args:
        store: a path of no file yet, where the ranks meet.
        backend: 'gloo' for CPUs, 'nccl' for a GPU each.
        world: the number of ranks.
        ways: of WAYS.
        cases: for each case a policy and options of DistributedDataParallel. Policies 'random' and 'moves' have a seed.
            There may be micro-steps for `every` update, parameters whose gradients come `late`, and small buckets,
            whose steps are `watched`: the result has the orders in which collectives and convolutions' gradients began,
            of the last three steps.
    """
    program = f"from {__name__} import serve; serve()"
    run = run_ranks if backend == "nccl" else run_forked_ranks
    ranks = run(program, store, backend, world, *map(json.dumps, (ways, cases)), world=world, OMP_NUM_THREADS="1")
    for _, errors, status in ranks:
        assert status == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _, _ in ranks]


def collectives_before(order):
    """Return how many collectives began before the last convolution of backward, and how many there were."""
    last = len(order) - 1 - order[::-1].index(1)
    return order[:last].count(0), order.count(0)


def serve():
    """Train all cases as a rank, and print the results as a line of JSON."""
    import torch.distributed.nn  # before there is a process group: see tests/support/ranks.py

    rank, store, backend, world, ways, cases = sys.argv[1:]
    device = torch.device("cuda", int(rank)) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.deterministic = True
    distributed = torch.distributed
    distributed.init_process_group(backend, init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    found = [[_train(way, case, device) for way in json.loads(ways)] for case in json.loads(cases)]
    sys.stdout.write(f"{json.dumps(found)}\n")
    distributed.barrier()
    distributed.destroy_process_group()


class _Planned:
    """Makes plans at random, or plans whose storages move."""

    def __init__(self, name, seed):
        self.name, self.seed = name, seed

    def plan(self, graph, costs, budget):
        if self.name == "random":
            return random_plan_in_parts(graph, costs, self.seed)
        return shaken(make_plan(graph, costs, None, "vdnn-ext-all-p"), costs, self.seed)


class _Late(InPlace):
    """Its last parameters have gradients that share memory, so that autograd copies them."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (torch.nn.Parameter(torch.randn(4, 5)) for _ in range(2))

    def forward(self, x):
        return super().forward(x) + self.one + self.two


def _batches(count, device):
    generator = torch.Generator().manual_seed(5 + torch.distributed.get_rank())
    for _ in range(count):
        x = torch.randn(4, 3, 8, 8, generator=generator)
        yield x.to(device), torch.randint(5, (4,), generator=generator).to(device)


def _train(way, case, device):
    torch.manual_seed(0)
    model = _Late() if case.get("late") else InPlace()
    if case["options"].get("find_unused_parameters"):
        model.never = torch.nn.Linear(2, 2)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    every, watched = case.get("every", 1), case.get("watched", False)
    options = case["options"] | ({"bucket_cap_mb": 0.0005} if watched else {})
    if device.type == "cuda" and not watched:
        options["device_ids"] = [device.index]
    policy = _Planned(case["policy"], case["seed"]) if "seed" in case else case["policy"]
    loss, sample, step = torch.nn.functional.cross_entropy, next(_batches(1, device)), None
    known = {"loss": loss, "optimizer": optimizer, "policy": policy, "debug": True, "keep_gradients": every > 1}
    if way == "fit within":
        step = fit(model, sample, **known)
        parallel = call = torch.nn.parallel.DistributedDataParallel(step, **options)
    else:
        parallel = call = torch.nn.parallel.DistributedDataParallel(model, **options)
        if way == "fit around":
            step = call = fit(parallel, sample, **known)
    losses, gradients, orders, threads = [], [], [], set()
    for number, (x, y) in enumerate(_batches(5 * every, device), start=1):
        last = number % every == 0
        averaged = contextlib.nullcontext() if last else parallel.no_sync()
        seen = watched and number > 2  # buckets are made anew in the second step, or the third
        with _profile() if seen else contextlib.nullcontext() as profile, averaged:
            value = loss(call(x), y) if step is None else call(x, y)
            value.backward()
        losses.append(value.item())
        if seen:
            order, threads = _begun(profile)
            orders.append(order)
        if last:
            found = [parameter.grad for parameter in model.parameters()]
            gradients += [torch.zeros(0) if each is None else each.clone() for each in found]
            optimizer.step()
            optimizer.zero_grad()
    assert parallel.module is (step if way == "fit within" else model)
    return {
        "losses": losses,
        "gradients": _digest(gradients),
        "state": _digest([*model.parameters(), *model.buffers()]),
        "buckets": parallel._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices"),
        "orders": orders,
        "threads": len(threads),
        "moved": 0 if step is None else step.transfers.offloaded_bytes,
        "moves": step is not None and "moved(" in step.code,
        "report": "" if step is None else step.report(),
    }


def _profile():
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def _begun(profile):
    """Return the order in which collectives (0) and gradients of convolutions (1) began, and their threads."""
    names = ("c10d::allreduce_", "aten::convolution_backward")
    events = sorted((each.time_range.start, each.name, each.thread) for each in profile.events() if each.name in names)
    return [names.index(name) for _, name, _ in events], {thread for _, _, thread in events}


def _digest(tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().numpy().tobytes())
    return found.hexdigest()
