"""Plans of nnU-Net v2 on a GPU: predicted peaks beside measured ones, and the largest patches within 24 GiB.

    python -m bench.memory.nnunet --predict                       # on any CPU: makes the plans, and predicts
    python -m bench.memory.nnunet --seconds 250                   # on a GPU: trains them
    python -m bench.memory.nnunet --show
    python -m bench.memory.nnunet --predict --small --out trial.json    # and --device cpu: tries the script out

`--predict` needs all that nnU-Net needs, because its planners make the plans. Training needs its network and loss. A
cell is a process of its own. First all plans train as nnU-Net trains them, some beside each other, because their bytes
count. Then patches train within the budget, one after the other, and then plans with `fit`, whose prediction has
cuDNN's workspaces, too. What predicts on a CPU knows tensors, and workspaces of recorded convolutions alone. What
trains on a CPU has no autocast, so that its peaks miss the predictions. A cell that the file has is not measured again.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from threading import BoundedSemaphore
from time import monotonic
from typing import Any, NamedTuple

from bench.memory.nnunet_plans import FIT, FITTED, LARGEST, MORE, NEXT, PLAIN, PLANS, fits, opened, planned, predicted
from bench.memory.nnunet_steps import Asked, serve
from bench.memory.rival_table import print_rows
from bench.memory.rivals import kept_cells
from bench.tools.results import cpu_conditions, save_case
from bench.tools.script import add_commit, command_line, commit_of, note, run_main, verdict
from ucudnn.memory.reports.fits import CONTEXT_BYTES
from ucudnn.memory.torch.comparison.trial import ENDED
from ucudnn.memory.torch.comparison.trial_process import process_of, received
from ucudnn.units import format_bytes

BUDGET = 24 * 2**30
ERROR, SLOWER = 0.03, 1.35
"""Most error of a prediction, and most time of a voxel with `fit`, in multiples of plain training's largest patch."""
AS_PLANNED, FITTED_AS_PLANNED = "as planned", "fit, as planned"
_FULL = ("OutOfMemory", "unable to find an engine")  # how PyTorch and cuDNN say that memory is full
HEADINGS = ["trained", "patch", "batch", "predicted", "peak", "error", "of tensors", "error", "first step"]
HEADINGS += ["reserved", "outside", "nnU-Net's estimate", "ms", "ns/voxel"]


class Cell(NamedTuple):
    """What is measured: a plan in some way, with a patch, within a budget or without one."""

    plan: str
    way: str
    patch: tuple[int, ...]
    predicted: int
    budget: int | None = None

    def __str__(self) -> str:
        """Return the name under which the cell is kept."""
        return f"{self.plan}, {self.way}"


def predict(arguments: Namespace, out: Path) -> None:
    """Make the plans that the file does not have, and predict them."""
    conditions = {**cpu_conditions("torch", "nnunetv2", "dynamic-network-architectures"), "device": "CPU"}
    conditions["commit"] = commit_of(arguments)
    for each in PLANS:
        name = " ".join(each)
        if name in kept_cells(out):
            continue
        note(f"planning {name}")
        case = planned(*each, small=arguments.small)
        plans = opened(case)
        case |= {"predicted": predicted(plans), "conditions": conditions}
        if name in FITTED:
            budget = CONTEXT_BYTES + int(1.3 * case["predicted"]["peak_bytes"]) if arguments.small else BUDGET
            case |= {"budget": budget, "fits": fits(plans, budget)}
        save_case(out, name, case)


def stages(cases: Mapping[str, Any]) -> Iterator[list[Cell]]:
    """Yield what is measured, the most important first."""
    plans = {name: cases[name] for name in map(" ".join, PLANS) if name in cases}
    sizes = {name: tuple(opened(case).patch) for name, case in plans.items()}
    peaks = {name: case["predicted"]["peak_bytes"] for name, case in plans.items()}
    yield [Cell(name, AS_PLANNED, sizes[name], peaks[name]) for name in plans]
    bounded = [(name, case["budget"], row) for name, case in plans.items() for row in case.get("fits", ())]
    bounded.sort(key=lambda each: each[2]["way"] == LARGEST)
    yield [Cell(name, row["way"], tuple(row["patch"]), row["peak_bytes"], budget) for name, budget, row in bounded]
    yield [Cell(name, FITTED_AS_PLANNED, sizes[name], 0) for name in plans]


def train(arguments: Namespace, out: Path) -> None:
    """Measure what is missing, until the time is over."""
    until, cases = monotonic() + arguments.seconds, kept_cells(out)
    for stage, together in zip(stages(cases), (arguments.together, 1, 1), strict=True):
        missing = [
            cell for cell in stage if str(cell) not in cases and (not arguments.cell or str(cell) in arguments.cell)
        ]
        one = partial(_one, cases, arguments, out, BoundedSemaphore(together), until)
        with ThreadPoolExecutor(together + 2) as starting:  # a process loads PyTorch while others train
            for done in [starting.submit(one, cell) for cell in missing]:
                done.result()


def _one(
    cases: Mapping[str, Any], arguments: Namespace, out: Path, turn: BoundedSemaphore, until: float, cell: Cell
) -> None:
    if monotonic() > until:
        return
    fitted = cell.way in (FIT, LARGEST, FITTED_AS_PLANNED)
    case, device = cases[cell.plan], arguments.device
    asked = Asked(case=case, patch=cell.patch, fits=fitted, budget=cell.budget, device=device)
    has_turn = False
    try:
        with process_of(serve, asked) as connection:
            received(connection)
            has_turn = turn.acquire()
            left, most = until - monotonic(), arguments.cell_seconds
            if left < 0:
                return
            connection.send("go")
            if connection.poll(min(left, most)):
                answer = received(connection)
            elif left < most:
                return
            else:
                answer = {"reason": f"it took more than {most:g} s"}
    except EOFError:
        answer = {"reason": ENDED}
    finally:
        if has_turn:
            turn.release()
    save_case(out, str(cell), {**cell._asdict(), "batch": opened(case).batch, **answer})
    note(f"{until - monotonic():6.0f} s left, {cell}: {answer.get('reason', answer.get('ms'))}")


def error_of(row: Mapping[str, Any], measured: str = "allocated_bytes") -> float:
    """Return by how much a prediction misses what was measured, as a share of it; infinite where nothing was."""
    found = row.get(measured, 0)
    return abs(_predicted(row) / found - 1) if found else float("inf")


def _predicted(row: Mapping[str, Any]) -> int:
    return int(row.get("predicted_bytes", row["predicted"]))  # `fit` predicts anew, with measured workspaces


def _voxel_ns(row: Mapping[str, Any]) -> float:
    return row["ms"] * 1e6 / row["batch"] / prod(row["patch"]) if "ms" in row else float("inf")


def line(name: str, row: Mapping[str, Any], cases: Mapping[str, Any]) -> list[str]:
    """Return a row of the table; a prediction of a CPU and nnU-Net's estimate where nothing was measured."""
    found = [name, "x".join(map(str, row["patch"])), str(row.get("batch", "")), format_bytes(_predicted(row))]
    for key in ("allocated_bytes", "tensor_bytes"):
        found += [format_bytes(row[key]), f"{error_of(row, key):.1%}"] if row.get(key) else ["", ""]
    found += [
        format_bytes(row[key]) if key in row else "" for key in ("first_bytes", "reserved_bytes", "outside_bytes")
    ]
    found.append(format_bytes(cases[row["plan"]]["nnunet_bytes"]) if row["way"] == AS_PLANNED else "")
    took = [f"{row['ms']:.1f}", f"{_voxel_ns(row):.2f}"] if "ms" in row else [row.get("reason", "")[:60], ""]
    return [*found, *took]


def show(out: Path) -> bool:
    """Print all cells, the largest errors first, and whether all bounds hold."""
    cases = kept_cells(out)
    every = [cell for stage in stages(cases) for cell in stage]
    rows = {str(cell): cases.get(str(cell), cell._asdict()) for cell in every}
    lost = sorted(rows.items(), key=lambda each: -error_of(each[1]) if "machine" in each[1] else 1.0)
    print_rows([HEADINGS, *(line(name, row, cases) for name, row in lost)])
    held = []
    for cell in every:
        row = rows[str(cell)]
        if cell.way == AS_PLANNED:
            held.append(verdict(f"{cell}: error of the peak", 100 * error_of(row), 100 * ERROR, " %"))
            verdict(f"{cell}: error of the peak of tensors", 100 * error_of(row, "tensor_bytes"), 100 * ERROR, " %")
        elif cell.way == FITTED_AS_PLANNED and "ms" in row:
            held.append(verdict(f"{cell}: error of the peak", 100 * error_of(row), 100 * ERROR, " %"))
        elif cell.way == NEXT:
            trains = not any(each in row.get("reason", "") for each in _FULL)
            held.append(verdict(f"{cell}: trains", float(trains), 0.0))
        elif cell.way in (PLAIN, FIT):
            taken = (row["reserved_bytes"] + row["outside_bytes"]) if "ms" in row else float("inf")
            held.append(verdict(f"{cell}: bytes of the process", taken / 2**30, (cell.budget or 0) / 2**30, " GiB"))
        if cell.way == FIT:
            plain = rows[f"{cell.plan}, {PLAIN}"]
            held.append(verdict(f"{cell}: plain voxels", prod(plain["patch"]) / prod(row["patch"]), 1 / MORE))
            slower = _voxel_ns(row) / _voxel_ns(plain) if "ms" in row and "ms" in plain else float("inf")
            held.append(verdict(f"{cell}: time of a voxel", slower, SLOWER))
    return all(each["met"] for each in held)


def main() -> bool:
    """Predict or measure what is missing, and print all; return whether all bounds hold."""
    parser = command_line(__doc__, __spec__.name, "memory/nnunet.json")
    parser.add_argument("--predict", action="store_true", help="make the plans and predict them; train nothing")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="(%(default)s)")
    parser.add_argument("--small", action="store_true", help="small images, to try the script out")
    parser.add_argument("--cell", action="append", help="such as 'liver plain 3d_fullres, fit'; may be repeated (all)")
    parser.add_argument("--together", type=int, default=3, help="plans that train beside each other (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1e9, help="when to end")
    parser.add_argument("--cell-seconds", type=float, default=90.0, help="most seconds of a cell (%(default)s)")
    add_commit(parser)
    arguments = parser.parse_args()
    out = arguments.out or arguments.default_out
    if arguments.small and arguments.out is None:
        parser.error("--small tries the script out: name a file with --out")
    if arguments.predict:
        predict(arguments, out)
        return True
    if not arguments.show:
        train(arguments, out)
    return show(out)


if __name__ == "__main__":
    run_main(main)
