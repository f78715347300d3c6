"""WD by ucudnn beside HiGHS and GLPK, on one CPU core: how long each takes, and whether the division is the fastest.

    python -m bench.paper.solvers                 about five minutes
    python -m bench.paper.solvers --continue      go on with what an interrupted run has written

Divided are synthetic fronts (bench.paper.fronts; 300 kernels of 30 shapes, 3,000 kernels of the same shapes, and 3,000
different shapes), the fronts of ResNet-1001 that were recorded on a CPU, and those of AlexNet, ResNet-18 and ResNet-50
in two recorded H200 profiles. The totals are 5 to 80 % of the bytes with which every kernel is as fast as it can be.

Each solver is timed from the same fronts and counts to the same answer, so that a time contains the statement of the
model, its solution and the reading of the answer. Identical kernels share integer variables in the rivals' models
(tests/support/grouped_programs.py). HiGHS has no gap to leave; GLPK has its usual tolerance of 1e-7. Runs alternate
after a first round that does not count. A solver whose runs have taken 2 s has no further ones, and one that takes
10 s is stopped, and counts with these 10 s.

A division counts as the fastest if HiGHS ends with the same time, to 1e-9 of it, and if whole numbers prove that no
division is faster (tests/support/exact_bound.py). The script ends with 1 if a division is not the fastest, or if a
figure is missed.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from bench.paper.fronts import KINDS, NETWORKS, choices_of, recorded, recorded_resnet1001, synthetic
from bench.tools.results import ROOT, cpu_conditions, load, save
from bench.tools.script import command_line, note, out_of, run_main, verdict
from tests.support.exact_bound import no_division_is_faster
from tests.support.grouped_programs import glpk_division, highs_division
from ucudnn.solvers.division import Choice, divide

PERCENTS = (5, 10, 20, 40, 60, 80)
REPEATS = 7
ENOUGH_S, MOST_S = 2.0, 10.0
SEEDS = {(30, 10): 5, (30, 100): 5, (3000, 1): 1}
"""How many fronts of each kind there are, by shapes and kernels of each."""

SYNTHETIC = tuple(f"{shapes * copies} kernels of {shapes} shapes" for shapes, copies in SEEDS)
"""Titles of the classes of synthetic fronts."""

PROFILES = {"h200": "h200", "h200_every": str(ROOT / "tests" / "data" / "h200_every.json")}
SOLVERS = ("ours", "highs", "glpk")
TICKS_PER_MS = 10**9

Counts = list[dict[int, int]]
Case = tuple[str, str, list[Choice[Any]]]
"""A class of cases, a name within it, and the kernels."""


def cases() -> Iterator[Case]:
    """Make all sets of kernels."""
    for title, ((shapes, copies), seeds) in zip(SYNTHETIC, SEEDS.items(), strict=True):
        for kind in KINDS:
            for seed in range(seeds):
                yield title, f"{kind} {seed}", synthetic(kind, shapes, copies, seed)
    yield "resnet1001", "cpu", recorded_resnet1001()
    for network in NETWORKS:
        for name, source in PROFILES.items():
            yield network, name, choices_of(recorded(source, network))


def solved(choices: list[Choice[Any]], total: int) -> dict[str, Callable[[], Any]]:
    """Return for each solver a function that states, solves and reads a division."""
    fronts = [
        (tuple(each.workspace_bytes for each in choice.desirable), tuple(each.time_ms for each in choice.desirable))
        for choice in choices
    ]
    counts = [choice.count for choice in choices]
    return {
        "ours": lambda: divide(choices, total),
        "highs": lambda: highs_division(fronts, counts, total, MOST_S),
        "glpk": lambda: glpk_division(fronts, counts, total, MOST_S),
    }


def timed(runs: dict[str, Callable[[], Any]]) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return the last answer of each solver, and its milliseconds; runs alternate."""
    answers: dict[str, Any] = {}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(-1, REPEATS):
        for name in list(runs)[:: -1 if repeat % 2 else 1]:
            if repeat > 0 and sum(samples[name]) > ENOUGH_S * 1e3:
                continue
            if repeat == 0:
                if samples[name][0] > ENOUGH_S * 1e3:
                    continue
                samples[name] = []
            start = perf_counter()
            answers[name] = runs[name]()
            samples[name].append((perf_counter() - start) * 1e3)
    return answers, samples


def totals_of(choices: Sequence[Choice[Any]], counts: Counts) -> tuple[int, int]:
    """Return ticks and bytes of a division, after a check that each kernel takes one point."""
    ticks = size = 0
    for choice, row in zip(choices, counts, strict=True):
        assert sum(row.values()) == choice.count
        for index, kernels in row.items():
            point = choice.desirable[index]
            ticks += round(point.time_ms * TICKS_PER_MS) * kernels
            size += point.workspace_bytes * kernels
    return ticks, size


def compared(choices: list[Choice[Any]], total: int) -> dict[str, Any]:
    """Divide one total by all solvers in turn; return their times, and what proves the division."""
    answers, samples = timed(solved(choices, total))
    division = answers["ours"]
    index_of = [{id(point): index for index, point in enumerate(choice.desirable)} for choice in choices]
    taken = [
        {indices[id(point)]: kernels for point, kernels in row}
        for indices, row in zip(index_of, division.selected, strict=True)
    ]
    ticks, size = totals_of(choices, taken)
    assert size <= total
    row: dict[str, Any] = {"method": division.method, "network_ms": ticks / TICKS_PER_MS}
    fronts = [[(p.workspace_bytes, round(p.time_ms * TICKS_PER_MS)) for p in choice.desirable] for choice in choices]
    row["proved"] = no_division_is_faster(fronts, [choice.count for choice in choices], total, ticks)
    for name in SOLVERS:
        row[f"{name}_ms"], row[f"{name}_runs"] = median(samples[name]), len(samples[name])
        row[f"{name}_min_ms"], row[f"{name}_max_ms"] = min(samples[name]), max(samples[name])
        if name != "ours":
            row[f"{name}_ended"] = answers[name].ended
            other = totals_of(choices, answers[name].counts)[0] if answers[name].ended else None
            row[f"{name}_over_ours"] = None if other is None else other / ticks - 1
    return row


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians and the slowest run of each solver over some cases, and how divisions were found."""
    found: dict[str, Any] = {"cases": len(rows), "methods": dict(Counter(row["method"] for row in rows))}
    for name in SOLVERS:
        found[name] = {
            "median_ms": median(row[f"{name}_ms"] for row in rows),
            "worst_median_ms": max(row[f"{name}_ms"] for row in rows),
            "worst_run_ms": max(row[f"{name}_max_ms"] for row in rows),
            "sum_ms": sum(row[f"{name}_ms"] for row in rows),
            "not_ended": sum(not row.get(f"{name}_ended", True) for row in rows),
        }
    return found


def is_fastest(row: dict[str, Any]) -> bool:
    """Whether whole numbers prove a division, and HiGHS finds the same one if it ends."""
    return bool(row["proved"]) and (not row["highs_ended"] or abs(row["highs_over_ours"]) <= 1e-9)


def judged(classes: dict[str, dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
    """Print and return the figures that must hold, beside those that were found."""

    def ours(title: str, figure: str) -> float:
        return float(classes[title]["ours"][figure])

    few, many, distinct = SYNTHETIC
    everything = classes["all"]
    return [
        verdict(f"{many}: median", ours(many, "median_ms"), 20, " ms"),
        verdict(f"{many}: worst case", ours(many, "worst_median_ms"), 100, " ms"),
        verdict(f"{many} over {few}: medians", ours(many, "median_ms") / ours(few, "median_ms"), 2),
        verdict(f"{distinct}: median", ours(distinct, "median_ms"), 300, " ms"),
        verdict(f"{distinct}: worst case", ours(distinct, "worst_median_ms"), 2000, " ms"),
        verdict("resnet50: median", ours("resnet50", "median_ms"), 0.6, " ms"),
        *(
            verdict(f"all: median over that of {name}", ours("all", "median_ms") / everything[name]["median_ms"], 1)
            for name in SOLVERS[1:]
        ),
        verdict("divisions that are not proved to be the fastest", sum(not is_fastest(row) for row in rows), 0),
    ]


def measured(path: Path | None, conditions: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Add the cases that are missing to some, and write the file after each set of kernels."""
    done = {(row["class"], row["case"], row["percent"]) for row in rows}
    for title, case, choices in cases():
        most = sum(choice.desirable[-1].workspace_bytes * choice.count for choice in choices)
        for percent in PERCENTS:
            if (title, case, percent) in done:
                continue
            row = compared(choices, most * percent // 100)
            rows.append({"class": title, "case": case, "percent": percent, **row})
            times = ", ".join(f"{name} {row[f'{name}_ms']:.1f} ms" for name in SOLVERS)
            note(f"{title}, {case}, {percent} %: {times}{'' if is_fastest(row) else ', NOT PROVED'}")
        save(path, {"conditions": conditions, "cases": rows})


def classes_of(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the figures of each class of cases, and of all."""
    titles = dict.fromkeys(row["class"] for row in rows)
    found = {title: figures([row for row in rows if row["class"] == title]) for title in titles}
    return {**found, "all": figures(rows)}


def main() -> bool:
    """Measure everything on one core, print it and write it; return whether all figures are met."""
    parser = command_line(__doc__, __spec__.name, "paper/solvers.json")
    parser.add_argument("--continue", action="store_true", dest="goes_on", help="keep the cases that the file has")
    arguments = parser.parse_args()
    path = out_of(arguments)
    known = load(path) if path is not None and path.exists() else {}
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    conditions = {**cpu_conditions("ucudnn", "pulp", "highspy", "swiglpk"), "cores": 1, "repeats": REPEATS}
    rows = list(known["cases"]) if arguments.goes_on and known.get("conditions") == conditions else []
    measured(path, conditions, rows)
    classes = classes_of(rows)
    for title, found in classes.items():
        print(f"{title}: {found['cases']} cases, {found['methods']}")
        for name in SOLVERS:
            print(f"  {name:5}", *(f"{figure} {value:9.2f}" for figure, value in found[name].items()), flush=True)
    claims = judged(classes, rows)
    save(path, {"conditions": conditions, "claims": claims, "classes": classes, "cases": rows})
    return all(claim["met"] for claim in claims)


if __name__ == "__main__":
    run_main(main)
