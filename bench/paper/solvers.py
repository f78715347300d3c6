"""WD by ucudnn and by the paper's 0-1 program in GLPK, on one CPU core: their times, and the same optimum.

    python -m bench.paper.solvers

The desirable sets come from two recorded H200 profiles: ucudnn's own, and tests/data/h200_every.json, which leaves
nothing out. The milliseconds are those of building and solving, in turn, after a first round that does not count.
`ours` is `divide` with identical kernels merged, `unmerged` has every kernel apart, as the paper's program has, `highs`
is merged with HiGHS in place of ucudnn's search, and `glpk` is the paper's program (tests/support/papers_program.py).
Optima that differ by more than 1e-9 are an error. `median_ms` and `sum_ms` are those of the totals' medians, `worst_ms`
is the slowest run; infeasible totals do not count.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

from bench.paper.recorded import NETWORKS, choices_of, recorded, variables_of
from bench.tools.results import ROOT, cpu_conditions, save
from bench.tools.script import command_line, out_of, run_main
from tests.support.papers_program import glpk_optimum
from ucudnn.settings import SolverName
from ucudnn.solvers.division import Choice, Division, DivisionStatus, divide

REPEATS = 7
TOTALS = [int(2**23 * 2 ** (10 * step / 15)) for step in range(16)]  # from 8 MiB to 8 GiB
PROFILES = {"h200": "h200", "h200_every": str(ROOT / "tests" / "data" / "h200_every.json")}
SUMMARIES = (("median_ms", "median_ms", median), ("worst_ms", "max_ms", max), ("sum_ms", "median_ms", sum))
SOLVERS = ("ours", "unmerged", "highs", "glpk")


def compare(choices: Sequence[Choice[Any]], total: int) -> dict[str, Any]:
    """Divide one total in every way, in turn, and check that all ways find the same optimum."""
    unmerged = [Choice(desirable=choice.desirable) for choice in choices for _ in range(choice.count)]
    if sum(min(each.workspace_bytes for each in choice.desirable) for choice in unmerged) > total:
        assert divide(choices, total).status is DivisionStatus.INFEASIBLE
        return {"total_bytes": total, "infeasible": True}
    runs: dict[str, Callable[[], Division[Any] | float]] = {
        "ours": lambda: divide(choices, total),
        "unmerged": lambda: divide(unmerged, total),
        "highs": lambda: divide(choices, total, SolverName.HIGHS),
        "glpk": lambda: glpk_optimum(choices, total),
    }
    answers = {name: run() for name, run in runs.items()}
    network_ms = {name: each.time_ms if isinstance(each, Division) else each for name, each in answers.items()}
    assert max(network_ms.values()) <= min(network_ms.values()) * (1 + 1e-9), f"{total} bytes: {network_ms} differ"
    samples: dict[str, list[float]] = {name: [] for name in SOLVERS}
    for repeat in range(REPEATS):
        for name in SOLVERS[:: -1 if repeat % 2 else 1]:
            start = perf_counter()
            runs[name]()
            samples[name].append((perf_counter() - start) * 1e3)
    return {
        "total_bytes": total,
        "method": {name: each.method for name, each in answers.items() if isinstance(each, Division)},
        "network_ms": network_ms,
        "median_ms": {name: median(each) for name, each in samples.items()},
        "max_ms": {name: max(each) for name, each in samples.items()},
    }


def summary(title: str, totals: list[dict[str, Any]]) -> dict[str, Any]:
    """Print and return a summary of the totals that can be divided."""
    feasible = [each for each in totals if "infeasible" not in each]
    methods = Counter(each["method"]["ours"] for each in feasible)
    found: dict[str, Any] = {"infeasible": len(totals) - len(feasible), "methods": methods}
    for key, of, summarized in SUMMARIES:
        found[key] = {name: summarized([each[of][name] for each in feasible]) for name in SOLVERS}
    found["ours_to_glpk"] = found["sum_ms"]["ours"] / found["sum_ms"]["glpk"]
    print(f"{title}: {dict(methods)}, {found['infeasible']} infeasible, ours / glpk {found['ours_to_glpk']:.3f}")
    for name in SOLVERS:
        print(f"  {name:9}", *(f"{key} {found[key][name]:9.3f}" for key, *_ in SUMMARIES), flush=True)
    return found


def main() -> None:
    """Measure everything on one core, print it and write it."""
    arguments = command_line(__doc__, __spec__.name, "paper/solvers.json").parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    conditions = {**cpu_conditions("ucudnn", "pulp", "highspy", "swiglpk"), "cores": 1, "repeats": REPEATS}
    profiles: dict[str, dict[str, Any]] = {name: {} for name in PROFILES}
    everything: list[dict[str, Any]] = []
    for name, source in PROFILES.items():
        for network in NETWORKS:
            choices = choices_of(recorded(source, network))
            totals = [compare(choices, total) for total in TOTALS]
            variables = variables_of(choices)
            merged, apart = variables.values()
            found = summary(f"{name} {network}, {merged} variables ({apart} unmerged)", totals)
            profiles[name][network] = {**variables, **found, "totals": totals}
            everything += totals
    answer = {"conditions": conditions, "all": summary("all", everything), "profiles": profiles}
    save(out_of(arguments), answer)


if __name__ == "__main__":
    run_main(main)
