"""The paper's figure 1: cuDNN with as much workspace as its best algorithm wants, and with one byte less.

    python -m bench.paper.figure1                     plan from the recorded H200 profile
    python -m bench.paper.figure1 --backend cudnn     execute on this machine's GPU
    python -m bench.paper.figure1 --from CSV          draw again

The figure has all kernels of AlexNet 256, and beside the paper's two bars a third: micro-batches with one byte less.
"""

from collections.abc import Iterator
from pathlib import Path

from bench.paper.figures import Bench, Row, Table, beside, by_plan, parse, show
from bench.tools.backends import measured, undivided
from bench.tools.script import note
from ucudnn.plots import draw_groups
from ucudnn.solvers.desirable import desirable_set
from ucudnn.solvers.reuse import fastest_within

BEST, LESS, OURS = PLANS = ("best", "-1 byte", "-1 byte, ucudnn")


def measure(bench: Bench) -> Iterator[list[Row]]:
    """Yield the rows of each kernel."""
    for kernel in bench.network.kernels():
        if bench.late:
            note(f"time is up; left out: {kernel}")
            continue
        problem = kernel.problem
        found = measured(bench.benchmark, problem)
        whole = undivided(found, problem)
        given = {BEST: whole[-1]}
        if given[BEST].workspace_bytes:
            for name, front in ((LESS, whole), (OURS, desirable_set(found, problem.batch))):
                within = fastest_within(front, given[BEST].workspace_bytes - 1)
                if within is not None:
                    given[name] = within
        times = bench.times(problem, given)
        yield [
            {"layer": kernel.layer, "operation": problem.operation.value, "plan": name, **bench.row(each, times, name)}
            for name, each in given.items()
            if name in times
        ]


def draw(table: Table, path: Path) -> None:
    """Draw the figure."""
    labels = []
    series: dict[str, list[float | None]] = {plan: [] for plan in PLANS}
    for place, rows in by_plan(table.rows):
        labels.append("\n".join(place))
        for plan, values in series.items():
            values.append(table.ms(rows[plan]) if plan in rows else None)
    draw_groups(labels, series, path, ylabel=f"{table.kind} time in ms", title=table.title)
    print(f"wrote {path}")


def tell(table: Table) -> None:
    """Print the paper's number and ours."""
    ratios: dict[str, dict[str, float]] = {LESS: {}, OURS: {}}
    for place, rows in by_plan(table.rows):
        for plan in ratios.keys() & rows.keys():
            ratios[plan][" ".join(place)] = table.ms(rows[plan]) / table.ms(rows[BEST])
    # The paper's figure shows Forward only, and its text gives the number of conv2 only.
    conv2 = ratios[LESS].get("conv2 Forward")
    beside("one byte less, conv2 Forward", "4.51 x", "no workspace" if conv2 is None else f"{conv2:.2f} x")
    for plan, what in ((LESS, "one byte less"), (OURS, "the same in micro-batches")):
        if ratios[plan]:
            where, worst = max(ratios[plan].items(), key=lambda each: each[1])
            beside(f"{what}, at worst ({where})", "-", f"{worst:.2f} x")


def main() -> None:
    """Measure and draw the figure."""
    arguments = parse(__doc__, __spec__.name)
    if not arguments.drawn:
        bench = Bench(arguments, "alexnet")
        arguments.drawn = [bench.record("figure1", measure(bench))]
    for path in arguments.drawn:
        show(path, arguments.module, tell, draw)


if __name__ == "__main__":
    main()
