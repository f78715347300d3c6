"""Compares whole networks under all settings: their steps, first steps and peaks, with ucudnn and without.

    python -m bench.torch.networks                                 four networks; continues where it was stopped
    python -m bench.torch.networks --limit-seconds 540             starts nothing that might not end in time
    python -m bench.torch.networks --network all --form all --repeats 3
    python -m bench.torch.networks --summary                       the table of what is kept, losers first

Each cell is a network, a form, a setting and a repeat. It runs in a process of its own, `bench.torch.network_cell`.
Processes of different settings alternate. Each cell is kept with the commit and a digest of the code on its path: of
PyTorch alone that of the scripts, otherwise that of the package too. A cell whose code has changed is measured again.
"""

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from hashlib import sha256
from math import exp, fsum, log
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, NamedTuple

from bench.tools.results import ROOT, load, save_case
from bench.tools.script import command_line, note, run_main
from bench.torch.network_cell import FORMS, NETWORKS, SETTINGS, TRIAL

FIRST = ("resnet50", "efficientnet_b0", "regnety_032", "convnext_tiny")
MOST_S = 90.0
"""Seconds that a cell may take."""

MIB = 2**20
COLUMNS = (
    *("network", "form", "setting", "stock ms", "ms", "ratio", "first s, stock", "first s", "allocated MiB"),
    *("reserved MiB", "host us", "replaced", "compared", "lost s"),
)


class Cell(NamedTuple):
    """One process: a network in a form under a setting, for the n-th time."""

    network: str
    form: str
    setting: str
    repeat: int

    def __str__(self) -> str:
        """Return the name under which the cell is kept."""
        return f"{self.network} {self.form} {self.setting} {self.repeat}"


def cells(arguments: Namespace) -> Iterator[Cell]:
    """Yield the cells in the order of their processes, in which settings alternate."""
    networks = (
        [each for each in NETWORKS if each != TRIAL]
        if arguments.network == ["all"]
        else arguments.network or list(FIRST)
    )
    forms = list(FORMS) if arguments.form == ["all"] else arguments.form or [FORMS[0]]
    for repeat in range(arguments.repeats):
        for network in networks:
            for form in forms:
                settings = arguments.setting or list(SETTINGS)
                for setting in reversed(settings) if repeat % 2 else settings:
                    yield Cell(network, form, setting, repeat)


def digest(setting: str) -> str:
    """Return a digest of the code on the path of a setting."""
    paths = [ROOT / "bench" / "torch" / "network_cell.py", ROOT / "bench" / "memory" / "models.py"]
    if not setting.startswith("stock"):
        paths += sorted(
            path
            for path in (ROOT / "ucudnn").rglob("*")
            if path.suffix in (".py", ".cpp") and path.parent.name not in ("cli", "memory", "native")
        )
    code = sha256()
    for path in paths:
        code.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return code.hexdigest()[:16]


def commit() -> str:
    """Return the commit of the working tree; '' where there is no repository."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def run_cell(cell: Cell, arguments: Namespace, seconds: float) -> dict[str, object]:
    """Run the process of a cell, and return what it printed, or its error."""
    command = [sys.executable, "-m", "bench.torch.network_cell", "--network", cell.network, "--form", cell.form]
    command += ["--setting", cell.setting, "--backend", arguments.backend, "--steps", str(arguments.steps)]
    command += ["--tuning-seconds", str(arguments.tuning_seconds)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {seconds:.0f} s"}
    if done.returncode:
        return {"error": "\n".join(done.stderr.strip().splitlines()[-12:])}
    answer: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer | {"warnings": done.stderr.strip().splitlines()[-8:]}


def kept(path: Path | None) -> Mapping[str, Any]:
    """Return the cells that are kept."""
    found: Mapping[str, Any] = load(path)["cases"] if path is not None and path.exists() else {}
    return found


def measure(arguments: Namespace, out: Path) -> None:
    """Measure the cells that are missing, as long as there is time."""
    begin = monotonic()
    digests = {setting: digest(setting) for setting in arguments.setting or SETTINGS}
    for cell in cells(arguments):
        known = kept(out).get(str(cell))
        if known is not None and known["digest"] == digests[cell.setting] and "error" not in known:
            continue
        left = arguments.limit_seconds - (monotonic() - begin)
        if left < arguments.cell_seconds:
            note(f"{left:.0f} s are left, too few for {cell}: call again")
            return
        started = monotonic()
        answer = run_cell(cell, arguments, min(left, MOST_S))
        head = {"commit": commit(), "digest": digests[cell.setting], "process_s": monotonic() - started}
        save_case(out, str(cell), {**head, **answer})
        told = answer.get("error") or f"step {answer['step_ms']:.2f} ms, first {answer['first_step_s']:.2f} s"
        note(f"{cell}: {told}, process {monotonic() - started:.0f} s")


def rows(cases: Mapping[str, Any]) -> list[tuple[float, str]]:
    """Return a line for each network, form and setting, with its ratio to PyTorch's step: losers first."""
    groups: dict[tuple[str, str, str], list[Any]] = {}
    for name, case in cases.items():
        if "error" not in case:
            network, form, setting, _ = name.split()
            groups.setdefault((network, form, setting), []).append(case)
    found = []
    for (network, form, setting), group in groups.items():
        base = groups.get((network, form, "stock-off" if setting.endswith("-off") else "stock"))
        if setting.startswith("stock") or base is None:
            continue
        ratio = middle(group, "step_ms") / middle(base, "step_ms")
        peaks = [max(c["peaks"].get(kind, 0) for c in group) - max(c["peaks"].get(kind, 0) for c in base)
                 for kind in ("allocated", "reserved")]  # fmt: skip
        tuned = (group[-1].get("tuned") or [{}])[0]
        kernels = tuned.get("kernels", [])
        divided = sum(kernel["parts"] > 1 for kernel in kernels)
        found.append(
            (
                ratio,
                f"| {network} | {form} | {setting} | {middle(base, 'step_ms'):.2f} | {middle(group, 'step_ms'):.2f} |"
                f" {ratio:.3f} | {middle(base, 'first_step_s'):.1f} | {middle(group, 'first_step_s'):.1f} |"
                f" {peaks[0] / MIB:+.0f} | {peaks[1] / MIB:+.0f} |"
                f" {host_us(group, base):+.1f} |"
                f" {len(kernels)} ({divided} divided) of {tuned.get('seen', 0)} | {tuned.get('gain') or 0:.3f} |"
                f" {tuned.get('lost_seconds', 0):.2f} of {group[-1]['tuning_s']:.0f} |",
            )
        )
    return sorted(found, reverse=True)


def host_us(group: list[Any], base: list[Any]) -> float:
    """Return the microseconds that a step takes the host longer, for each of its convolutions and gradients."""
    kernels = group[-1].get("kernels")
    return (middle(group, "host_ms") - middle(base, "host_ms")) / kernels * 1e3 if kernels else float("nan")


def middle(group: list[Any], field: str) -> float:
    """Return the median of a field over the repeats."""
    return median(case[field] for case in group)


def show(cases: Mapping[str, Any]) -> None:
    """Print the table and the geometric mean."""
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
    found = rows(cases)
    print("\n".join(line for _, line in found))
    if found:
        print(f"geometric mean {exp(fsum(log(ratio) for ratio, _ in found) / len(found)):.4f}, {len(found)} cells")
    for name, case in cases.items():
        if "error" in case:
            print(f"{name}: {case['error']}")


def main() -> None:
    """Measure what is missing, and print the table."""
    parser = command_line(__doc__, __spec__.name, "torch/networks.json")
    parser.add_argument("--backend", default="cudnn", help="cudnn, or cpu to try the script out (%(default)s)")
    parser.add_argument("--network", action="append", choices=(*NETWORKS, "all"), help="may be repeated (four of them)")
    parser.add_argument("--form", action="append", choices=(*FORMS, "all"), help="may be repeated (nchw)")
    parser.add_argument("--setting", action="append", help=f"may be repeated ({', '.join(SETTINGS)})")
    parser.add_argument("--repeats", type=int, default=1, help="processes of each cell (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps (%(default)s)")
    parser.add_argument("--tuning-seconds", type=float, default=30, help="most seconds of tuning (%(default)s)")
    parser.add_argument("--limit-seconds", type=float, default=1e9, help="most seconds of this call (no limit)")
    parser.add_argument("--cell-seconds", type=float, default=60, help="seconds without which no cell starts")
    parser.add_argument("--summary", action="store_true", help="print the table, and measure nothing")
    arguments = parser.parse_args()
    out = arguments.out or arguments.default_out
    if not arguments.summary:
        measure(arguments, out)
    show(kept(out))


if __name__ == "__main__":
    run_main(main)
