"""Whole training steps beside the paper's whole iterations: AlexNet, ResNet-18 and ResNet-50 at its limits, in PyTorch.

    python -m bench.torch.iterations                               about 5 minutes on an H200, most of it planning
    python -m bench.torch.iterations --network resnet18 --math tf32
    python -m bench.torch.iterations --backend cpu                 a trial of the script

The paper compares whole iterations in Caffe on a P100, float32: micro-batched, and undivided within the same limits.
AlexNet 256 takes 1.40 times as long undivided within 64 MiB for each kernel, ResNet-18 128 1.11 times; ResNet-50 32
takes 1.05 times as long within 16 MiB for each kernel as under WD with the same total, 2544 MiB. Here, the steps are
PyTorch's with SGD, NCHW. The ways are PyTorch alone with `cudnn.benchmark` and no limit, undivided, and micro-batched
under `powerOfTwo`. They take steps of the same model in turn. With TF32 the candidates are those of the graph API;
without TF32 they are the legacy algorithms, as in the paper (`cudnn:legacy`). A network in a math mode is one case.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bench.tools.results import save_case
from bench.tools.script import out_of, run_main
from bench.torch.measuring import conditions, device_of, interceptor_for, torch_command_line
from bench.torch.step import network_step, steps_in_turn
from ucudnn.torch.calls.interceptor import Interceptor

CANDIDATES = {"tf32": "cudnn", "fma": "cudnn:legacy"}
"""The backend of each math mode."""


@dataclass(frozen=True, kw_only=True)
class PaperIteration:
    """A row of the paper.

    Attributes:
        batch: mini-batch size.
        limit: limit of each kernel; undivided under WD, its share of the total.
        total: total workspace under WD; "" under WR.
        speedup: the paper's speedup of the whole iteration.
        convolutions: its speedup of the convolutions alone.
        place: where the paper says so.
    """

    batch: int
    limit: str
    total: str = ""
    speedup: float
    convolutions: float
    place: str


PAPER = {
    "alexnet": PaperIteration(batch=256, limit="64MiB", speedup=1.40, convolutions=1.63, place="Figure 10"),
    "resnet18": PaperIteration(batch=128, limit="64MiB", speedup=1.11, convolutions=1.21, place="Figure 11"),
    "resnet50": PaperIteration(
        batch=32, limit="16MiB", total="2544MiB", speedup=1.05, convolutions=1.14, place="Figure 12"
    ),
}


def ways_of(arguments: Namespace, paper: PaperIteration, math: str) -> dict[str, Interceptor | None]:
    """Return the interceptor of each way; None for PyTorch alone."""
    backend = CANDIDATES[math] if arguments.backend == "cudnn" else arguments.backend
    named = Namespace(backend=backend)
    divided = {"policy": "powerOfTwo", **({"total_workspace": paper.total} if paper.total else {})}
    return {
        "pytorch": None,
        "undivided": interceptor_for(named, paper.limit, policy="undivided"),
        "micro-batched": interceptor_for(named, paper.limit, **divided),
    }


def gains(name: str, paper: PaperIteration, answer: Mapping[str, Mapping[str, object]]) -> dict[str, float]:
    """Print the speedups beside the paper's, and return them."""
    times = {way: float(str(found["median_ms"])) for way, found in answer.items()}
    found = {
        "over undivided": times["undivided"] / times["micro-batched"],
        "over PyTorch": times["pytorch"] / times["micro-batched"],
    }
    print(f"{name}: {', '.join(f'{ratio:.3f} {what}' for what, ratio in found.items())}; paper: {paper.speedup}")
    return found


def measure_case(arguments: Namespace, name: str, math: str, device: torch.device) -> None:
    """Measure a network in a math mode, and write what was found."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = math == "tf32"
    paper = PAPER[name]
    head, step = network_step(name, paper.batch, device)
    head |= {"conditions": conditions(device), "limit": paper.limit, "total": paper.total, "math": math}
    answer = steps_in_turn(name, step, ways_of(arguments, paper, math), arguments, device)
    found = {"ways": answer, "gains": gains(f"{name}, {math}", paper, answer), "paper": paper.speedup}
    save_case(out_of(arguments), f"{name}, {math}", {**head, **found})


def main() -> None:
    """Measure all cases, or those that are named."""
    parser = torch_command_line(__doc__, __spec__.name)
    parser.add_argument("--network", action="append", choices=PAPER, help="may be repeated (all)")
    parser.add_argument("--math", action="append", choices=CANDIDATES, help="may be repeated (both)")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each way (%(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before those; the first plans (%(default)s)")
    arguments = parser.parse_args()
    device = device_of(arguments)
    for math in arguments.math or CANDIDATES:
        for name in arguments.network or PAPER:
            measure_case(arguments, name, math, device)


if __name__ == "__main__":
    run_main(main)
