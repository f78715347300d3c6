"""Trains a network on images whose size changes from step to step, and compares the time of all steps.

    python -m bench.torch.programs.image_sizes                    ResNet-50 64, 32 sizes, 300 steps
    python -m bench.torch.programs.image_sizes --backend cpu --network small --batch 2 --sizes 2 --steps 4

Sizes are in random order, the same for all settings, and no database is used. Each setting runs in a process of its
own: PyTorch without `cudnn.benchmark`, which measures nothing, and the settings of --setting, with that switch off.
The memory of the host is that of the process after all steps. The script ends with status 1 if the steps under a
setting take more than 1.05 of PyTorch's time.
"""

import json
import resource
from argparse import ArgumentParser, Namespace
from itertools import accumulate
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter

import torch

from bench.tools.read_ahead import MOST_READING_S, libraries, read_ahead
from bench.tools.results import save_case
from bench.tools.script import commit_of, note, out_of, run_main, verdict
from bench.torch.measuring import conditions
from bench.torch.network_cell import memory_of
from bench.torch.network_setting import turned_on
from bench.torch.network_step import CLASSES, NETWORKS, loss_of, model_of
from bench.torch.network_times import Clock
from bench.torch.programs.command_line import network_command_line
from bench.torch.programs.own_process import trained

_MOST_RATIO = 1.05
_STOCK = "stock-off"
_PASSED_ON = "backend", "network", "batch", "sizes", "steps"  # to the process of a setting
_APART = 8  # pixels between two sizes
_LATE = 2  # the steps of the second half count apart, because most sizes are known by then


def train(arguments: Namespace) -> dict[str, object]:
    """Train under one setting, and return what that took."""
    device = torch.device("cpu" if arguments.backend == "cpu" else "cuda")
    on = turned_on(arguments.setting, arguments.backend)
    _, batch, (channels, *side) = NETWORKS[arguments.network]
    model = model_of(arguments.network).to(device).train()
    batch = arguments.batch or batch
    heights = [side[0] + _APART * number for number in range(arguments.sizes)]
    chosen = Random(0).choices(heights, k=arguments.steps)
    labels = torch.randint(CLASSES, (batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    clock = Clock(device)
    torch.manual_seed(0)
    clock.wait()
    begin, marks = perf_counter(), [clock.mark()]
    for height in chosen:
        x = torch.randn(batch, channels, height, *side[1:], device=device)
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(x), labels).backward()
        optimizer.step()
        marks.append(clock.mark())
    times = clock.between_ms(marks)
    summary = None if on is None else on.report()
    return {
        "conditions": conditions(device),
        "seconds": perf_counter() - begin,
        "late_ms": sum(times[len(times) // _LATE :]),
        "median_ms": median(times),
        "seconds_so_far": [round(each / 1e3, 3) for each in accumulate(times)][:: max(1, len(times) // 30)],
        "peaks": memory_of(device),
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "kinds": {} if summary is None else summary.kinds(),
        "kernels": 0 if summary is None else len(summary.layers),
        "tuned": [] if summary is None else [each.to_dict() for each in summary.tuned],
    }


def compare(arguments: Namespace) -> bool:
    """Run all settings, and return whether their steps take at most 1.05 of PyTorch's time."""
    runs = {}
    if arguments.backend != "cpu":  # or the first process, which is PyTorch's, would wait for the disk
        read_ahead(libraries(Path(torch.__file__).parent)).join(MOST_READING_S)
    for setting in (_STOCK, *(arguments.setting or ["auto-off", "64MiB-off"])):
        runs[setting] = found = trained(__spec__.name, arguments, setting, _PASSED_ON)
        note(f"{setting}: {found['seconds']:.1f} s, step {found['median_ms']:.2f} ms, {found['kernels']} plans")
    stock = runs[_STOCK]
    claims = []
    for setting, found in runs.items():
        if setting != _STOCK:
            claims.append(verdict(f"{setting}: all steps", found["seconds"] / stock["seconds"], _MOST_RATIO))
            claims.append(verdict(f"{setting}: later steps", found["late_ms"] / stock["late_ms"], _MOST_RATIO))
    name = f"{arguments.network} {arguments.batch} x {arguments.sizes} sizes"
    case = {"commit": commit_of(arguments), "steps": arguments.steps, "runs": runs, "claims": claims}
    save_case(out_of(arguments), name, case)
    return all(bool(each["met"]) for each in claims)


def main() -> bool | None:
    """Compare, or train under one setting and print one line of JSON."""
    arguments = _parser().parse_args()
    if not arguments.train:
        return compare(arguments)
    (arguments.setting,) = arguments.setting
    print(json.dumps(train(arguments)))
    return None


def _parser() -> ArgumentParser:
    parser = network_command_line(__doc__, __spec__.name)
    parser.add_argument("--setting", action="append", help="of bench.torch.network_cell (auto-off and 64MiB-off)")
    parser.add_argument("--batch", type=int, default=64, help="images of a step (%(default)s)")
    parser.add_argument("--sizes", type=int, default=32, help="number of sizes (%(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="number of steps (%(default)s)")
    parser.add_argument("--train", action="store_true", help="train under one setting, which the script does by itself")
    return parser


if __name__ == "__main__":
    run_main(main)
