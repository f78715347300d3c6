"""Compare sharded steps with FSDP2's on the GPUs of a host: time and memory of GPT-2 large and ResNet-50.

    torchrun --nproc-per-node 2 -m bench.memory.sharded_steps [--model gpt2-large resnet50] [--shares 1 0.8 0.6 0.4]

Each rank trains the same step by FSDP2, with each block as a group of its own, by FSDP2 with the blocks recomputed by
torch.utils.checkpoint, and by `fit(..., mesh=)` without a budget and within shares of FSDP2's peak. It writes a line of
JSON for each: the median time of a step on the slowest rank, the most bytes that PyTorch's allocator had, and what a
plan predicted. `--device cpu --small` tries the script where there is no GPU; its times say nothing. Its options:

    python -m bench.memory.sharded_steps --help
"""

import argparse
import gc
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from bench.memory import models
from ucudnn.errors import BudgetError
from ucudnn.memory import fit
from ucudnn.memory.torch.device.allocator_meter import AllocatorMeter
from ucudnn.memory.torch.device.stated_budget import outside_bytes

BLOCKS = (models.TransformerBlock, nn.Sequential)


def model_of(name: str, *, small: bool) -> tuple[nn.Module, Callable[[], tuple[Tensor, Tensor]]]:
    """Return a model, and what makes its mini-batch on the CPU."""
    if name == "gpt2-large":
        depth, width, heads, length, rows = (2, 64, 2, 32, 2) if small else (36, 1280, 20, 1024, 4)
        words = 50257
        net: nn.Module = models.GPT(depth, width, heads, length, words)
        return net, lambda: (torch.randint(words, (rows, length)), torch.randint(words, (rows, length)))
    rows, side = (2, 64) if small else (128, 224)
    return models.resnet50(), lambda: (torch.randn(rows, 3, side, side), torch.randint(1000, (rows,)))


def measured(step: Callable[[], Any], device: torch.device, steps: int) -> dict[str, float]:
    """Return the median time of a step on the slowest rank, and the most bytes of any rank, after the first steps."""
    for _ in range(3):
        step()
    before, meter = 0, AllocatorMeter(device)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        meter.begin()
    times = []
    for _ in range(steps):
        distributed.barrier()
        begin = perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (perf_counter() - begin))
    peak = before + meter.taken_bytes() if device.type == "cuda" else 0  # without tensors that only fill holes
    found = torch.tensor([median(times), peak], dtype=torch.float64, device=device)
    distributed.all_reduce(found, op=distributed.ReduceOp.MAX)
    return {"ms": round(found[0].item(), 3), "peak_bytes": int(found[1])}


def ways(name: str, options: argparse.Namespace, mesh: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield what each way takes."""
    top = 0
    for way, share in [
        ("fsdp2", 0.0),
        ("fsdp2 checkpoint", 0.0),
        ("fit", 0.0),
        *(("fit", each) for each in options.shares),
    ]:
        if share and not top:
            continue  # a CPU's peak is not known
        held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0  # by ways before this one
        torch.manual_seed(0)
        net, batch = model_of(name, small=options.small)
        x, y = (each.to(device) for each in batch())
        net.to(device)
        optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
        call: Callable[..., Tensor] = partial(_loss, net)
        predicted = 0
        if way == "fit":
            budget = int(share * top) + outside_bytes(device) if share else None
            try:
                step = fit(net, (x, y), loss=functional.cross_entropy, optimizer=optimizer, mesh=mesh, budget=budget)
            except BudgetError as error:
                yield {"model": name, "way": way, "share": share, "refused": str(error)}
                continue
            call, predicted = step, step.simulation.peak_bytes
            del step
        else:
            if way == "fsdp2 checkpoint":
                apply_activation_checkpointing(net, check_fn=lambda module: isinstance(module, BLOCKS))
            _shard_by_fsdp2(net, mesh)
            optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
        found = measured(partial(_train, optimizer, call, x, y), device, options.steps)
        top = int(found["peak_bytes"]) if way == "fsdp2" else top
        told = {"model": name, "ranks": mesh.size(), "way": way, "share": share, "held_bytes": held}
        yield {**told, "predicted_bytes": predicted, **found}
        del net, optimizer, call
        gc.collect()


def _shard_by_fsdp2(net: nn.Module, mesh: Any) -> None:
    """Shard the model by its blocks, inner ones first; no name of the caller keeps a module alive."""
    for module in reversed([*net.modules()][1:]):
        if isinstance(module, BLOCKS):
            fully_shard(module, mesh=mesh)
    fully_shard(net, mesh=mesh)


def _loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(net(x), y)


def _train(optimizer: torch.optim.Optimizer, call: Callable[..., Tensor], x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    call(x, y).backward()
    optimizer.step()


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.memory.sharded_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", nargs="*", default=["gpt2-large", "resnet50"], choices=["gpt2-large", "resnet50"])
    parser.add_argument("--shares", nargs="*", type=float, default=[1.0, 0.8, 0.6, 0.4], help="of FSDP2's peak")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    options = parser.parse_args()
    device = (
        torch.device(options.device, int(os.environ["LOCAL_RANK"])) if options.device == "cuda" else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(options.device, (int(os.environ["WORLD_SIZE"]),))
    for name in options.model:
        for found in ways(name, options, mesh, device):
            if mesh.get_rank() == 0:
                print(json.dumps(found), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
