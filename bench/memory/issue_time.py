"""Time that the host takes to issue a fitted step on a GPU, beside eager PyTorch: both take turns in one process.

    python -m bench.memory.issue_time                             # all networks of memory/execution.json
    python -m bench.memory.issue_time --device cpu --runs 3 --out trial.json # tries the script out

Mini-batches are so small that the GPU waits for the host, so the time until a step has been issued is the host's: of
forward, backward and the optimizer together. A plan issues operations, some of them again, and copies. What its step
takes beyond the eager one is divided by their number. Their own work is included, so recomputation and copies look
dearer than the host's part of them is. Hosts have phases
of seconds in which everything takes longer; turns share them, and medians count.
"""

import gc
from collections.abc import Callable
from dataclasses import replace
from operator import sub
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch

from bench.memory.execution import BATCHES, SMALL
from bench.memory.record_steps import RECIPES
from bench.tools.results import save_case
from bench.tools.script import command_line, note, run_main, verdict
from bench.torch.measuring import conditions
from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.torch.comparison.trial import trial_step, trial_subject, with_plan
from ucudnn.memory.torch.comparison.trial_result import TrialSettings
from ucudnn.memory.torch.measuring.training_step import TrainingStep
from ucudnn.memory.torch.running.fit import FitOptions, fit_subject

POLICIES = ("stock", "checkpoint", "vdnn-ext-all-p")
EAGER = "eager"
COUNTED = (ActionKind.RUN, ActionKind.RECOMPUTE, ActionKind.OFFLOAD, ActionKind.PREFETCH)
MOST_US = 3.0
_BATCH = 2


def settings_of(network: str, device: str) -> TrialSettings:
    """Return the step of a network with a mini-batch so small that its host bounds it."""
    recipe = RECIPES[network]
    shape = SMALL[network][1] if device == "cpu" or network.startswith(("unet", "gpt")) else recipe.shape
    recipe = replace(recipe, batch=_BATCH, shape=shape)
    return TrialSettings(recipe=recipe, policy="", budget=None, device=device, steps=1)


def issue_us(step: TrainingStep, wait: Callable[[], None]) -> float:
    """Return the microseconds until a step has been issued; the device has no work before."""
    step.clear()
    wait()
    begin = perf_counter_ns()
    step.run()
    return (perf_counter_ns() - begin) / 1e3


def measure(network: str, device: str, runs: int) -> dict[str, Any]:
    """Return how long the host takes to issue the steps of a network."""
    settings = settings_of(network, device)
    eager = trial_step(settings)
    torch.backends.cudnn.benchmark = False  # trials of algorithms would take minutes, and change no call
    wait = torch.cuda.synchronize if device == "cuda" else _nothing
    eager.run()  # makes the optimizer's state
    planned = {each: fit_subject(trial_subject(eager), FitOptions(policy=each, measured=False)) for each in POLICIES}
    actions = {name: sum(kind in COUNTED for kind, _ in each.plan.actions) for name, each in planned.items()}
    steps = {EAGER: eager, **{name: with_plan(eager, each) for name, each in planned.items()}}
    for each in steps.values():
        for _ in range(5):
            issue_us(each, wait)
    times: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()  # it takes its time in whatever step it comes
    for _ in range(runs):
        for name, each in steps.items():
            times[name].append(issue_us(each, wait))
    gc.enable()
    rows = [
        {
            "plan": name,
            "actions": actions.get(name, 0),
            "issue_us": median(taken),
            "least_us": min(taken),
            "most_us": max(taken),
            "us_each": None if name == EAGER else median(map(sub, taken, times[EAGER])) / actions[name],
        }
        for name, taken in times.items()
    ]
    for fitted in planned.values():
        fitted.close()  # the next network has host memory of its own
    return {"conditions": conditions(torch.device(device)), "runs": runs, "rows": rows}


def _nothing() -> None:
    pass


def main() -> bool:
    """Measure, print and save."""
    parser = command_line(__doc__, __spec__.name, "memory/issue_time.json")
    parser.add_argument("--network", action="append", choices=BATCHES, help="may be repeated (all)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="(%(default)s)")
    parser.add_argument("--runs", type=int, default=40, help="steps of each kind (%(default)s)")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and arguments.out is None:
        parser.error("--device cpu tries the script out: name a file with --out")
    well = True
    for network in arguments.network or BATCHES:
        found = measure(network, arguments.device, arguments.runs)
        rows = found["rows"]
        for row in rows:
            each = "" if row["us_each"] is None else f"{row['us_each']:9.2f} µs for each action"
            note(f"{network:14}{row['plan']:16}{row['actions']:6}{row['issue_us']:11.0f} µs{each}")
        most = max(row["us_each"] for row in rows if row["us_each"] is not None)
        required = verdict(f"{network}: host time of an action beyond eager's operation", most, MOST_US, " µs")
        well &= bool(required["met"])
        save_case(arguments.out or arguments.default_out, network, {**found, "required": required})
    return well


if __name__ == "__main__":
    run_main(main)
