"""Losses of a seeded ResNet of CIFAR's size: runs of PyTorch alone and runs with ucudnn, with TF32 and without.

    python -m bench.torch.losses                  ten minutes on a GPU
    python -m bench.torch.losses --gpus 2         five minutes on two
    python -m bench.torch.losses --backend cpu    a trial of the script

An image is one of ten random templates with noise. All runs see the same images and start from the same weights. Each
run has its own process, as runs of a script do: `cudnn.benchmark` chooses again in each, by times that are never quite
the same, and ucudnn plans again. Two runs of PyTorch differ because of that, and because some kernels add in another
order each time. The distance varies from pair to pair, so there are several runs of each kind. Most runs of ucudnn have
to be as near to PyTorch's as two of PyTorch's are to one another.

For comparison, the script also shows three other distances from PyTorch's runs: of PyTorch with other algorithms
(without `cudnn.benchmark`, deterministic, in channels last), of ucudnn without a limit, and of runs without TF32.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import combinations, product, zip_longest
from multiprocessing import get_context
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

import ucudnn.torch
from bench.tools.losses import root_mean_square
from bench.tools.results import save
from bench.tools.script import out_of, run_main, verdict
from bench.torch.measuring import conditions, device_of, torch_command_line, training_step
from bench.torch.models import small_resnet

STOCK = tuple(f"pytorch {number}" for number in range(1, 9))
OURS = tuple(f"ucudnn {number}" for number in range(1, 7))
UNLIMITED = tuple(f"ucudnn without a limit {number}" for number in range(1, 4))
HEURISTIC, DETERMINISTIC, LAST = OTHERS = tuple(
    f"pytorch, {how}" for how in ("no benchmark", "deterministic", "channels last")
)
ORDER = (*(name for names in zip_longest(STOCK, OURS, UNLIMITED, OTHERS) for name in names if name is not None),)
MATHS = {"tf32": True, "fma": False}

NO_LIMIT = 2**34
"""Bytes; no algorithm of this network needs as many."""

Losses = dict[str, list[float]]


class Run(NamedTuple):
    """The losses of a run; with ucudnn, also its calls, what it left to PyTorch, and its configurations."""

    losses: list[float]
    calls: int
    left: dict[str, int]
    configurations: tuple[tuple[str, str], ...]


def train_once(arguments: Namespace, math: str, name: str, gpu: int) -> Run:
    """Train in one way, in this process."""
    if arguments.backend != "cpu":
        torch.cuda.set_device(gpu)
    device = device_of(arguments)
    torch.backends.cudnn.allow_tf32 = MATHS[math]
    torch.backends.cudnn.benchmark = name != HEURISTIC
    torch.backends.cudnn.deterministic = name == DETERMINISTIC
    on = None
    if name in OURS or name in UNLIMITED:
        limit = arguments.limit if name in OURS else NO_LIMIT
        on = ucudnn.torch.enable(backend=arguments.backend, workspace_limit=limit, database="off", tune="first")
    with on or nullcontext():
        losses = train(arguments, device, torch.channels_last if name == LAST else torch.contiguous_format)
    if on is None:
        return Run(losses, 0, {}, ())
    done = on.report()
    layers = tuple((each.problem, each.configuration) for each in done.layers)
    return Run(losses, done.calls, dict(done.left), layers)


def train(arguments: Namespace, device: torch.device, layout: torch.memory_format) -> list[float]:
    """Return the losses of one run."""
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    model: nn.Module = (small_resnet() if on_gpu else small_resnet(4, 1)).to(device, memory_format=layout)  # type: ignore[call-overload]
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


def runs(arguments: Namespace, math: str) -> Iterator[tuple[str, Run]]:
    """Yield the runs of all ways, each from its own process; each GPU trains one run at a time."""
    with ExitStack() as stack:
        context = get_context("spawn")
        pools = [
            stack.enter_context(ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1))
            for _ in range(arguments.gpus)
        ]
        turns = [(name, index % arguments.gpus) for index, name in enumerate(ORDER)]
        begun = [(name, pools[gpu].submit(train_once, arguments, math, name, gpu)) for name, gpu in turns]
        for name, future in begun:
            yield name, future.result()


def run_all(arguments: Namespace, math: str, keep: Callable[[object], None]) -> dict[str, object]:
    """Train in all ways in one math mode, print the distances and return all; `keep` gets the runs so far."""
    losses: Losses = {}
    left: dict[str, dict[str, int]] = {}
    configurations: dict[str, tuple[tuple[str, str], ...]] = {}
    answer: dict[str, object] = {"losses": losses, "left": left, "configurations": configurations}
    for name, done in runs(arguments, math):
        losses[name] = done.losses
        if done.calls:
            left[name], configurations[name] = done.left, done.configurations
            print(f"left to PyTorch: {done.left or 'nothing'}; through ucudnn: {done.calls}")
        keep(answer)
        print(f"{name:36} first {losses[name][0]:.6f}, last {losses[name][-1]:.6f}", flush=True)
    spreads = distances(losses, combinations(STOCK, 2))
    ours = distances(losses, product(OURS, STOCK))
    unlimited = distances(losses, product(UNLIMITED, STOCK))
    others = {name: distances(losses, product((name,), STOCK)) for name in OTHERS}
    show("any two of PyTorch's", spreads)
    show("ucudnn's from each", ours)
    show("ucudnn's without a limit", unlimited)
    for name, far in others.items():
        show(name, far)
    return answer | {"spreads": spreads, "ucudnn": ours, "ucudnn_without_limit": unlimited, "others": others}


def distances(losses: Losses, pairs: Iterable[tuple[str, str]]) -> list[float]:
    """Return the distances of pairs of runs, the least first."""
    return sorted(root_mean_square(losses[one], losses[other]) for one, other in pairs)


def show(who: str, far: Sequence[float]) -> None:
    """Print distances."""
    print(f"root mean square difference, {who:30}: {far[0]:.2e} to {far[-1]:.2e}, median {median(far):.2e}", flush=True)


def main() -> None:
    """Train, print and write."""
    parser = torch_command_line(__doc__, __spec__.name)
    parser.add_argument("--steps", type=int, default=100, help="training steps of a run (%(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="mini-batch size (%(default)s)")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate (%(default)s)")
    parser.add_argument("--limit", default="16MiB", help="ucudnn's limit for each convolution (%(default)s)")
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs that train at a time (%(default)s)")
    arguments = parser.parse_args()
    answer: dict[str, Any] = {"conditions": conditions(device_of(arguments)), "limit": arguments.limit}

    def keep(math: str, known: object) -> None:
        save(out_of(arguments), {"cut_off": True, **answer, math: known})

    for math in MATHS:
        print(f"{math}:", flush=True)
        answer[math] = run_all(arguments, math, partial(keep, math))
    with_tf32, without = (answer[math]["losses"] for math in MATHS)
    apart = sorted(root_mean_square(with_tf32[one], without[other]) for one, other in product(STOCK, STOCK))
    show("PyTorch's with TF32 from without", apart)
    answer["tf32 from fma"] = apart
    required = MATHS if device_of(arguments).type == "cuda" else ()  # on a CPU, all runs of PyTorch are the same
    answer["required"] = [
        verdict(
            f"{math}: median difference, against two of PyTorch's",
            median(answer[math]["ucudnn"]),
            answer[math]["spreads"][-1],
        )
        for math in required
    ]
    save(out_of(arguments), answer)


if __name__ == "__main__":
    run_main(main)
