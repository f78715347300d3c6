"""Trains one network under DistributedDataParallel, with ucudnn and without, and compares steps and losses.

    python -m bench.torch.programs.rank_training                          ResNet-50 on two GPUs
    python -m bench.torch.programs.rank_training --setting 64MiB --seconds 45
    python -m bench.torch.programs.rank_training --backend cpu --network small --batch 4 --steps 2 --seconds 1

Each run starts a process for each rank, which needs no torchrun. PyTorch alone runs first and last, so that the spread
of its own losses is known. A run takes the first --losses steps, then further ones until all ranks have tuned or
--seconds have passed, and then the timed ones. Ranks agree on that by a collective of this script; ucudnn has none.

The script ends with status 1 if a step takes more than 1.02 of PyTorch's, or if the losses are further from those of
PyTorch's nearer run than 1.5 times what its two runs differ by, because two runs are one sample of a spread. Runs that
repeat to the bit differ by nothing, so a ten-thousandth of the loss counts as a spread.
"""

import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from bench.tools.results import ROOT, save_case
from bench.tools.script import commit_of, note, out_of, run_main, verdict
from bench.torch.measuring import conditions
from bench.torch.network_cell import memory_of
from bench.torch.network_setting import is_settled, turned_on
from bench.torch.network_step import CLASSES, NETWORKS, loss_of, model_of
from bench.torch.network_times import Clock, steps_ms
from bench.torch.programs.command_line import network_command_line

_MOST_RATIO = 1.02
_MOST_SPREAD = 1.5
_LEAST_SPREAD = 1e-4  # of the loss
_AGREED_STEPS = 10  # between questions to the other ranks
_STOCK = "stock"


def losses_differ(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the root mean square of the differences of two runs' losses."""
    return sqrt(fmean((a - b) ** 2 for a, b in zip(one, other, strict=True)))


def train(arguments: Namespace) -> dict[str, object]:
    """Train as one rank, and return what it has measured."""
    on_gpu = arguments.backend != "cpu"
    device = torch.device("cuda", arguments.rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{arguments.store}",
        rank=arguments.rank,
        world_size=arguments.ranks,
    )
    try:
        return _measured(arguments, device)
    finally:
        distributed.destroy_process_group()


def _measured(arguments: Namespace, device: torch.device) -> dict[str, object]:
    on = turned_on(arguments.setting, arguments.backend)
    model = model_of(arguments.network).to(device).train()
    parallel = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3, momentum=0.9)
    torch.manual_seed(1 + arguments.rank)
    batch = arguments.batch or NETWORKS[arguments.network][1]
    x = torch.randn(batch, *NETWORKS[arguments.network][2], device=device)
    labels = torch.randint(CLASSES, (batch,), device=device)
    clock = Clock(device)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(parallel(x), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    clock.wait()
    begin = perf_counter()
    losses = [step()]
    clock.wait()
    first_s = perf_counter() - begin
    losses += [step() for _ in range(arguments.losses - 1)]
    count = arguments.losses
    while not _agreed((on is not None and is_settled(on)) or perf_counter() - begin > arguments.seconds, device):
        for _ in range(_AGREED_STEPS):
            step()
        count += _AGREED_STEPS
    clock.wait()
    times = steps_ms(step, clock, arguments.steps)
    summary = None if on is None else on.report()
    return {
        "first_step_s": first_s,
        "steps_before": count,
        "settled": is_settled(on),
        "step_ms": median(times),
        "samples_ms": times,
        "losses": [float(each) for each in losses],
        "peaks": memory_of(device),
        "kinds": {} if summary is None else summary.kinds(),
        "tuned": [] if summary is None else [each.to_dict() for each in summary.tuned],
    }


def _agreed(done: bool, device: torch.device) -> bool:
    """Return whether all ranks are done, so that all take the same number of steps."""
    found = torch.tensor(int(done), device=device)
    distributed.all_reduce(found, distributed.ReduceOp.MIN)
    return bool(found.item())


def run(arguments: Namespace, setting: str) -> list[dict[str, Any]]:
    """Run all ranks under a setting, and return what each has measured.

    Raises:
        RuntimeError: if a rank fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __spec__.name, "--setting", setting, "--store", str(Path(folder) / "store")]
        for name in ("ranks", "backend", "network", "batch", "losses", "steps", "seconds"):
            command += [f"--{name}", str(getattr(arguments, name))]
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in range(arguments.ranks)
        ]
        ended = [(*each.communicate(), each.returncode) for each in ranks]
    for rank, (_, errors, status) in enumerate(ended):
        if status:
            raise RuntimeError(f"rank {rank} under {setting} ended with {status}: {errors[-2000:]}")
    return [json.loads(output.strip().splitlines()[-1]) for output, _, _ in ended]


def compare(arguments: Namespace) -> bool:
    """Run all settings, and return whether what is claimed holds."""
    settings = [_STOCK, *(arguments.setting or ["auto"]), _STOCK]
    found: list[tuple[str, list[dict[str, Any]]]] = []
    for setting in settings:
        begin = perf_counter()
        found.append((setting, run(arguments, setting)))
        ranks = found[-1][1]
        steps = ", ".join(f"{each['step_ms']:.2f}" for each in ranks)
        note(f"{setting}: step {steps} ms, first {ranks[0]['first_step_s']:.2f} s, run {perf_counter() - begin:.0f} s")
    stock = [found[0][1], found[-1][1]]
    stock_ms = median(rank["step_ms"] for ranks in stock for rank in ranks)
    spread = max(losses_differ(a["losses"], b["losses"]) for a, b in zip(*stock, strict=True))
    spread = max(spread, _LEAST_SPREAD * fmean(stock[0][0]["losses"]))
    claims = []
    for setting, ranks in found[1:-1]:
        ratio = median(rank["step_ms"] for rank in ranks) / stock_ms
        nearest = [
            min(losses_differ(rank["losses"], own[number]["losses"]) for own in stock)
            for number, rank in enumerate(ranks)
        ]
        claims.append(verdict(f"{setting}: step over PyTorch's", ratio, _MOST_RATIO))
        claims.append(verdict(f"{setting}: losses from PyTorch's", max(nearest), _MOST_SPREAD * spread))
    told = conditions(torch.device("cpu" if arguments.backend == "cpu" else "cuda"))
    case = {"commit": commit_of(arguments), "conditions": told, "batch": arguments.batch}
    case |= {"runs": found, "spread": spread, "claims": claims}
    save_case(out_of(arguments), f"{arguments.network} {arguments.ranks} ranks", case)
    return all(bool(each["met"]) for each in claims)


def main() -> bool | None:
    """Compare, or train as one rank and print one line of JSON."""
    arguments = _parser().parse_args()
    if arguments.rank is None:
        return compare(arguments)
    (arguments.setting,) = arguments.setting
    print(json.dumps(train(arguments)))
    return None


def _parser() -> ArgumentParser:
    parser = network_command_line(__doc__, __spec__.name)
    parser.add_argument("--setting", action="append", help="of bench.torch.network_cell; may be repeated (auto)")
    parser.add_argument("--ranks", type=int, default=2, help="processes, each on a GPU of its own (%(default)s)")
    parser.add_argument("--batch", type=int, default=128, help="images of each rank (%(default)s)")
    parser.add_argument("--losses", type=int, default=30, help="first steps whose losses count (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps (%(default)s)")
    parser.add_argument("--seconds", type=float, default=30, help="most seconds before the timed steps (%(default)s)")
    parser.add_argument("--rank", type=int, help="train as this rank, which the script does by itself")
    parser.add_argument("--store", help="file by which the ranks meet")
    return parser


if __name__ == "__main__":
    run_main(main)
