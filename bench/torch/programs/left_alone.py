"""Compares a program that its host bounds, once it is left alone, with the same process before, and with PyTorch alone.

    python -m bench.torch.programs.left_alone                            MobileNetV3-large, bfloat16, channels last
    python -m bench.torch.programs.left_alone --network hrnet_w18 --form last --repeats 5
    python -m bench.torch.programs.left_alone --backend cpu --network small --setting 64KiB --seconds 0 --repeats 1

Processes of such programs differ by more than what is asked. So each one is compared with itself. PyTorch runs alone at
first ("before"). Then the setting is turned on, and steps are taken until nothing is tried any more. Its steps are
timed ("within"), it is turned off, and PyTorch runs alone again ("after"). As many processes do the same with nothing
turned on, because a host may be faster in the first seconds of a process. Both kinds alternate.

The script prints what steps take in each part over those before, as geometric means of processes. It keeps the times of
each process as soon as that has ended.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from math import log
from statistics import geometric_mean, median, stdev
from time import perf_counter
from typing import Any

import torch

import ucudnn.torch
from bench.tools.results import save_case
from bench.tools.script import commit_of, note, out_of, run_main
from bench.torch.measuring import conditions
from bench.torch.network_order import stock_of
from bench.torch.network_setting import is_settled, turned_on
from bench.torch.network_step import Step, step_of
from bench.torch.network_times import Clock, host_ms, steps_ms
from bench.torch.programs.command_line import network_command_line
from bench.torch.programs.own_process import trained

_PARTS = "before", "within", "after"
_PASSED_ON = "backend", "network", "form", "seconds", "tuning_seconds"  # to each process
_WARM_STEPS = 20
_LEFT_STEPS = 100  # that PyTorch alone takes where a setting is turned on
_CHUNK = 20  # steps, after which the host's time is asked


def timed(step: Step, clock: Clock, seconds: float) -> dict[str, list[float]]:
    """Return the milliseconds of steps, and of the host to issue some of them, for as long as is stated."""
    steps: list[float] = []
    hosts: list[float] = []
    begin = perf_counter()
    while not steps or perf_counter() - begin < seconds:
        step()  # the device is idle before it
        steps += steps_ms(step, clock, _CHUNK)
        hosts.append(sum(host_ms(step, clock, 3).values()))
    return {"steps_ms": steps, "hosts_ms": hosts}


def train(arguments: Namespace) -> dict[str, object]:
    """Train in this process, and return what the parts took."""
    device = torch.device("cpu" if arguments.backend == "cpu" else "cuda")
    turned_on(stock_of(arguments.setting), arguments.backend)
    (step, _), clock = step_of(arguments, device), Clock(device)
    for _ in range(_WARM_STEPS):
        step()
    clock.wait()
    found: dict[str, Any] = {"before": timed(step, clock, arguments.seconds)}
    on = turned_on(arguments.setting, arguments.backend)
    begin, taken = perf_counter(), 0
    while taken < _LEFT_STEPS or (not is_settled(on) and perf_counter() - begin < arguments.tuning_seconds):
        step()
        taken += 1
    clock.wait()
    found["within"] = timed(step, clock, arguments.seconds)
    found["settled"], found["steps"] = is_settled(on), taken
    found["tuned"] = [] if on is None else [each.to_dict() for each in on.report().tuned]
    ucudnn.torch.disable()
    found["after"] = timed(step, clock, arguments.seconds)
    return {"conditions": conditions(device), **found}


def ratios(found: dict[str, Any], part: str, what: str) -> float:
    """Return the median time of a part over that before it; `what` is 'steps_ms' or 'hosts_ms'."""
    return median(found[part][what]) / median(found["before"][what])


def compare(arguments: Namespace) -> None:
    """Run both kinds of processes by turns, and print what each part takes."""
    runs: dict[str, list[dict[str, Any]]] = {stock_of(arguments.setting): [], arguments.setting: []}
    for number in range(arguments.repeats):
        for setting in reversed(runs) if number % 2 else runs:
            found = trained(__spec__.name, arguments, setting, _PASSED_ON)
            runs[setting].append(found)
            told = ", ".join(f"{part} {median(found[part]['steps_ms']):.2f} ms" for part in _PARTS)
            note(f"{setting}: {told}; settled: {found['settled']}, after {found['steps']} steps")
            case = {"commit": commit_of(arguments), "seconds": arguments.seconds, "runs": runs, "ratios": means(runs)}
            save_case(out_of(arguments), f"{arguments.network} {arguments.form} {arguments.setting}", case)
    print("\n".join(["over the time before:", *means(runs)]))


def means(runs: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    """Return a line for each part and kind of time of the settings that have processes."""
    return [
        f"{setting:9} {part:7} {what.removesuffix('s_ms'):5} {_mean([ratios(each, part, what) for each in found])}"
        for setting, found in runs.items()
        if found
        for part in _PARTS[1:]
        for what in ("steps_ms", "hosts_ms")
    ]


def _mean(values: list[float]) -> str:
    """Return the geometric mean of ratios, and its relative standard error if there are several."""
    told = f"{geometric_mean(values):.3f}"
    return f"{told}, standard error {stdev(map(log, values)) / len(values) ** 0.5:.3f}" if len(values) > 1 else told


def main() -> None:
    """Compare, or train under one setting and print one line of JSON."""
    arguments = _parser().parse_args()
    if arguments.train:
        print(json.dumps(train(arguments)))
    else:
        compare(arguments)


def _parser() -> ArgumentParser:
    parser = network_command_line(__doc__, __spec__.name, network="mobilenetv3_large_100", form="bf16")
    parser.add_argument("--setting", default="auto", help="of bench.torch.networks (%(default)s)")
    parser.add_argument("--seconds", type=float, default=5, help="of each part (%(default)s)")
    parser.add_argument("--tuning-seconds", type=float, default=30, help="most seconds of tuning (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each kind (%(default)s)")
    parser.add_argument("--train", action="store_true", help="train in this process, which the script does by itself")
    return parser


if __name__ == "__main__":
    run_main(main)
