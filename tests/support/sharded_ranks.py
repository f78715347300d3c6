"""Ranks that train models sharded by FSDP2 and by `fit(..., mesh=)`, each in a process of its own.

A test sends the name of a function of this module or of its own, and arguments as JSON; each rank prints its result.
"""

import copy
import importlib
import json
import os
import sys
import warnings
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import nn
from torch.nn import functional

from bench.memory import models
from tests.support.forked_ranks import run_forked_ranks
from tests.support.random_networks import random_network
from tests.support.small_networks import small_network
from ucudnn.memory.step import sharded


def on_ranks(function, store, *arguments, world=2, **environment):
    """Return what a function returns on each rank; it is called with the device mesh and the arguments.

    Each parameter is gathered by itself unless `BUCKET_BYTES` says how many bytes may be gathered together.
    """
    program = f"from {__name__} import serve; serve()"
    given = function.__module__, function.__name__, store, world, json.dumps(arguments)
    ranks = run_forked_ranks(program, *given, world=world, timeout=300, **environment)
    for _, errors, status in ranks:
        assert status == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _, _ in ranks]


def serve():
    """Call a function as a rank, and print what it returns as a line of JSON."""
    warnings.simplefilter("ignore")
    import torch.distributed.nn  # before there is a process group: see tests/support/ranks.py
    from torch.distributed.device_mesh import init_device_mesh

    rank, module, name, store, world, arguments = sys.argv[1:]
    sharded.BUCKET_BYTES = int(os.environ.get("BUCKET_BYTES", "0"))
    group = {"rank": int(rank), "world_size": int(world), "timeout": timedelta(seconds=120)}
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", **group)
    mesh = init_device_mesh("cpu", (int(world),))
    found = getattr(importlib.import_module(module), name)(mesh, *json.loads(arguments))
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()
    torch.distributed.barrier()
    os._exit(0)  # FSDP keeps groups until Python ends, and so the threads of Gloo: see tests/support/ranks.py


class Followed(nn.Module):
    """Reads a weight without gradients before it trains it, to follow its mean."""

    def __init__(self):
        super().__init__()
        self.linear, self.last = nn.Linear(6, 6), nn.Linear(6, 1)
        self.register_buffer("mean", torch.zeros(6, 6))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(self.linear.weight, 0.1)
        return self.last(self.linear(x) - x @ self.mean)


class Odd(nn.Module):
    """Parameters of every kind: rows that no number of ranks divides, tied, frozen, a scalar and one element."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 3)
        self.third = nn.Linear(7, 3, bias=False)
        self.third.weight = self.second.weight
        self.last, self.frozen = nn.Linear(3, 1), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        x = torch.tanh(self.first(x)) * self.scale + self.shift
        return self.last(self.frozen(self.second(x) - self.third(x.sin())))


def sharded_network(name):
    """Return a model, its inputs with the target behind them, and a loss."""
    torch.manual_seed(1)
    if name in ("odd", "followed"):
        return Odd() if name == "odd" else Followed(), (torch.randn(5, 6), torch.randn(5, 1)), functional.mse_loss
    if name == "gpt without dropout":
        _, inputs, loss = small_network("gpt")
        return models.GPT(2, 32, 2, length=16, vocabulary=50), inputs, loss
    return random_network(int(name)) if name.isdigit() else small_network(name)


def batches(inputs, count=5):
    """Yield mini-batches of this rank."""
    generator = torch.Generator().manual_seed(5 + torch.distributed.get_rank())
    for _ in range(count):
        mixed = [torch.randperm(len(each), generator=generator) for each in inputs]
        noise = [torch.randn(each.shape, generator=generator) for each in inputs]
        yield tuple(
            each + 0.1 * n.to(each.dtype) if each.is_floating_point() else each[m]
            for each, m, n in zip(inputs, mixed, noise, strict=True)
        )


def made_optimizer(name, parameters):
    """Return an optimizer of parameters."""
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=0.01)
    return torch.optim.SGD(parameters, lr=0.05 if name == "sgd" else 0.002, momentum=0.9, weight_decay=0.01)


def whole_parameters(model):
    """Return all parameters of a model as they are without shards, in double precision."""
    return [each.full_tensor().detach().reshape(-1).double() for each in model.parameters()]


def fsdp2(model, mesh, **options):
    """Return a model that FSDP2 shards; it takes no scalars, so these become one element."""
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and not parameter.dim():
                module._parameters[key] = nn.Parameter(parameter.detach().reshape(1), parameter.requires_grad)
    return fully_shard(model, mesh=mesh, **options)


@contextmanager
def counted_collectives():
    """Yield a list that gets the group of each collective of a sharded step, by name."""
    from ucudnn.memory.torch.sharding import collectives

    names, started = [], collectives.started

    def counting(group, collective, *tensors, **options):
        names.append(group.group_name)
        return started(group, collective, *tensors, **options)

    collectives.started = counting
    try:
        yield names
    finally:
        collectives.started = started


@contextmanager
def logged_collectives():
    """Yield a list that gets ('start', number) and ('wait', number) of the collectives that code only starts."""
    from ucudnn.memory.torch.sharding import collectives

    log, started = [], collectives.started

    def logging(*tensors, **options):
        wait, number = started(*tensors, **options), len(log)
        log.append(("start", number))

        def waiting():
            log.append(("wait", number))
            wait()

        if not options.get("async_op"):
            log.pop()
            return wait
        return waiting

    collectives.started = logging
    try:
        yield log
    finally:
        collectives.started = started


def trained(model, call, optimizer, data, clip=None):
    """Train a model, and return its losses, the norms of gradients, and its parameters in the end."""
    losses, norms = [], []
    torch.manual_seed(3)
    for batch in data:
        optimizer.zero_grad()
        value = call(*batch)
        value.backward()
        if clip:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).full_tensor().item())
        optimizer.step()
        losses.append(value.item())
    return losses, norms, whole_parameters(model)


def race(mesh, cases):
    """Train each case by FSDP2, by it in double precision where that is asked for, and by a fitted step."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from ucudnn.memory import fit
    from ucudnn.memory.plans.actions import COMPUTES

    found = []
    for case in cases:
        model, inputs, loss = sharded_network(case["network"])
        data = [*batches(inputs)]
        ways = {}
        for way in ("fsdp2", "double", "fit")[:: 1 if case.get("double") else 2]:
            own, given = copy.deepcopy(model), data
            if way == "double":
                own.double()
                given = [[each.double() if each.is_floating_point() else each for each in batch] for batch in data]
            precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if case.get("mixed") else None
            own = own if way == "fit" else fsdp2(own, mesh, **({"mp_policy": precision} if precision else {}))
            optimizer = made_optimizer(case["optimizer"], own.parameters())
            call = step = None
            if way == "fit":
                options = {"policy": case["policy"], "debug": True, "mixed_precision": precision}
                call = step = fit(own, data[0], loss=loss, optimizer=optimizer, mesh=mesh, **options)
            with counted_collectives() as names:
                ways[way] = trained(
                    own,
                    call or (lambda *args, own=own, loss=loss: loss(own(*args[:-1]), args[-1])),
                    optimizer,
                    given,
                    case.get("clip"),
                )
        (*numbers, parameters), (*others, plain) = ways["fit"], ways["fsdp2"]
        graph = step.plan.graph
        kinds = [each.kind for each in graph.operations]
        planned = [kinds[target] for kind, target in step.plan.actions if kind in COMPUTES]
        result = {
            "same": [*map(list.__eq__, numbers, others), all(map(torch.equal, parameters, plain))],
            "losses": numbers[0],
            "run": names.count(step._sharding.group.group_name) / len(data),
            "planned": sum(each.startswith("ucudnn_ranks.") for each in planned),
            "gathers": sum(each == "ucudnn_ranks.all_gather" for each in planned),
            "parameters": len(parameters),
            "held": sum(graph.exists_after[each] for at in graph.collectives for each in graph.operations[at].writes)
            - sum(each.requires_grad for each in own.parameters()),
        }
        if case.get("double"):
            right = ways["double"][2]
            result["errors"] = [
                max((a - b).abs().max().item() for a, b in zip(each, right, strict=True))
                for each in (parameters, plain)
            ]
        found.append(result)
    return found
