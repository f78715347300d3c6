"""The paper's figure 9: AlexNet's conv2 at a mini-batch of 256 within 64 MiB, under each policy.

    python -m bench.paper.figure9                     plan from the recorded H200 profile
    python -m bench.paper.figure9 --backend cudnn     execute on this machine's GPU
    python -m bench.paper.figure9 --from CSV          draw again

Each bar is one plan, divided into its micro-batches.
"""

from collections.abc import Iterator
from pathlib import Path

from bench.paper.figures import MIB, Bench, Row, Table, beside, by_plan, parse, parts_text, show
from bench.tools.script import note
from ucudnn.planning.decision import decide
from ucudnn.plots import draw_configurations
from ucudnn.problem import Operation
from ucudnn.settings import Settings

POLICIES = ("undivided", "powerOfTwo", "adaptive", "all")


def measure(bench: Bench) -> Iterator[list[Row]]:
    """Yield the rows of each operation."""
    for operation in Operation:
        (kernel,) = (each for each in bench.network.kernels() if each.layer == "conv2" and each.operation is operation)
        found = {}
        for policy in bench.policies(POLICIES):
            if bench.late:
                note(f"time is up; left out: {operation.value} {policy}")
                continue
            settings = Settings.load({}, policy=policy, workspace_limit_bytes=64 * MIB, slabs=False)
            found[policy] = decide([kernel], bench.benchmark, settings).kernels[0].configuration
        times = bench.times(kernel.problem, found) if found else {}
        yield [
            {
                "layer": kernel.layer,
                "operation": operation.value,
                "policy": policy,
                **bench.row(each, times, policy),
                "parts": parts_text(each),
            }
            for policy, each in found.items()
            if policy in times
        ]


def draw(table: Table, path: Path) -> None:
    """Draw the figure."""
    bars = [(f"{row['operation']}\n{row['policy']}", table.configuration(row)) for row in table.rows]
    draw_configurations(bars, path, title=table.title, kind=table.kind)
    print(f"wrote {path}")


def tell(table: Table) -> None:
    """Print the paper's number and ours."""
    for (layer, operation), rows in by_plan(table.rows, "policy"):
        times = {policy: table.ms(row) for policy, row in rows.items()}
        if "undivided" in times:
            best = min(times, key=lambda policy: times[policy])
            paper = "2.33 x (all)" if operation == Operation.FORWARD.value else "-"
            beside(f"{layer} {operation}, {best} over undivided", paper, f"{times['undivided'] / times[best]:.2f} x")


def main() -> None:
    """Measure and draw the figure."""
    arguments = parse(__doc__, __spec__.name)
    if not arguments.drawn:
        bench = Bench(arguments, "alexnet")
        arguments.drawn = [bench.record("figure9", measure(bench), "conv2", "64 MiB")]
    for path in arguments.drawn:
        show(path, arguments.module, tell, draw)


if __name__ == "__main__":
    main()
