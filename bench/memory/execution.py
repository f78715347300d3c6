"""Runs plans of training steps on a GPU within budgets, and the papers' policies without one, beside PyTorch's step.

    python -m bench.memory.execution                           # 7 networks at 90, 70 and 50 % of PyTorch's peak
    python -m bench.memory.execution --network resnet50 --share 0.8
    python -m bench.memory.execution --papers                  # the papers' policies, without a budget
    python -m bench.memory.execution --papers --math fma --network unet3d   # without TF32 only
    python -m bench.memory.execution --hidden                  # what can be offloaded at no cost
    python -m bench.memory.execution --device cpu --small --out trial.json  # tries the script out

A cell that the file has is not measured again, unless --again says so. PyTorch's own step of a network comes first,
because budgets are shares of its peak. The largest budget comes next, and so on, in the same process, because cuDNN's
trials of algorithms, which take most of the time, are then made once (`bench.memory.budget_series`). In cells with a
budget PyTorch's allocator may not take more than that from the GPU (`set_per_process_memory_fraction`), so a plan that
exceeds it fails. A budget below a step's floor is no failure.

The papers' policies of one network share a process, because operations are then measured once. PyTorch's own step runs
first in it, and ratios are to that. The policies run the configurations of convolutions that they choose: (m) without
workspace, (p) the fastest, Dymem's within what the pool has left. The mini-batch is not divided, as in the papers. Two
networks also train without TF32, in which an H200 computes for a byte over its link about as long as a Titan X did for
VGG-16. With --hidden as much leaves as can while forward computes, and contention is measured in turns
(`bench.memory.contention`).
"""

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bench.memory.budget_series import BudgetTrials
from bench.memory.record_steps import RECIPES
from bench.memory.trial_series import SeriesMember, run_series_apart
from bench.tools.results import load, save_case
from bench.tools.script import command_line, note, run_main
from ucudnn.memory.torch.comparison.trial_result import PYTORCH, TrialSettings
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe
from ucudnn.problem import MathMode

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
WITH_HIDDEN_COPIES = "swap-hidden"
HIDDEN = ("stock", WITH_HIDDEN_COPIES)
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


def recipe_of(cell: ExecutionCell, small: bool) -> TrainingRecipe:
    """Return what is trained."""
    recipe = RECIPES[cell.network]
    batch, shape = SMALL[cell.network] if small else (BATCHES[cell.network], recipe.shape)
    return replace(recipe, batch=batch, shape=shape, variant=replace(recipe.variant, math=MathMode(cell.math)))


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


def settings_of(cell: ExecutionCell, arguments: Namespace, base: Mapping[str, Any]) -> TrialSettings:
    """Return what a cell runs. The budget is a share of PyTorch's peak; context and loaded kernels come on top."""
    return TrialSettings(
        recipe=recipe_of(cell, arguments.small),
        policy=cell.policy,
        budget=int(base["allocated"] * cell.share) + base["outside"] if cell.share else None,
        device=arguments.device,
        steps=arguments.steps,
        capped=bool(cell.share),
        convolutions=cell.convolutions,
    )


def measure(arguments: Namespace, out: Path) -> None:
    """Measure the cells of budgets that are missing."""
    with BudgetTrials() as trials:
        for network in arguments.network or BATCHES:
            shares = sorted(arguments.share or SHARES, reverse=True)
            within = [ExecutionCell(network, arguments.policy, share) for share in shares]
            for cell in (ExecutionCell(network, PYTORCH, 0.0), *within):
                kept = kept_cells(out)
                base = kept.get(str(cell.base), {})
                if str(cell) in kept and not arguments.again:
                    continue
                if cell.share and "allocated" not in base:
                    note(f"{cell}: no budget, because PyTorch's own step has no peak: {base.get('reason')}")
                    continue
                try:
                    answer = trials.run(settings_of(cell, arguments, base)).to_dict()
                except Exception as error:  # noqa: BLE001, because a fault of ours in one cell must not lose the others
                    answer = {"policy": cell.policy, "reason": f"{type(error).__name__}: {error}", "least_bytes": None}
                budget = int(base["allocated"] * cell.share) if cell.share else None
                keep(cell, {"budget": budget, **answer}, arguments, out)


def measure_papers(arguments: Namespace, out: Path) -> None:
    """Measure the policies without a budget that are missing, those of a network in one process."""
    for math in arguments.math or (("tf32",) if arguments.hidden else ("fma", "tf32")):
        for network in arguments.network or BATCHES:
            if math == "fma" and network not in WITHOUT_TF32:
                continue
            kept = kept_cells(out)
            cells = [
                ExecutionCell(network, policy, 0.0, math, CONVOLUTIONS if policy.startswith(CHOOSING) else "")
                for policy in arguments.only or (HIDDEN if arguments.hidden else PAPERS)
            ]
            missing = [cell for cell in cells if arguments.again or not is_whole(cell, kept, hidden=arguments.hidden)]
            for cell, answer in run_series(missing, arguments) if missing else ():
                keep(cell, answer, arguments, out)


def keep(cell: ExecutionCell, answer: dict[str, Any], arguments: Namespace, out: Path) -> None:
    """Write what a cell has found, and say it."""
    answer.pop("memory", None)  # the curve is for pictures
    save_case(out, str(cell), {**cell._asdict(), **answer, **conditions(cell, arguments)})
    note(f"{cell}: {answer.get('reason') or round(answer['step_ms'], 1)}")


def run_series(cells: Sequence[ExecutionCell], arguments: Namespace) -> Iterator[tuple[ExecutionCell, dict[str, Any]]]:
    """Yield each cell of one process with its figures and those of PyTorch's own step, or with why it has none."""
    members = [SeriesMember(PYTORCH)]
    for cell in cells:
        turns = arguments.hidden and cell.policy == WITH_HIDDEN_COPIES
        members.append(SeriesMember(cell.policy, cell.convolutions, contention=turns))
    with closing(run_series_apart(settings_of(cells[0].base, arguments, {}), members)) as results:
        first = next(results)
        if first.result.figures is None:
            raise SystemExit(f"error: PyTorch's own step of {cells[0].network} does not run: {first.result.reason}")
        base = first.to_dict()
        for cell, result in zip(cells, results, strict=True):
            yield cell, {**result.to_dict(), "base_ms": base["step_ms"], "base_allocated": base["allocated"]}


def is_whole(cell: ExecutionCell, kept: Mapping[str, Any], *, hidden: bool) -> bool:
    """Return whether a cell is kept, with its contention where --hidden asks for that."""
    case = kept.get(str(cell))
    return case is not None and not (hidden and cell.policy == WITH_HIDDEN_COPIES and not case.get("contention"))


def kept_cells(path: Path) -> Mapping[str, Any]:
    """Return the cells that are kept."""
    found: Mapping[str, Any] = load(path)["cases"] if path.exists() else {}
    return found


def main() -> None:
    """Measure what is missing."""
    parser = command_line(__doc__, __spec__.name, "memory/execution.json")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="(%(default)s)")
    parser.add_argument("--small", action="store_true", help="small inputs, to try the script out")
    parser.add_argument("--papers", action="store_true", help="the papers' policies without a budget")
    parser.add_argument("--hidden", action="store_true", help="what can be offloaded at no cost")
    parser.add_argument("--network", action="append", choices=BATCHES, help="may be repeated (all)")
    parser.add_argument("--only", action="append", choices=PAPERS, help="a policy of --papers; may be repeated (all)")
    parser.add_argument("--math", action="append", choices=("tf32", "fma"), help="of --papers; may be repeated (both)")
    parser.add_argument("--share", action="append", type=float, help="of PyTorch's peak; may be repeated (0.9 0.7 0.5)")
    parser.add_argument("--policy", default="auto", help="policy of the cells with a budget (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (%(default)s)")
    parser.add_argument("--again", action="store_true", help="measure cells that are kept again")
    arguments = parser.parse_args()
    if arguments.small and arguments.out is None:
        parser.error("--small tries the script out: name a file with --out")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE)
    (measure_papers if arguments.papers or arguments.hidden else measure)(
        arguments, arguments.out or arguments.default_out
    )


if __name__ == "__main__":
    run_main(main)
