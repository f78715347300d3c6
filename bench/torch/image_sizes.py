"""Trains a network on images whose size changes from step to step, and compares the time of all steps.

    python -m bench.torch.image_sizes                    ResNet-50 64, 32 sizes, 300 steps
    python -m bench.torch.image_sizes --backend cpu --network small --batch 2 --sizes 2 --steps 4

Sizes are in random order, the same for all settings, and no database is used. Each setting runs in a process of its
own: PyTorch without `cudnn.benchmark`, which measures nothing, and the settings of --setting, with that switch off.
The script ends with status 1 if the steps under a
setting take more than 1.05 of PyTorch's time.
"""

import json
from argparse import ArgumentParser, Namespace
from random import Random
from time import perf_counter

import torch

from bench.tools.results import save_case
from bench.tools.script import add_commit, commit_of, note, out_of, run_main, verdict
from bench.torch.measuring import conditions, device_of, torch_command_line
from bench.torch.networks import apart
from bench.torch.training import CLASSES, NETWORKS, Clock, loss_of, model_of, peaks, turned_on

_MOST_RATIO = 1.05
_STOCK = "stock-off"
_APART = 8  # pixels between two sizes


def train(arguments: Namespace) -> dict[str, object]:
    """Train under one setting, and return what that took."""
    device = device_of(arguments)
    (setting,) = arguments.setting
    on = turned_on(setting, arguments.backend)
    channels, *side = NETWORKS[arguments.network][2]
    model = model_of(arguments.network).to(device).train()
    chosen = Random(0).choices([side[0] + _APART * number for number in range(arguments.sizes)], k=arguments.steps)
    labels = torch.randint(CLASSES, (arguments.batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    clock = Clock(device)
    torch.manual_seed(0)
    clock.wait()
    begin, marks = perf_counter(), [clock.mark()]
    for height in chosen:
        x = torch.randn(arguments.batch, channels, height, *side[1:], device=device)
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(x), labels).backward()
        optimizer.step()
        marks.append(clock.mark())
    times = clock.between_ms(marks)
    answer = {"conditions": conditions(device), "seconds": perf_counter() - begin, "peaks": peaks(device)}
    late_ms = sum(times[len(times) // 2 :])  # most sizes are known by then
    kinds = {} if on is None else on.report().kinds()
    return {**answer, "late_ms": late_ms, "kinds": kinds}


def compare(arguments: Namespace) -> bool:
    """Run all settings, and return whether their steps take at most 1.05 of PyTorch's time."""
    runs, claims = {}, []
    for setting in (_STOCK, *(arguments.setting or ["auto-off", "64MiB-off"])):
        options = ["--setting", setting, "--backend", arguments.backend, "--network", arguments.network]
        options += [f"--{name}={getattr(arguments, name)}" for name in ("batch", "sizes", "steps")]
        runs[setting] = found = apart(__spec__.name, options)
        if "error" in found:
            raise SystemExit(f"{setting}: {found['error']}")
        note(f"{setting}: {found['seconds']:.1f} s")
        if setting != _STOCK:
            for what, field in (("all steps", "seconds"), ("later steps", "late_ms")):
                claims.append(verdict(f"{setting}: {what}", found[field] / runs[_STOCK][field], _MOST_RATIO))
    name = f"{arguments.network} {arguments.batch} x {arguments.sizes} sizes"
    case = {"commit": commit_of(arguments), "steps": arguments.steps, "runs": runs, "claims": claims}
    save_case(out_of(arguments), name, case)
    return all(bool(each["met"]) for each in claims)


def main() -> bool | None:
    """Compare, or train under one setting and print one line of JSON."""
    arguments = _parser().parse_args()
    if not arguments.here:
        return compare(arguments)
    print(json.dumps(train(arguments)))
    return None


def _parser() -> ArgumentParser:
    parser = torch_command_line(__doc__, __spec__.name)
    add_commit(parser)
    parser.add_argument("--network", choices=NETWORKS, default="resnet50", help="network (%(default)s)")
    parser.add_argument("--setting", action="append", help="of bench.torch.training (auto-off and 64MiB-off)")
    parser.add_argument("--batch", type=int, default=64, help="images of a step (%(default)s)")
    parser.add_argument("--sizes", type=int, default=32, help="number of sizes (%(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="number of steps (%(default)s)")
    parser.add_argument("--here", action="store_true", help="train in this process, which the script does by itself")
    return parser


if __name__ == "__main__":
    run_main(main)
