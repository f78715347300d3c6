"""Runs plans of training steps on a GPU within budgets, and the papers' policies without one, beside PyTorch's step.

    python -m bench.memory.execution                           # 7 networks at 90, 70 and 50 % of PyTorch's peak
    python -m bench.memory.execution --quick                   # ResNet-50 only
    python -m bench.memory.execution --papers                  # the papers' policies, without a budget
    python -m bench.memory.execution --papers --math fma --network unet3d   # without TF32 only
    python -m bench.memory.execution --limit-seconds 540       # starts nothing that might not end in time
    python -m bench.memory.execution --summary                 # the tables of what is kept, losers first
    python -m bench.memory.execution --device cpu --small      # tries the script out

It continues where it was stopped: a cell that is kept is not measured again, unless --again says so. Each cell has a
process of its own. PyTorch's own step comes first, because budgets are shares of its peak. In cells with a budget
PyTorch's allocator may not take more than the budget from the GPU (`set_per_process_memory_fraction`), so a plan that
exceeds it fails. A budget below a step's floor is no failure; the floor is printed.

The papers' policies run the configurations of convolutions that they choose: (m) without workspace, (p) the fastest,
Dymem's within what the pool has left. The mini-batch is not divided, as in the papers. Two networks also train without
TF32, in which an H200 computes for a byte over its link about as long as a Titan X did for VGG-16.
"""

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from bench.memory.record_steps import RECIPES
from bench.tools.results import load, save_case
from bench.tools.script import command_line, note, run_main
from ucudnn.memory.torch.training_step import TrainingRecipe
from ucudnn.memory.torch.trials.trial import PYTORCH, TrialSettings, run_apart
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
CLAIMS = {
    "vdnn-all-p": "1.23 VGG-16 128, 1.27 AlexNet 128, 1.15 AlexNet 128 (study)",
    "vdnn-ext-all-p": "1.05 AlexNet 128, where vDNN takes 1.15",
    "vdnn-all-m": "1.06 AlexNet 128, of base (m)",
    "vdnn-ext-all-m": "1.02 AlexNet 128, of base (m)",
    "vdnn-conv-m": "1.006 AlexNet 512, of base (m)",
    "vdnn-ext-conv-m": "1.001 AlexNet 512, of base (m)",
    "vdnn-dynamic": "1.22 VGG-16 256 within 12 GB",
    "swap": "below 1.10 ResNet-50",
    "dymem": "1 / 1.42 of vDNN's time, ResNet-50 100",
}
"""What the papers say of the time of a step, as multiples of their base's; on a Titan X, a GTX 970 and an M40."""
QUICK = "resnet50"
FLOOR = "is below the floor"
EXPANDABLE = "expandable_segments:True"


class ExecutionCell(NamedTuple):
    """One process: a network under a policy, at a share of PyTorch's peak; 0 stands for no budget.

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


def cells(arguments: Namespace) -> Iterator[ExecutionCell]:
    """Yield the cells in the order of their processes."""
    networks = arguments.network or ([QUICK] if arguments.quick else list(BATCHES))
    if not arguments.papers:
        for network in networks:
            yield ExecutionCell(network, PYTORCH, 0.0)
            yield from (ExecutionCell(network, arguments.policy, share) for share in arguments.share or SHARES)
        return
    for math in arguments.math or ("fma", "tf32"):
        for network in networks:
            if math == "tf32" or network in WITHOUT_TF32:
                yield ExecutionCell(network, PYTORCH, 0.0, math)
                for policy in arguments.only or PAPERS:
                    yield ExecutionCell(network, policy, 0.0, math, CONVOLUTIONS if policy.startswith(CHOOSING) else "")


def recipe_of(cell: ExecutionCell, small: bool) -> TrainingRecipe:
    """Return what is trained."""
    recipe = RECIPES[cell.network]
    batch, shape = SMALL[cell.network] if small else (BATCHES[cell.network], recipe.shape)
    return replace(recipe, batch=batch, shape=shape, variant=replace(recipe.variant, math=MathMode(cell.math)))


def run_cell(cell: ExecutionCell, arguments: Namespace, base: Mapping[str, Any]) -> dict[str, Any]:
    """Run the process of a cell, and return its figures, or the reason why it has none.

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
        answer = run_apart(settings).to_dict()
        answer.pop("memory", None)  # the curve is for pictures
    except Exception as error:  # noqa: BLE001, because a fault of ours in one cell must not lose the others' time
        answer = {"policy": cell.policy, "reason": f"{type(error).__name__}: {error}", "least_bytes": None}
    return {
        **cell._asdict(),
        "budget": budget,
        **answer,
        "process_s": monotonic() - begin,
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
    for cell in cells(arguments):
        kept = kept_cells(out)
        if str(cell) in kept and not arguments.again:
            continue
        left = arguments.limit_seconds - (monotonic() - begin)
        if left < arguments.cell_seconds:
            note(f"{left:.0f} s are left, too few for {cell}: call again")
            return
        base = kept.get(str(cell.base), {})
        if cell.share and "allocated" not in base:
            note(f"{cell}: no budget, because PyTorch's own step has no peak: {base.get('reason', 'not measured')}")
            continue
        answer = run_cell(cell, arguments, base)
        save_case(out, str(cell), answer)
        told = answer.get("reason") or f"{answer['step_ms']:.1f} ms, {answer['allocated'] / GIB:.3f} GiB"
        note(f"{cell}: {told}, process {answer['process_s']:.0f} s")


def kept_cells(path: Path) -> Mapping[str, Any]:
    """Return the cells that are kept."""
    found: Mapping[str, Any] = load(path)["cases"] if path.exists() else {}
    return found


def budget_rows(cases: Sequence[Mapping[str, Any]], base: Mapping[str, Any]) -> list[str]:
    """Return a line for each cell with a budget: those that failed first, then the slowest."""
    lines = []
    for case in sorted(cases, key=lambda each: (_rank(each), -_slowdown(each, base))):
        head = f"| {case['network']} | {case['share']:.0%} | {case['budget'] / GIB:.3f} |"
        if "allocated" not in case:
            what = "below the floor" if _rank(case) else "FAILED"
            lines.append(f"{head} {what}: {case['reason']} | | | | | | | | |")
            continue
        reserved = case["reserved"] or case["allocated"]
        overlap = "" if case["overlap"] is None else f"{case['overlap']:.0%}"
        lines.append(
            f"{head} {case['predicted_peak'] / GIB:.3f} | {case['allocated'] / GIB:.3f} |"
            f" {case['predicted_peak'] / case['allocated'] - 1:+.1%} | {reserved / case['allocated'] - 1:+.1%} |"
            f" {case['predicted_ms']:.1f} | {case['step_ms']:.1f} | {case['predicted_ms'] / case['step_ms'] - 1:+.1%} |"
            f" {_slowdown(case, base):.2f} | {case['offloaded'] / GIB:.2f} {overlap} |"
        )
    return lines


def _slowdown(case: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    return float(case.get("step_ms", 0) / base[_key(case)]["step_ms"])


def _rank(case: Mapping[str, Any]) -> int:
    """Order: what failed, what lies below the floor, what ran."""
    return 2 if "allocated" in case else int(FLOOR in case["reason"])


def paper_rows(cases: Sequence[Mapping[str, Any]], base: Mapping[str, Any]) -> list[str]:
    """Return a line for each policy without a budget: those that failed first, then the slowest."""
    lines = []
    for case in sorted(cases, key=lambda each: ("step_ms" in each, -_slowdown(each, base))):
        head = f"| {case['network']} | {_MATHS[_math(case)]} | {case['policy']} | {_kernels(case)} |"
        if "allocated" not in case:
            lines.append(f"{head} FAILED: {case['reason']} | | | | | | | | | |")
            continue
        overlap = "" if case["overlap"] is None else f"{case['overlap']:.0%}"
        lines.append(
            f"{head} {case['predicted_ms']:.1f} | {case['step_ms']:.1f} |"
            f" {case['predicted_ms'] / case['step_ms'] - 1:+.1%} |"
            f" {_slowdown(case, base):.2f} | {CLAIMS.get(case['policy'], '')} |"
            f" {case['predicted_peak'] / GIB:.3f} | {case['allocated'] / GIB:.3f} |"
            f" {case['predicted_peak'] / case['allocated'] - 1:+.1%} |"
            f" {case['allocated'] / base[_key(case)]['allocated']:.0%} |"
            f" {case['offloaded'] / GIB:.2f} / {case['prefetched'] / GIB:.2f} | {overlap} |"
        )
    return lines


def pair_rows(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each step of which vDNN and vDNNExt ran with the same offloads: the least gain first."""
    times = {(*_key(case), case["policy"]): case["step_ms"] for case in cases if "step_ms" in case}
    found = []
    for (network, math, policy), extended in times.items():
        ours = times.get((network, math, policy.replace("vdnn-ext", "vdnn")))
        if policy.startswith("vdnn-ext") and ours is not None:
            gain = extended / ours - 1
            name = policy.removeprefix("vdnn-ext-")
            found.append((gain, f"| {network} | {_MATHS[math]} | {name} | {ours:.1f} | {extended:.1f} | {gain:+.1%} |"))
    return [line for _, line in sorted(found, reverse=True)]


_MATHS = {"tf32": "TF32", "fma": "float32"}


def _math(case: Mapping[str, Any]) -> str:
    return str(case.get("math", "tf32"))


def _key(case: Mapping[str, Any]) -> tuple[str, str]:
    return str(case["network"]), _math(case)


def _kernels(case: Mapping[str, Any]) -> str:
    """Return how many convolutions ran as the plan chose, and the largest workspace."""
    if not case.get("configured"):
        return "PyTorch's"
    divided = f", {case['divided']} divided" if case["divided"] else ""
    return f"{case['configured']}{divided}, {case['workspace'] / GIB:.3f} GiB"


BUDGET_COLUMNS = (
    *("network", "budget", "GiB", "predicted GiB", "measured GiB", "off", "reserved over allocated", "predicted ms"),
    *("ms", "off", "of PyTorch's time", "GiB to the host, overlap"),
)
PAPER_COLUMNS = (
    *("network", "math", "policy", "convolutions by the plan, largest workspace", "predicted ms", "ms", "off"),
    *("of PyTorch's time", "the paper's, of its base", "predicted GiB", "measured GiB", "off", "of PyTorch's peak"),
    *("GiB to the host / back", "overlap"),
)
PAIR_COLUMNS = ("network", "math", "offloads", "vDNN ms", "vDNNExt ms", "vDNNExt over vDNN")


def show(cases: Mapping[str, Any]) -> None:
    """Print the tables of what is kept, and how many of the required figures hold."""
    base = {_key(case): case for case in cases.values() if case["policy"] == PYTORCH and "allocated" in case}
    for (network, math), case in base.items():
        took = f"{case['step_ms']:.1f} ms, {case['allocated'] / GIB:.3f} GiB"
        print(f"PyTorch's own step of {network} {case['batch']}, {_MATHS[math]}: {took}")
    there = [case for case in cases.values() if _key(case) in base]
    within = [case for case in there if case["share"]]
    without = [case for case in there if not case["share"] and case["policy"] != PYTORCH]
    for columns, rows in (
        (BUDGET_COLUMNS, budget_rows(within, base)),
        (PAPER_COLUMNS, paper_rows(without, base)),
        (PAIR_COLUMNS, pair_rows(without)),
    ):
        if rows:
            print("\n| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
            print("\n".join(rows))
    ran = [case for case in within if "allocated" in case]
    if within:
        failed = sum(_rank(case) == 0 for case in within)
        peak = sum(abs(case["predicted_peak"] / case["allocated"] - 1) <= 0.02 for case in ran)
        time = sum(abs(case["predicted_ms"] / case["step_ms"] - 1) <= 0.05 for case in ran)
        waste = sum((case["reserved"] or case["allocated"]) <= 1.05 * case["allocated"] for case in ran)
        below = len(within) - len(ran) - failed
        print(f"\n{len(within)} cells: {failed} failed, {below} below the floor, {len(ran)} ran")
        print(f"of these, peaks predicted within 2 %: {peak}, times within 5 %: {time}")
        print(f"and at most 5 % more reserved than allocated: {waste}")


def main() -> None:
    """Measure what is missing, and print the tables."""
    parser = command_line(__doc__, __spec__.name, "memory/execution.json")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="(%(default)s)")
    parser.add_argument("--small", action="store_true", help="small inputs, to try the script out")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} only")
    parser.add_argument("--papers", action="store_true", help="the papers' policies without a budget")
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
        measure(arguments, out)
    show(kept_cells(out))


if __name__ == "__main__":
    run_main(main)
