"""Losses of a seeded ResNet of CIFAR's size: runs of PyTorch alone, and with ucudnn; with TF32 and without.

    python bench/torch_losses.py                  # six minutes on a GPU
    python bench/torch_losses.py --backend cpu    # tries the script out

Images are one of ten random templates with noise, the same for all runs, which begin with the same weights. Each run is
a process of its own, as runs of a script are: `cudnn.benchmark` chooses anew in each, by times that are never quite the
same, and ucudnn plans anew. Two runs of PyTorch differ by that, and where its kernels add in another order each time,
by more or less from pair to pair; so there are several, and most of ours are to be as near to them as two of them are
to one another. How far PyTorch's own runs are from one with deterministic algorithms, and from one in channels last, is
told, too, and how far those without TF32 are from those with it.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import combinations, product
from multiprocessing import get_context
from statistics import median
from typing import Any, NamedTuple

import torch
from losses import root_mean_square
from torch import nn
from torch_models import conditions, device_of, small_options, small_resnet, training_step, verdict, write

import ucudnn.torch

STOCK = tuple(f"pytorch {number}" for number in range(1, 9))
OURS = tuple(f"ucudnn {number}" for number in range(1, 5))
DETERMINISTIC, LAST, BOTH = OTHERS = tuple(
    f"pytorch, {how}" for how in ("deterministic", "channels last", "deterministic, channels last")
)
ORDER = (*(name for turn in range(4) for name in (STOCK[2 * turn], OURS[turn], STOCK[2 * turn + 1])), *OTHERS)
MATHS = {"tf32": True, "fma": False}

Losses = dict[str, list[float]]


class Run(NamedTuple):
    """What a process answers: the losses of a run, and of one with ucudnn what it did."""

    losses: list[float]
    calls: int
    left: dict[str, int]
    configurations: tuple[tuple[str, str], ...]


def run(arguments: argparse.Namespace, math: str, name: str) -> Run:
    """Train in one way."""
    device = device_of(arguments)
    torch.backends.cudnn.allow_tf32 = MATHS[math]
    torch.backends.cudnn.deterministic = name in (DETERMINISTIC, BOTH)
    on = None
    if name in OURS:
        backend = "cpu" if arguments.backend == "cpu" else "cudnn"
        on = ucudnn.torch.enable(backend=backend, workspace_limit=arguments.limit, database="off")
    with on or nullcontext():
        losses = train(arguments, device, torch.channels_last if name in (LAST, BOTH) else torch.contiguous_format)
    if on is None:
        return Run(losses, 0, {}, ())
    done = on.report()
    layers = tuple((each.problem, each.configuration) for each in done.layers)
    return Run(losses, done.calls, dict(done.left), layers)


def train(arguments: argparse.Namespace, device: torch.device, layout: torch.memory_format) -> list[float]:
    """Return the losses of one run."""
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    model: nn.Module = (small_resnet() if on_gpu else small_resnet(4, 1)).to(device, memory_format=layout)
    batch = arguments.batch if on_gpu else 8
    random = torch.Generator().manual_seed(1)
    templates = torch.randn(10, 3, 32, 32, generator=random)
    x = torch.empty(batch, 3, 32, 32, device=device, memory_format=layout)
    labels = torch.empty(batch, dtype=torch.long, device=device)
    step = training_step(model, x, labels, rate=arguments.rate)
    losses = []
    for _ in range(arguments.steps):
        drawn = torch.randint(10, (batch,), generator=random)
        labels.copy_(drawn)
        x.copy_(templates[drawn] + 0.5 * torch.randn(batch, 3, 32, 32, generator=random))
        losses.append(step())
    return [float(each) for each in losses]


def runs(arguments: argparse.Namespace, math: str) -> Iterator[tuple[str, Run]]:
    """Train in all ways, each in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for name in ORDER:
            yield name, pool.submit(run, arguments, math, name).result()


def run_all(arguments: argparse.Namespace, math: str, keep: Callable[[object], None]) -> dict[str, object]:
    """Train in all ways by one math mode, print how far losses are apart and return all; what is known is kept."""
    losses: Losses = {}
    left: dict[str, dict[str, int]] = {}
    configurations: dict[str, tuple[tuple[str, str], ...]] = {}
    answer: dict[str, object] = {"losses": losses, "left": left, "configurations": configurations}
    for name, done in runs(arguments, math):
        losses[name] = done.losses
        if name in OURS:
            left[name], configurations[name] = done.left, done.configurations
            print(f"left to PyTorch: {done.left or 'nothing'}; through ucudnn: {done.calls}")
        keep(answer)
        print(f"{name:36} first {losses[name][0]:.6f}, last {losses[name][-1]:.6f}", flush=True)
    spreads = distances(losses, combinations(STOCK, 2))
    ours = distances(losses, product(OURS, STOCK))
    others = distances(losses, product(OTHERS, STOCK))  # what other algorithms come to; it does not count
    for who, far in (("any two of PyTorch's", spreads), ("ucudnn's from each", ours), ("other algorithms'", others)):
        show(who, far)
    return answer | {"spreads": spreads, "spreads_of_algorithms": others, "ucudnn": ours}


def distances(losses: Losses, pairs: Iterable[tuple[str, str]]) -> list[float]:
    """Return how far pairs of runs are apart, the nearest first."""
    return sorted(root_mean_square(losses[one], losses[other]) for one, other in pairs)


def show(who: str, far: Sequence[float]) -> None:
    """Print distances."""
    print(f"root mean square difference, {who:20}: {far[0]:.2e} to {far[-1]:.2e}, median {median(far):.2e}", flush=True)


def main() -> None:
    """Train, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--limit", default="16MiB")
    small_options(parser, "torch_losses.json")
    arguments = parser.parse_args()
    answer: dict[str, Any] = {"conditions": conditions(device_of(arguments)), "limit": arguments.limit}

    def keep(math: str, known: object) -> None:
        write(arguments, {**answer, math: known}, done=False)

    for math in MATHS:
        print(f"{math}:", flush=True)
        answer[math] = run_all(arguments, math, partial(keep, math))
    with_tf32, without = (answer[math]["losses"] for math in MATHS)
    apart = sorted(root_mean_square(with_tf32[one], without[other]) for one, other in product(STOCK, STOCK))
    show("PyTorch's with TF32 from without", apart)
    answer["tf32 from fma"] = apart
    answer["required"] = [
        verdict(
            f"{math}: median difference, against two of PyTorch's",
            median(answer[math]["ucudnn"]),
            answer[math]["spreads"][-1],
        )
        for math in MATHS
    ]
    write(arguments, answer)


if __name__ == "__main__":
    main()
