"""Runs plans of training steps on a GPU within budgets, and the papers' policies without one, beside PyTorch's step.

    python -m bench.memory.execution                           # 7 networks at 90, 70 and 50 % of PyTorch's peak
    python -m bench.memory.execution --quick                   # ResNet-50 only
    python -m bench.memory.execution --apart                   # each budget in a process of its own
    python -m bench.memory.execution --papers                  # the papers' policies, without a budget
    python -m bench.memory.execution --papers --math fma --network unet3d   # without TF32 only
    python -m bench.memory.execution --hidden                  # what can be offloaded at no cost
    python -m bench.memory.execution --limit-seconds 540       # starts nothing that might not end in time
    python -m bench.memory.execution --summary                 # the tables of what is kept, losers first
    python -m bench.memory.execution --device cpu --small      # tries the script out

It continues where it was stopped: a cell that is kept is not measured again, unless --again says so. PyTorch's own step
of a network comes first, because budgets are shares of its peak. The largest budget comes next, and so on, in the same
process, because cuDNN's trials of algorithms, which take most of the time, are then made once
(`ucudnn.memory.torch.trials.budget_series`). Meanwhile the next network's process imports what it needs, and does not
touch the GPU. --apart gives each cell a process of its own. In cells with a budget PyTorch's allocator may not take
more than that from the GPU from the first step on (`set_per_process_memory_fraction`), so a plan that exceeds it fails.
A budget below a step's floor is no failure; the floor is printed.

The papers' policies of one network share a process, because operations are then measured once. PyTorch's own step runs
first in it, and ratios are to that. The policies run the configurations of convolutions that they choose: (m) without
workspace, (p) the fastest, Dymem's within what the pool has left. The mini-batch is not divided, as in the papers. Two
networks also train without TF32, in which an H200 computes for a byte over its link about as long as a Titan X did for
VGG-16.

With --hidden as much leaves as can while forward computes. It should be 90 % of the link's bandwidth times the time of
forward, and the step should take no longer than a plan without copies by more than 1 % and the contention. That is by
how much longer the plan without copies takes while copies of the same sizes run freely beside it, which it never waits
for (`memory.torch.comparison.contention`). All three kinds of steps take turns in one process, --steps times. The
free copies have a buffer of their own: as many bytes as leave in a step, on the device and in pinned host memory. It is
made after the peak was measured, and freed afterwards.
"""

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from bench.memory.execution_tables import WITH_HIDDEN_COPIES, WITHOUT_COPIES, show
from bench.memory.record_steps import RECIPES
from bench.tools.results import load, save_case
from bench.tools.script import command_line, note, run_main
from ucudnn.memory.torch.comparison.trial import run_apart
from ucudnn.memory.torch.comparison.trial_result import PYTORCH, TrialResult, TrialSettings
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe
from ucudnn.memory.torch.trials.budget_series import BudgetTrials
from ucudnn.memory.torch.trials.trial_series import SeriesMember, run_series_apart
from ucudnn.problem import MathMode

GIB = 2**30
BATCHES = {
    "resnet50": 256,
    "vgg16_bn": 64,
    "inception_v3": 64,
    "densenet121": 64,
    "unet2d": 8,
    "unet3d": 4,
    "gpt2": 8,
}
SMALL = {
    "resnet50": (2, (3, 32, 32)),
    "vgg16_bn": (2, (3, 32, 32)),
    "inception_v3": (2, (3, 299, 299)),
    "densenet121": (2, (3, 32, 32)),
    "unet2d": (1, (3, 32, 32)),
    "unet3d": (1, (1, 16, 16, 16)),
    "gpt2": (1, (16,)),
}
SHARES = (0.9, 0.7, 0.5)
WITHOUT_TF32 = ("unet3d", "vgg16_bn")
PAPERS = (
    *("vdnn-conv-p", "vdnn-ext-conv-p", "vdnn-all-p", "vdnn-ext-all-p", "swap", "dymem"),
    *("vdnn-conv-m", "vdnn-ext-conv-m", "vdnn-all-m", "vdnn-ext-all-m", "vdnn-dynamic", "vdnn-ext-dynamic"),
    *("swap-capped", "dymem-skip", "checkpoint", "stock"),
)
CHOOSING = ("vdnn", "dymem")  # how the names of policies begin that choose configurations of convolutions
CONVOLUTIONS = "undivided"
HIDDEN = (WITHOUT_COPIES, WITH_HIDDEN_COPIES)
QUICK = "resnet50"
EXPANDABLE = "expandable_segments:True"


class ExecutionCell(NamedTuple):
    """A network under a policy, at a share of PyTorch's peak; 0 stands for no budget.

    `math` is 'tf32', or 'fma' for float32 without TF32; `convolutions` is the batch-size policy by which the plan
    chooses configurations, '' where PyTorch chooses.
    """

    network: str
    policy: str
    share: float
    math: str = "tf32"
    convolutions: str = ""

    def __str__(self) -> str:
        """Return the name under which the cell is kept."""
        form = f"{' without TF32' if self.math == 'fma' else ''}{f' {self.share:.0%}' if self.share else ''}"
        return f"{self.network} {self.policy}{form}{f', convolutions {self.convolutions}' if self.convolutions else ''}"

    @property
    def base(self) -> "ExecutionCell":
        """PyTorch's own step of the network."""
        return ExecutionCell(self.network, PYTORCH, 0.0, self.math)


def networks_of(arguments: Namespace) -> Sequence[str]:
    """Return the networks that are asked for."""
    return arguments.network or ([QUICK] if arguments.quick else list(BATCHES))


def cells(arguments: Namespace, network: str) -> Iterator[ExecutionCell]:
    """Yield the cells of a network: PyTorch's own step, and then the budgets, the largest first."""
    yield ExecutionCell(network, PYTORCH, 0.0)
    for share in sorted(arguments.share or SHARES, reverse=True):
        yield ExecutionCell(network, arguments.policy, share)


def series(arguments: Namespace) -> Iterator[list[ExecutionCell]]:
    """Yield the cells of the papers' policies, those of each process together."""
    for math in arguments.math or (("tf32",) if arguments.hidden else ("fma", "tf32")):
        for network in networks_of(arguments):
            if math == "tf32" or network in WITHOUT_TF32:
                yield [
                    ExecutionCell(network, policy, 0.0, math, CONVOLUTIONS if policy.startswith(CHOOSING) else "")
                    for policy in arguments.only or (HIDDEN if arguments.hidden else PAPERS)
                ]


def recipe_of(cell: ExecutionCell, small: bool) -> TrainingRecipe:
    """Return what is trained."""
    recipe = RECIPES[cell.network]
    batch, shape = SMALL[cell.network] if small else (BATCHES[cell.network], recipe.shape)
    return replace(recipe, batch=batch, shape=shape, variant=replace(recipe.variant, math=MathMode(cell.math)))


def run_cell(
    cell: ExecutionCell, arguments: Namespace, base: Mapping[str, Any], run: Callable[[TrialSettings], TrialResult]
) -> dict[str, Any]:
    """Run a cell, and return its figures, or the reason why it has none.

    The budget is a share of the peak of PyTorch's own step. Context and loaded kernels come on top, as they do there.
    """
    budget = int(base["allocated"] * cell.share) if cell.share else None
    settings = TrialSettings(
        recipe=recipe_of(cell, arguments.small),
        policy=cell.policy,
        budget_bytes=None if budget is None else budget + base["outside"],
        device=arguments.device,
        steps=arguments.steps,
        capped=budget is not None,
        convolutions=cell.convolutions,
    )
    begin = monotonic()
    try:
        answer = run(settings).to_dict()
        answer.pop("memory", None)  # the curve is for pictures
    except Exception as error:  # noqa: BLE001, because a fault of ours in one cell must not lose the others' time
        answer = {"policy": cell.policy, "reason": f"{type(error).__name__}: {error}", "least_bytes": None}
    return {
        **cell._asdict(),
        "budget": budget,
        **answer,
        "process_s": monotonic() - begin,
        "apart": arguments.apart,
        **conditions(cell, arguments),
    }


def conditions(cell: ExecutionCell, arguments: Namespace) -> dict[str, Any]:
    """Return what a cell depends on beside its name."""
    return {
        "batch": recipe_of(cell, arguments.small).batch,
        "device": arguments.device,
        "machine": machine(arguments.device),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
    }


@cache
def machine(device: str) -> dict[str, str]:
    """Return the GPU's name and all versions."""
    import torch

    from bench.torch import measuring

    return measuring.conditions(torch.device(device))


def measure(arguments: Namespace, out: Path) -> None:
    """Measure the cells that are missing, as long as there is time."""
    begin = monotonic()
    kept = kept_cells(out)
    groups = [
        [cell for cell in cells(arguments, network) if arguments.again or str(cell) not in kept]
        for network in networks_of(arguments)
    ]
    groups = [group for group in groups if group]
    with BudgetTrials() as trials:
        for number, group in enumerate(groups):
            if not arguments.apart:
                trials.prepare(min(2, len(groups) - number))  # this network's process, and the next one's
            for cell in group:
                left = arguments.limit_seconds - (monotonic() - begin)
                if left < arguments.cell_seconds:
                    note(f"{left:.0f} s are left, too few for {cell}: call again")
                    return
                measure_cell(cell, arguments, out, run_apart if arguments.apart else trials.run)


def measure_cell(
    cell: ExecutionCell, arguments: Namespace, out: Path, run: Callable[[TrialSettings], TrialResult]
) -> None:
    """Measure a cell and keep its result. A cell with a budget needs the kept result of PyTorch's own step."""
    base = kept_cells(out).get(str(cell.base), {})
    if cell.share and "allocated" not in base:
        note(f"{cell}: no budget, because PyTorch's own step has no peak: {base.get('reason', 'not measured')}")
        return
    answer = run_cell(cell, arguments, base, run)
    save_case(out, str(cell), answer)
    told = answer.get("reason") or f"{answer['step_ms']:.1f} ms, {answer['allocated'] / GIB:.3f} GiB"
    note(f"{cell}: {told}, {answer['process_s']:.0f} s")


def measure_papers(arguments: Namespace, out: Path) -> None:
    """Measure the policies that are missing, as long as there is time."""
    begin = monotonic()
    for whole in series(arguments):
        kept = kept_cells(out)
        missing = [cell for cell in whole if arguments.again or not is_whole(cell, kept, hidden=arguments.hidden)]
        if not missing:
            continue
        left = arguments.limit_seconds - (monotonic() - begin)
        if left < arguments.cell_seconds:
            note(f"{left:.0f} s are left, too few for {missing[0]} and those behind it: call again")
            return
        for cell, answer in run_series(missing, arguments):
            save_case(out, str(cell), answer)
            told = answer.get("reason") or f"{answer['step_ms']:.1f} ms, {answer['allocated'] / GIB:.3f} GiB"
            note(f"{cell}: {told}, {answer['process_s']:.0f} s")
            if monotonic() - begin > arguments.limit_seconds:
                note("the time is up: call again for the rest")
                return


def run_series(cells: Sequence[ExecutionCell], arguments: Namespace) -> Iterator[tuple[ExecutionCell, dict[str, Any]]]:
    """Yield each cell of one process with its figures and those of PyTorch's own step, or with why it has none."""
    first = cells[0]
    settings = TrialSettings(
        recipe=recipe_of(first, arguments.small),
        policy="",
        budget_bytes=None,
        device=arguments.device,
        steps=arguments.steps,
    )
    members = [SeriesMember(PYTORCH)]
    for cell in cells:
        turns = arguments.hidden and cell.policy == WITH_HIDDEN_COPIES
        members.append(SeriesMember(cell.policy, cell.convolutions, contention=turns))
    begin, base = monotonic(), None
    with closing(run_series_apart(settings, members)) as results:
        for number, result in enumerate(results):
            answer = result.to_dict()
            if number == 0:
                if result.figures is None:
                    raise SystemExit(f"error: PyTorch's own step of {first.network} does not run: {result.reason}")
                base = {"base_ms": answer["step_ms"], "base_allocated": answer["allocated"]}
                continue
            answer.pop("memory", None)  # the curve is for pictures
            cell, now = cells[number - 1], monotonic()
            taken = {"process_s": now - begin, **conditions(cell, arguments)}
            begin = now
            yield cell, {**cell._asdict(), "budget": None, **answer, **(base or {}), **taken}


def is_whole(cell: ExecutionCell, kept: Mapping[str, Any], *, hidden: bool) -> bool:
    """Return whether a cell is kept, with its contention where --hidden asks for that."""
    case = kept.get(str(cell))
    return case is not None and not (hidden and cell.policy == WITH_HIDDEN_COPIES and not case.get("contention"))


def kept_cells(path: Path) -> Mapping[str, Any]:
    """Return the cells that are kept."""
    found: Mapping[str, Any] = load(path)["cases"] if path.exists() else {}
    return found


def main() -> None:
    """Measure what is missing, and print the tables."""
    parser = command_line(__doc__, __spec__.name, "memory/execution.json")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="(%(default)s)")
    parser.add_argument("--small", action="store_true", help="small inputs, to try the script out")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} only")
    parser.add_argument("--apart", action="store_true", help="each cell with a budget in a process of its own")
    parser.add_argument("--papers", action="store_true", help="the papers' policies without a budget")
    parser.add_argument("--hidden", action="store_true", help="what can be offloaded at no cost")
    parser.add_argument("--network", action="append", choices=BATCHES, help="may be repeated (all)")
    parser.add_argument("--only", action="append", choices=PAPERS, help="a policy of --papers; may be repeated (all)")
    parser.add_argument("--math", action="append", choices=("tf32", "fma"), help="of --papers; may be repeated (both)")
    parser.add_argument("--share", action="append", type=float, help="of PyTorch's peak; may be repeated (0.9 0.7 0.5)")
    parser.add_argument("--policy", default="auto", help="policy of the cells with a budget (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (%(default)s)")
    parser.add_argument("--again", action="store_true", help="measure cells that are kept again")
    parser.add_argument("--limit-seconds", type=float, default=1e9, help="most seconds of this call (no limit)")
    parser.add_argument("--cell-seconds", type=float, default=90, help="seconds without which no cell starts")
    parser.add_argument("--fixed-segments", action="store_true", help=f"leave out {EXPANDABLE} of PyTorch's allocator")
    parser.add_argument("--summary", action="store_true", help="print the tables, and measure nothing")
    arguments = parser.parse_args()
    if arguments.small and arguments.out is None:
        parser.error("--small tries the script out: name a file with --out")
    out = arguments.out or arguments.default_out
    if not arguments.fixed_segments:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE)
    if not arguments.summary:
        (measure_papers if arguments.papers or arguments.hidden else measure)(arguments, out)
    show(kept_cells(out))


if __name__ == "__main__":
    run_main(main)
