"""DeepBench's training convolutions at a mini-batch of 256, within 128, 256 and 512 MiB of workspace each.

    python -m bench.paper.deepbench --backend cudnn                   execute on this machine's GPU, some minutes
    python -m bench.paper.deepbench --from CSV                        draw again
    ucudnn profile bench/data/deepbench.csv --batch 256 --out FILE    record a profile, on a GPU
    python -m bench.paper.deepbench --backend replay:FILE             plan from that profile

The layers are those of baidu-research/DeepBench (bench/data/deepbench.csv), each once. Layers that differ only in
DeepBench's own mini-batch size count as one.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import exp, fsum, log
from pathlib import Path

from bench.paper.figures import MIB, Bench, Row, Table, beside, by_plan, parse, show
from bench.tools.results import ROOT
from ucudnn.plots import draw_layers

LIMITS_MIB = (128, 256, 512)
POLICIES = ("undivided", "powerOfTwo")
LAYERS = ROOT / "bench" / "data" / "deepbench.csv"


def measure(bench: Bench) -> Iterator[list[Row]]:
    """Yield the rows of each limit."""
    for limit in LIMITS_MIB:
        given = {"workspace_limit_bytes": limit * MIB}
        yield bench.rows({f"{limit} MiB {policy}": {"policy": policy, **given} for policy in POLICIES})


def draw(table: Table, path: Path) -> None:
    """Draw the figure."""
    draw_layers(table.bars(lambda plan: plan.replace(" MiB ", " MiB\n")), path, title=table.title)
    print(f"wrote {path}")


def tell(table: Table) -> None:
    """Print the speedups of micro-batches."""
    for limit in LIMITS_MIB:
        before, after = (f"{limit} MiB {policy}" for policy in POLICIES)
        pairs = [(rows[before], rows[after]) for _, rows in by_plan(table.rows) if {before, after} <= rows.keys()]
        if pairs:
            speedups = [table.ms(plain) / table.ms(ours) for plain, ours in pairs]
            mean = exp(fsum(map(log, speedups)) / len(speedups))
            beside(f"{limit} MiB, all convolutions", "-", table.gain(before, after))
            beside(f"{limit} MiB, geometric mean of {len(speedups)} kernels", "-", f"{mean:.2f} x")
            beside(f"{limit} MiB, the kernel that gains most", "-", f"{max(speedups):.2f} x")
            beside(f"{limit} MiB, the kernel that loses most", "-", f"{min(speedups):.2f} x")


def main() -> None:
    """Measure and draw the figure."""
    arguments = parse(__doc__, __spec__.name)
    if not arguments.drawn:
        bench = Bench(arguments, str(LAYERS), 256)
        distinct = {layer.forward: layer for layer in reversed(bench.network.layers)}
        bench.network = replace(bench.network, layers=tuple(reversed(distinct.values())))
        arguments.drawn = [bench.record("deepbench", measure(bench))]
    for path in arguments.drawn:
        show(path, arguments.module, tell, draw)


if __name__ == "__main__":
    main()
