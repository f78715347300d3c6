"""Training steps of ResNet-50 and AlexNet, NCHW, TF32: PyTorch alone, and with its convolutions within limits.

    python -m bench.torch.step                        about 4 minutes on an H200, most of it planning
    python -m bench.torch.step --network alexnet      30 seconds
    python -m bench.torch.step --bounded              without the runs of ucudnn that no limit bounds
    python -m bench.torch.step --backend cpu          a trial of the script

PyTorch alone has `torch.backends.cudnn.benchmark` on and no limit. All ways take steps of the same model in turn. The
times are those of whole steps: forward, backward and SGD (medians). One more step of each way, which is not timed,
measures the memory that each convolution allocates besides its results: its workspace, and copies of operands in
another layout. For PyTorch, each gradient is measured alone. A network under a policy (UCUDNN_BATCH_SIZE_POLICY) is one
case of the results.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter

import torch
from torch import nn

from bench.memory import models as own
from bench.tools.results import save_case
from bench.tools.script import out_of, run_main, verdict
from bench.torch.measuring import (
    MIB,
    ConvolutionMemory,
    conditions,
    device_of,
    elapsed_ms,
    interceptor_for,
    torch_command_line,
    training_step,
)
from bench.torch.training import small_resnet
from ucudnn.settings import Settings
from ucudnn.torch.calls.interceptor import Interceptor
from ucudnn.torch.overrides import process_overrides
from ucudnn.torch.summary import summarize
from ucudnn.units import parse_bytes

NO_LIMIT = "100GiB"
MOST_SLOWER = {"64MiB": 1.03, "16MiB": 1.15}
"""Largest ratio to PyTorch's time that was aimed at, by limit."""


def image_model(name: str) -> tuple[nn.Module, str]:
    """Return ResNet-50 or AlexNet, from torchvision if it is installed, and the name of its source."""
    try:
        from torchvision import __version__, models
    except (ImportError, RuntimeError):  # RuntimeError if it was built for another PyTorch
        return getattr(own, name)(), own.__name__
    return getattr(models, name)(), f"torchvision {__version__}"


def ways_of(arguments: Namespace) -> dict[str, Interceptor | None]:
    """Return the interceptor of each way; None for PyTorch alone."""
    limits = {limit: limit for limit in arguments.limit} | ({} if arguments.bounded else {"no limit": NO_LIMIT})
    return {"pytorch": None, **{way: interceptor_for(arguments, limit) for way, limit in limits.items()}}


def first_steps(interceptor: Interceptor | None, step: Callable[[], object], warmup: int) -> dict[str, object]:
    """Take the first steps, which plan, and a step that measures the memory of convolutions."""
    begin = perf_counter()
    for _ in range(warmup):
        step()
    answer: dict[str, object] = {"first_steps_s": perf_counter() - begin}
    with ConvolutionMemory(together=interceptor is not None) as memory:
        step()
    return {**answer, "largest_bytes": memory.largest_bytes, "convolutions": memory.calls}


def network_step(name: str, batch: int, device: torch.device) -> tuple[dict[str, object], Callable[[], object]]:
    """Return where a network is from with its mini-batch, and its training step; a small one on the CPU."""
    torch.manual_seed(0)
    on_cpu = device.type == "cpu"
    model, source = (small_resnet(4, 1), "small") if on_cpu else image_model(name)
    batch, size = (4, 16) if on_cpu else (batch, 224)
    x = torch.randn(batch, 3, size, size, device=device)
    step = training_step(model.to(device).train(), x, torch.randint(10, (batch,), device=device))
    return {"model": source, "batch": batch}, step


def steps_in_turn(
    name: str,
    step: Callable[[], object],
    ways: Mapping[str, Interceptor | None],
    arguments: Namespace,
    device: torch.device,
) -> dict[str, dict[str, object]]:
    """Take the steps of all ways in turn; return the times and the memory of each.

    Args:
        name: name of the network.
        step: takes one training step.
        ways: the interceptor of each way; None for PyTorch alone.
        arguments: the numbers of steps, `warmup` and `steps`.
        device: where the steps are taken.
    """
    answer: dict[str, dict[str, object]] = {}
    for way, interceptor in ways.items():
        process_overrides.use(interceptor)
        answer[way] = first_steps(interceptor, step, arguments.warmup)
        seconds, largest = (float(str(answer[way][key])) for key in ("first_steps_s", "largest_bytes"))
        print(f"{name} {way:10} first steps {seconds:6.1f} s, largest allocation {largest / MIB:8.1f} MiB", flush=True)
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(arguments.steps):
        for way in list(ways) if turn % 2 else [*ways][::-1]:
            process_overrides.use(ways[way])
            step()  # not timed, because caches hold the data of another way
            samples[way].append(elapsed_ms(step, device))
    process_overrides.use(None)
    for way, interceptor in ways.items():
        answer[way] |= {"median_ms": median(samples[way]), "samples_ms": samples[way]}
        if interceptor is not None:
            summary = summarize([interceptor])
            answer[way] |= {"left": summary.left, "calls": summary.calls, "planned_bytes": summary.workspace_bytes}
            answer[way]["configurations"] = [(each.problem, each.configuration) for each in summary.layers]
    return answer


def verdicts(name: str, answer: Mapping[str, Mapping[str, object]]) -> list[dict[str, object]]:
    """Print how the ways compare; return each figure beside the value that was aimed at."""
    stock = float(str(answer["pytorch"]["median_ms"]))
    found = []
    for way, known in answer.items():
        taken = float(str(known["median_ms"]))
        print(f"{name} {way:10} {taken:8.2f} ms, {taken / stock:.3f} of PyTorch's", flush=True)
        if way in MOST_SLOWER:
            found.append(verdict(f"{name} at {way}: step against PyTorch's", taken / stock, MOST_SLOWER[way]))
            largest = float(str(known["largest_bytes"])) / MIB
            found.append(verdict(f"{name} at {way}: largest allocation", largest, parse_bytes(way) / MIB, " MiB"))
    return found


def main() -> None:
    """Measure, print and write."""
    parser = torch_command_line(__doc__, __spec__.name)
    parser.add_argument("--network", action="append", choices=("resnet50", "alexnet"), help="may be repeated (both)")
    parser.add_argument("--batch", type=int, default=256, help="mini-batch size (%(default)s)")
    parser.add_argument("--limit", action="append", help="may be repeated (64MiB and 16MiB)")
    parser.add_argument("--bounded", action="store_true", help="leave out ucudnn without a limit, which saves planning")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each way (%(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before those; the first plans (%(default)s)")
    arguments = parser.parse_args()
    arguments.limit = arguments.limit or list(MOST_SLOWER)
    device = device_of(arguments)
    for name in arguments.network or ("resnet50", "alexnet"):
        head, step = network_step(name, arguments.batch, device)
        answer = steps_in_turn(name, step, ways_of(arguments), arguments, device)
        case = {"conditions": conditions(device), **head, "ways": answer, "required": verdicts(name, answer)}
        save_case(out_of(arguments), f"{name}, {Settings.load().policy.value}", case)


if __name__ == "__main__":
    run_main(main)
