"""Training steps of ResNet-50 and AlexNet, NCHW, TF32: PyTorch alone, and with its convolutions within limits.

    python -m bench.torch.step                        # about 4 minutes on an H200, most of it planning
    python -m bench.torch.step --network alexnet      # 30 seconds
    python -m bench.torch.step --bounded              # without ucudnn at no limit, of which nothing is required
    python -m bench.torch.step --backend cpu          # tries the script out

PyTorch alone has `torch.backends.cudnn.benchmark` on and no limit. All take steps of the same model in turn; times are
of whole steps (forward, backward, SGD), medians. One more step of each, not timed, measures what each convolution takes
besides what it returns: that is its workspace, and copies of operands in another layout; of PyTorch's own, with each
gradient by itself.
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from time import perf_counter

import torch

from bench.tools.results import save_case
from bench.torch.models import (
    MIB,
    ConvolutionMemory,
    conditions,
    device_of,
    elapsed_ms,
    image_model,
    out_of,
    small_options,
    small_resnet,
    switch_for,
    training_step,
    verdict,
)
from ucudnn.settings import Settings
from ucudnn.torch.interceptor import Interceptor
from ucudnn.torch.overrides import process_overrides
from ucudnn.torch.summary import summarize
from ucudnn.units import parse_bytes

NO_LIMIT = "100GiB"
MOST_SLOWER = {"64MiB": 1.03, "16MiB": 1.15}


def ways_of(arguments: argparse.Namespace) -> dict[str, Interceptor | None]:
    """Return the switch of each way; None for PyTorch alone."""
    limits = {limit: limit for limit in arguments.limit} | ({} if arguments.bounded else {"no limit": NO_LIMIT})
    return {"pytorch": None, **{way: switch_for(arguments, limit) for way, limit in limits.items()}}


def first_steps(switch: Interceptor | None, step: Callable[[], object], warmup: int) -> dict[str, object]:
    """Take first steps, which plan, and one that tells what convolutions take."""
    begin = perf_counter()
    for _ in range(warmup):
        step()
    answer: dict[str, object] = {"first_steps_s": perf_counter() - begin}
    with ConvolutionMemory(together=switch is not None) as memory:
        step()
    return {**answer, "largest_bytes": memory.largest_bytes, "convolutions": memory.calls}


def measure(
    arguments: argparse.Namespace, name: str, device: torch.device, keep: Callable[[dict[str, object]], None]
) -> dict[str, object]:
    """Return the times and the memory of one network's steps, each way; what is known before the end is kept."""
    torch.manual_seed(0)
    on_cpu = device.type == "cpu"
    model, source = (small_resnet(4, 1), "small") if on_cpu else image_model(name)
    batch, size = (4, 16) if on_cpu else (arguments.batch, 224)
    x = torch.randn(batch, 3, size, size, device=device)
    step = training_step(model.to(device).train(), x, torch.randint(10, (batch,), device=device))
    ways = ways_of(arguments)
    answer: dict[str, dict[str, object]] = {}
    for way, switch in ways.items():
        process_overrides.use(switch)
        answer[way] = first_steps(switch, step, arguments.warmup)
        seconds, largest = (float(str(answer[way][key])) for key in ("first_steps_s", "largest_bytes"))
        print(f"{name} {way:10} first steps {seconds:6.1f} s, largest allocation {largest / MIB:8.1f} MiB", flush=True)
        keep({"model": source, "batch": batch, "ways": answer})
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(arguments.steps):
        for way in list(ways) if turn % 2 else list(reversed(ways)):
            process_overrides.use(ways[way])
            step()  # what was cached for another way is not asked of this one
            samples[way].append(elapsed_ms(step, device))
        keep({"model": source, "batch": batch, "ways": answer, "samples_ms": samples})
    process_overrides.use(None)
    for way, switch in ways.items():
        answer[way] |= {"median_ms": median(samples[way]), "samples_ms": samples[way]}
        if switch is not None:
            summary = summarize([switch])
            answer[way] |= {"left": summary.left, "calls": summary.calls, "planned_bytes": summary.workspace_bytes}
            answer[way]["configurations"] = [(each.problem, each.configuration) for each in summary.layers]
    return {"model": source, "batch": batch, "ways": answer, "required": verdicts(name, answer)}


def verdicts(name: str, answer: Mapping[str, Mapping[str, object]]) -> list[dict[str, object]]:
    """Print how the ways compare, and return what is found beside what is required."""
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


def measure_case(arguments: argparse.Namespace, name: str, device: torch.device) -> None:
    """Measure one network under the policy of the environment, and write what is known after each step."""
    head = {"conditions": conditions(device)}
    keep = partial(save_case, out_of(arguments), f"{name}, {Settings.load().policy.value}")
    keep({**head, **measure(arguments, name, device, lambda known: keep({**head, "cut_off": True, **known}))})


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", choices=("resnet50", "alexnet"), help="default: both")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--limit", action="append", help="default: 64MiB and 16MiB")
    parser.add_argument("--bounded", action="store_true", help="leave out ucudnn without a limit, which saves planning")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each way")
    parser.add_argument("--warmup", type=int, default=3, help="steps before, the first of which plans")
    small_options(parser, "step.json")
    arguments = parser.parse_args()
    arguments.limit = arguments.limit or list(MOST_SLOWER)
    device = device_of(arguments)
    for name in arguments.network or ("resnet50", "alexnet"):
        measure_case(arguments, name, device)


if __name__ == "__main__":
    main()
