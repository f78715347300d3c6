"""Trains whole networks in PyTorch, with ucudnn and without: the tables of tuned and of limited programs in the docs.

    python -m bench.torch.networks                              all networks in all forms, with cudnn.benchmark
    python -m bench.torch.networks --network vgg16 --form nchw --setting stock-off --setting auto-off --repeats 3
    python -m bench.torch.networks --setting stock --setting 64MiB --out bench/results/torch/networks_64MiB.json
    python -m bench.torch.networks --picture docs/networks.png  draws the results, and measures nothing
    python -m bench.torch.networks --backend cpu --network small --steps 2 --out trial.json

Each network, form, setting and repeat runs in a process of its own, without a database. Those that the file has are
skipped, so a call continues where an earlier one stopped. Settings alternate. `bench.torch.training` has the networks,
forms and settings. A process trains until nothing is tried any more, but no longer than --tuning-seconds. Then --steps
steps are timed between events at their ends. The host's time is that to issue a step to an idle device.
"""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from bench.tools.results import ROOT, load, save_case
from bench.tools.script import add_commit, commit_of, note, out_of, run_main
from bench.torch.comparison import draw
from bench.torch.measuring import conditions, device_of, torch_command_line
from bench.torch.training import (
    FORMS,
    NETWORKS,
    SETTINGS,
    Clock,
    by_turns,
    host_ms,
    is_settled,
    peaks,
    step_of,
    steps_ms,
    turned_on,
)
from ucudnn.settings import VARIABLES


def measure(arguments: Namespace) -> dict[str, object]:
    """Train one network under one setting in this process, and return what that took."""
    device = device_of(arguments)
    (network,), (form,), (setting,) = arguments.network, arguments.form, arguments.setting
    on = turned_on(setting, arguments.backend)
    step, clock = step_of(network, form, device), Clock(device)
    clock.wait()
    begin = perf_counter()
    loss = step()
    clock.wait()
    first_step_s = perf_counter() - begin
    begin, steps = perf_counter(), 0
    while steps < arguments.steps or (perf_counter() - begin < arguments.tuning_seconds and not is_settled(on)):
        for _ in range(5):  # nothing waits for the device, because a slow host would lose its lead at each wait
            loss = step()
        steps += 5
    answer: dict[str, object] = {"settled": is_settled(on), "tuning_s": perf_counter() - begin, "peaks": peaks(device)}
    times = steps_ms(step, clock, arguments.steps)
    answer |= {"conditions": conditions(device), "first_step_s": first_step_s, "step_ms": median(times)}
    answer |= {"samples_ms": times, "host_ms": host_ms(step, clock), "loss": float(loss)}
    if on is not None:
        answer["tuned"] = [each.to_dict() for each in on.report().tuned]
        if is_settled(on):
            answer["by_turns"] = by_turns(on, step, clock)
    return answer


def apart(module: str, options: list[str]) -> dict[str, Any]:
    """Run a script in a process without a database; return the JSON of its last line, or the error that ended it."""
    environment = {**os.environ, VARIABLES["database"]: "off"}
    command = [sys.executable, "-m", module, "--here", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def run(arguments: Namespace, out: Path) -> None:
    """Measure what the file lacks."""
    known = load(out)["cases"] if out.exists() else {}
    networks = arguments.network or [each for each in NETWORKS if each != "small"]
    every = product(networks, arguments.form or FORMS, range(arguments.repeats), arguments.setting or SETTINGS[:2])
    for network, form, repeat, setting in every:
        name = f"{network} {form} {setting} {repeat}"
        if name in known and "error" not in known[name]:
            continue
        options = ["--network", network, "--form", form, "--setting", setting, "--backend", arguments.backend]
        options += ["--steps", str(arguments.steps), "--tuning-seconds", str(arguments.tuning_seconds)]
        answer = apart(__spec__.name, options)
        save_case(out, name, {"commit": commit_of(arguments), **answer})
        note(f"{name}: {answer['error'] if 'error' in answer else round(answer['step_ms'], 2)}")


def main() -> None:
    """Measure what is missing, draw what is kept, or train under one setting and print one line of JSON."""
    arguments = _parser().parse_args()
    if arguments.here:
        print(json.dumps(measure(arguments)))
        return
    out = out_of(arguments)
    if out is None:
        raise SystemExit("error: a trial keeps its rows in a file: give --out")
    if arguments.picture:
        draw(load(out)["cases"], arguments.picture)
    else:
        run(arguments, out)


def _parser() -> ArgumentParser:
    parser = torch_command_line(__doc__, __spec__.name)
    add_commit(parser)
    parser.add_argument("--network", action="append", choices=NETWORKS, help="may be repeated (all)")
    parser.add_argument("--form", action="append", choices=FORMS, help="may be repeated (all)")
    parser.add_argument("--setting", action="append", help=f"{', '.join(SETTINGS)}; may be repeated (stock, auto)")
    parser.add_argument("--repeats", type=int, default=1, help="processes of each (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps (%(default)s)")
    parser.add_argument("--tuning-seconds", type=float, default=30, help="most seconds of tuning (%(default)s)")
    parser.add_argument("--picture", type=Path, help="draw what is kept into a file, and measure nothing")
    parser.add_argument("--here", action="store_true", help="train in this process, which the script does by itself")
    return parser


if __name__ == "__main__":
    run_main(main)
