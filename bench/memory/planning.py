"""How long planning takes: large steps and the shipped ones, beside another checkout, which may have other plans.

    git worktree add ../before COMMIT
    python -m bench.memory.planning --before ../before
    python -m bench.memory.planning --step gpt2_medium_48 --cell-seconds 300

It needs no GPU: a CPU plans with costs of an H200, within an allocator's room, as `fit` does on a GPU. What `fit` takes
to its first step there, stage by stage, is in the cells of `bench.memory.rivals`. Large steps are traced as `fit`
traces them. Then each cell is a process without PyTorch, and checkouts take turns. Planning is one thread, so its CPU
seconds are what it takes on a machine that does nothing else. Memory is the most that the process has had. A cell that
the file has is not measured again, unless --again says so.
"""

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import torch

from bench.memory.compared_models import GPTS
from bench.memory.rival_table import print_rows
from bench.memory.rivals import NETWORKS, kept_cells
from bench.tools.results import ROOT, cpu_conditions, save_case
from bench.tools.script import add_commit, command_line, commit_of, note, run_main
from ucudnn.errors import UcudnnError
from ucudnn.memory.step.file import encode_step
from ucudnn.memory.step.shipped import shipped_steps
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe, find_model
from ucudnn.memory.torch.subject.step_program import step_subject
from ucudnn.memory.torch.tracing.traced_program import trace_program

LARGE = {**dict.fromkeys(GPTS, 0.6), "gpt2_medium_12": 0.7, "efficientnet_v2_s": 0.6}
"""Budgets of large steps as shares of their peak; 0.6 of that of twelve layers is below the floor."""
SPANS = (0.5, 0.25, 0.75)
"""Where the budgets of shipped steps lie between floor and peak."""
_NAMES = ("before", "after")
HEADINGS = ["step, budget", "operations", *_NAMES, "ratio", *("ms before", "ms after", "ratio", "policy", "memory")]


def cells(arguments: Namespace) -> Iterator[tuple[str, float]]:
    """Yield steps and shares, of the peak where they are negative: small steps first, because they take seconds."""
    steps, dice = arguments.step or [*shipped_steps(), *LARGE], Random(0)
    spans = [round(dice.random(), 3) for _ in range(arguments.random)] or SPANS
    yield from ((step, share) for share in spans for step in steps if step not in LARGE)
    yield from ((step, -share) for step in steps if step in LARGE for share in arguments.share or [LARGE[step]])


def record(recipe: TrainingRecipe, path: Path) -> None:
    """Write the step that `fit` traces into a file; parameters take no memory, because nothing writes them."""
    with torch.device("meta"):
        model = find_model(recipe.model)()
    model = model.to_empty(device="cpu").train()
    shape = (recipe.batch, *recipe.shape)
    form = torch.channels_last if recipe.variant.channels_last else torch.contiguous_format
    x = torch.zeros(shape, dtype=torch.long if recipe.tokens else torch.float32).contiguous(memory_format=form)
    model = model if recipe.tokens else model.to(memory_format=form)
    y = torch.zeros(shape if recipe.tokens else recipe.batch, dtype=torch.long)
    loss = find_model(recipe.loss) if recipe.tokens else torch.nn.functional.cross_entropy
    with torch.autocast("cpu", torch.bfloat16, enabled=recipe.autocast is not None):
        subject = step_subject(model, (x, y), loss, torch.optim.AdamW(model.parameters()))
        path.write_bytes(encode_step(trace_program(subject, path.stem, recipe.batch).graph))


def plan(checkout: Path, step: str, share: float, arguments: Namespace) -> dict[str, Any]:
    """Plan a step in a checkout, in a process of its own."""
    most_s = arguments.cell_seconds
    asked = {"step": step, "share": share, "policy": arguments.policy, "most_cpu_s": most_s}
    paths = os.pathsep.join(map(str, [checkout, ROOT / "bench" / "memory", os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-c", "import planning_cell; planning_cell.main()", json.dumps(asked)]
    environment = {**os.environ, "PYTHONPATH": paths, "UCUDNN_DATABASE": "off"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode == -signal.SIGXCPU:
        return {"reason": f"more than {most_s} s", "more_than_s": most_s}
    if done.returncode:
        return {"reason": (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def measure(arguments: Namespace, out: Path, folder: Path) -> None:
    """Measure what is missing; no cell begins when the time is over."""
    until = monotonic() + arguments.seconds
    conditions = {**cpu_conditions("torch"), "commit": commit_of(arguments)}
    for number, (step, share) in enumerate(cells(arguments)):
        where = f"{-share:.0%} of the peak" if share < 0 else f"floor and {100 * share:.3g}% of what lies above it"
        name, path, row = f"{step}, {where}", folder / f"{step}.json", {"step": step, "share": share}
        if (name in kept_cells(out) and not arguments.again) or monotonic() > until:
            continue
        try:
            if step in LARGE and not path.exists():
                record(NETWORKS[step], path)
            for which in _NAMES if number % 2 else _NAMES[::-1]:
                checkout = ROOT if which == "after" else arguments.before
                opened = str(path.resolve()) if step in LARGE else step
                row[which] = {} if checkout is None else plan(checkout.resolve(), opened, share, arguments)
        except (UcudnnError, ImportError) as error:  # there is no torchvision
            row["after"] = {"reason": str(error)}
        save_case(out, name, {**row, "conditions": conditions})
        note("  ".join(line(name, row)))


def line(name: str, row: Mapping[str, Any]) -> list[str]:
    """Return a row of the table."""
    before, after = (row.get(which, {}) for which in _NAMES)
    texts = [f"{each['cpu_s']:.2f} s" if "cpu_s" in each else each.get("reason", "")[:40] for each in (before, after)]
    taken, most = after.get("cpu_s"), before.get("cpu_s", before.get("more_than_s"))
    ratio = "" if taken is None or most is None else f"{'' if 'cpu_s' in before else 'below '}{taken / most:.3f}"
    steps = [
        f"{each['step_ms']:.2f}" if "step_ms" in each else "refused"[: 9 * ("cpu_s" in each)]
        for each in (before, after)
    ]
    better = f"{after['step_ms'] / before['step_ms']:.4f}" if "step_ms" in before and "step_ms" in after else ""
    memory = f"{after['most_bytes'] / 2**20:.0f} MiB" if "most_bytes" in after else ""
    return [name, str(after.get("operations", "")), *texts, ratio, *steps, better, after.get("policy", ""), memory]


def show(path: Path) -> None:
    """Print all cells, and the median of the ratios of shipped steps."""
    cases = kept_cells(path)
    print_rows([HEADINGS, *(line(name, row) for name, row in cases.items())])
    print(f"{sum('step_ms' not in each.get('after', {}) for each in cases.values())} of {len(cases)} have no plan")
    pairs = [[each.get(which, {}).get("cpu_s") for which in _NAMES] for each in cases.values() if each["share"] > 0]
    ratios = [after / before for before, after in pairs if before and after]
    if ratios:
        print(f"shipped steps: median {median(ratios):.3f}, at most {max(ratios):.3f} of before ({len(ratios)} cells)")


def main() -> None:
    """Measure what is missing, and print all."""
    parser = command_line(__doc__, __spec__.name, "memory/planning.json")
    parser.add_argument("--before", type=Path, help="the other checkout")
    parser.add_argument("--step", action="append", choices=(*LARGE, *shipped_steps()), help="may be repeated (all)")
    parser.add_argument("--share", action="append", type=float, help="of the peak, for large steps (0.6)")
    parser.add_argument("--random", type=int, default=0, help="budgets of each shipped step, drawn at random (three)")
    parser.add_argument("--policy", default="auto", help="(%(default)s)")
    parser.add_argument("--traced", type=Path, help="folder that keeps the large steps that are traced")
    parser.add_argument("--cell-seconds", type=int, default=120, help="most CPU seconds of a cell (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1e9, help="when to begin no further cell")
    parser.add_argument("--again", action="store_true", help="measure cells that are kept again")
    add_commit(parser)
    arguments = parser.parse_args()
    out = arguments.out or arguments.default_out
    with TemporaryDirectory() as folder:
        measure(arguments, out, arguments.traced or Path(folder))
    show(out)


if __name__ == "__main__":
    run_main(main)
