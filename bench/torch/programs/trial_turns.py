"""Measures what a program loses while kernels are tried in it, by turns with PyTorch alone in one process.

    python -m bench.torch.programs.trial_turns                        ResNet-50 with cudnn.benchmark, two minutes
    python -m bench.torch.programs.trial_turns --network regnety_032 --form bf16
    python -m bench.torch.programs.trial_turns --network vgg16 --setting 64MiB --seconds 240
    python -m bench.torch.programs.trial_turns --backend cpu --network small --setting 64KiB --seconds 2

Trials are charged with what steps take longer than the program's own, which is known from steps in which all rests. If
trials made these slower, too, their count would be too low. Here PyTorch alone trains for some steps, then the setting
is on for as many, and so on, until nothing is tried any more. A turn in which ucudnn finds out whether the host bounds
the program lasts until that is known, because a pause would begin it anew. Each turn is compared with the mean of
PyTorch's turns before and after it: what its steps take longer is lost. The time of all turns counts as that of the
program, because the share that may be lost is that of the time since ucudnn was turned on.

The script ends with status 1 if more than 5 % of the time was lost. Within a limit it only tells what was lost, because
plans run from the first step on there, and what these take longer than PyTorch's kernels is not lost in trials.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import ucudnn.torch
from bench.tools.results import save_case
from bench.tools.script import commit_of, note, out_of, run_main, verdict
from bench.torch.measuring import conditions, device_of
from bench.torch.network_setting import is_settled, phase_of, turned_on
from bench.torch.network_step import Step, step_of
from bench.torch.network_times import Clock, steps_ms
from bench.torch.programs.command_line import network_command_line
from ucudnn.torch.overrides import process_overrides
from ucudnn.torch.steps.phase import TuningPhase

MOST_LOST = 0.05
_WARM_STEPS = 20
_LEAST_TURNS = 2
_UNINTERRUPTED = {TuningPhase.WARMING.value, TuningPhase.PACING.value}


def turns(
    on: "ucudnn.torch.Enabled", step: Step, clock: Clock, arguments: Namespace
) -> tuple[list[list[float]], list[list[float]]]:
    """Return the milliseconds of the steps of each turn, and of PyTorch's turns, one of which is more."""
    interceptor = on._interceptor
    begin = perf_counter()

    def turn(whose: Any) -> list[float]:
        process_overrides.use(whose)
        times = steps_ms(step, clock, arguments.steps)
        while whose is not None and phase_of(on) in _UNINTERRUPTED and perf_counter() - begin < arguments.seconds:
            times += steps_ms(step, clock, arguments.steps)
        return times

    ours: list[list[float]] = []
    stock = [turn(None)]
    while len(ours) < _LEAST_TURNS or (not is_settled(on) and perf_counter() - begin < arguments.seconds):
        ours.append(turn(interceptor))
        stock.append(turn(None))
    process_overrides.use(interceptor)
    return ours, stock


def lost(ours: Sequence[Sequence[float]], stock: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return what turns took longer than PyTorch's around them.

    Args:
        ours: milliseconds of the steps of each turn.
        stock: those of PyTorch's turns, one more; turns may have different numbers of steps.

    Returns:
        'turns_s', the seconds of all turns but PyTorch's first one; 'lost_s', those that were lost, and 'lost', their
        share; 'step', the median of the ratios of the turns' median steps; 'ours_ms' and 'stock_ms', the mean step of
        each turn.
    """
    compared = list(zip(ours, pairwise(stock), strict=True))
    lost_s = sum(sum(each) - len(each) * fmean(map(fmean, around)) for each, around in compared) / 1e3
    turns_s = sum(map(sum, [*ours, *stock[1:]])) / 1e3
    return {
        "turns_s": turns_s,
        "lost_s": lost_s,
        "lost": lost_s / turns_s,
        "step": median(median(each) / fmean(map(median, around)) for each, around in compared),
        "ours_ms": [fmean(each) for each in ours],
        "stock_ms": [fmean(each) for each in stock],
    }


def measure(arguments: Namespace) -> dict[str, Any]:
    """Tune a network by turns with PyTorch alone, and return what is kept.

    Raises:
        SystemExit: if the setting turns nothing on.
    """
    device = device_of(arguments)
    with TemporaryDirectory(prefix="ucudnn-trial-turns-") as folder:
        on = turned_on(arguments.setting, arguments.backend, str(Path(folder) / "database.sqlite"))
        if on is None:
            raise SystemExit(f"error: --setting {arguments.setting} turns nothing on: try auto, or a size")
        process_overrides.use(None)
        (step, _), clock = step_of(arguments, device), Clock(device)
        for _ in range(_WARM_STEPS):
            step()
        clock.wait()
        ours, stock = turns(on, step, clock, arguments)
        tuned = [each.to_dict() for each in on.report().tuned]
        settled = is_settled(on)
        ucudnn.torch.disable()
    found = {"steps": arguments.steps, "settled": settled, "tuned": tuned, **lost(ours, stock)}
    return {"commit": commit_of(arguments), "conditions": conditions(device), **found}


def told(found: Mapping[str, Any]) -> str:
    """Return a line that tells what was lost and what the ledger counted."""
    counted = sum(each["lost_seconds"] for each in found["tuned"])
    kernels = sum(len(each["kernels"]) for each in found["tuned"])
    return (
        f"{len(found['ours_ms'])} turns of {found['steps']} steps, {'' if found['settled'] else 'not '}settled, "
        f"{kernels} kernels replaced; lost {found['lost_s']:.2f} s of {found['turns_s']:.1f}, counted {counted:.2f}; "
        f"a step takes {found['step']:.3f} of PyTorch's"
    )


def main() -> bool:
    """Measure, print and write."""
    arguments = _parser().parse_args()
    found = measure(arguments)
    note(told(found))
    name = f"{arguments.network} {arguments.form} {arguments.setting}"
    claims = []
    if arguments.setting in ("auto", "auto-off"):
        claims.append(verdict(f"{name}: share of the time that trials lose", found["lost"], MOST_LOST))
    save_case(out_of(arguments), name, {**found, "claims": claims})
    return all(claim["met"] for claim in claims)


def _parser() -> ArgumentParser:
    parser = network_command_line(__doc__, __spec__.name, form="nchw")
    parser.add_argument("--setting", default="auto", help="of bench.torch.networks (%(default)s)")
    parser.add_argument("--steps", type=int, default=24, help="of a turn (%(default)s)")
    parser.add_argument("--seconds", type=float, default=120, help="most seconds of all turns (%(default)s)")
    return parser


if __name__ == "__main__":
    run_main(main)
