"""Losses of a seeded ResNet of CIFAR's size: runs of PyTorch alone, and with ucudnn.

    python bench/torch_losses.py                  # a minute on a GPU
    python bench/torch_losses.py --backend cpu    # tries the script out

Images are one of ten random templates with noise, the same for all runs, which begin with the same weights. Two runs of
PyTorch differ where its kernels add in another order each time, by more or less from pair to pair (the largest of the
six distances between four runs was 6.6e-4 once and 1.0e-3 another time); so there are eight, and four of ours, of which
most are to be as near to them as two of them are to one another.
"""

import argparse
from contextlib import nullcontext
from itertools import combinations, product
from statistics import median

import torch
from losses import root_mean_square
from torch import nn
from torch_models import conditions, device_of, small_options, small_resnet, training_step, verdict, write

import ucudnn.torch

STOCK = tuple(f"pytorch {number}" for number in range(1, 9))
OURS = tuple(f"ucudnn {number}" for number in range(1, 5))
OTHER = "pytorch, other algorithms"
ORDER = (*(name for turn in range(4) for name in (STOCK[2 * turn], OURS[turn], STOCK[2 * turn + 1])), OTHER)


def train(arguments: argparse.Namespace, device: torch.device) -> list[float]:
    """Return the losses of one run."""
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    model: nn.Module = (small_resnet() if on_gpu else small_resnet(4, 1)).to(device)
    batch = arguments.batch if on_gpu else 8
    random = torch.Generator().manual_seed(1)
    templates = torch.randn(10, 3, 32, 32, generator=random)
    x = torch.empty(batch, 3, 32, 32, device=device)
    labels = torch.empty(batch, dtype=torch.long, device=device)
    step = training_step(model, x, labels, rate=arguments.rate)
    losses = []
    for _ in range(arguments.steps):
        drawn = torch.randint(10, (batch,), generator=random)
        labels.copy_(drawn)
        x.copy_(templates[drawn] + 0.5 * torch.randn(batch, 3, 32, 32, generator=random))
        losses.append(step())
    return [float(each) for each in losses]


def main() -> None:
    """Train, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--limit", default="16MiB")
    small_options(parser, "torch_losses.json")
    arguments = parser.parse_args()
    device = device_of(arguments)
    runs = {}
    left: dict[str, int] = {}
    for name in ORDER:
        on = None
        torch.backends.cudnn.benchmark = device.type == "cuda" and name != OTHER
        if name in OURS:
            backend = "cpu" if arguments.backend == "cpu" else "cudnn"
            on = ucudnn.torch.enable(backend=backend, workspace_limit=arguments.limit)
        with on or nullcontext():
            runs[name] = train(arguments, device)
        if on is not None:
            left |= on.report().left
            print(f"left to PyTorch: {on.report().left or 'nothing'}; through ucudnn: {on.report().calls}")
        write(arguments, {"conditions": conditions(device), "losses": runs, "left": left}, done=False)
        print(f"{name:25} first {runs[name][0]:.6f}, last {runs[name][-1]:.6f}", flush=True)
    spreads = sorted(root_mean_square(runs[one], runs[other]) for one, other in combinations(STOCK, 2))
    ours = sorted(root_mean_square(runs[one], runs[other]) for one, other in product(OURS, STOCK))
    others = sorted(root_mean_square(runs[OTHER], runs[name]) for name in STOCK)
    for who, far in (("any two of PyTorch's", spreads), ("ucudnn's from each", ours), ("other algorithms'", others)):
        print(f"root mean square difference, {who:20}: {far[0]:.2e} to {far[-1]:.2e}, median {median(far):.2e}")
    answer = {
        "conditions": conditions(device),
        "losses": runs,
        "left": left,
        "spreads": spreads,
        "spreads_of_algorithms": others,
        "ucudnn": ours,
        # Runs of PyTorch by other algorithms of its own tell what rounding alone comes to; they do not count.
        "required": [verdict("median difference, against two runs of PyTorch", median(ours), spreads[-1])],
    }
    write(arguments, answer)


if __name__ == "__main__":
    main()
