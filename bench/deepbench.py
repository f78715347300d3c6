"""DeepBench's training convolutions at a mini-batch of 256, within 128, 256 and 512 MiB of workspace each.

    python bench/deepbench.py --backend cudnn                 on this machine's GPU, some minutes
    python bench/deepbench.py --backend replay:FILE           from a profile of them, without a GPU:
    ucudnn profile bench/deepbench.csv --batch 256 --out FILE records one

The layers are those of baidu-research/DeepBench (bench/deepbench.csv), each once; layers that differ only in
DeepBench's own mini-batch size are one here.
"""

from dataclasses import replace
from math import exp, fsum, log
from pathlib import Path

from figures import MIB, Bench, beside, done, parse, rows_of, total_ms
from ucudnn.plots import draw_layers

LIMITS_MIB = (128, 256, 512)
LAYERS = Path(__file__).parent / "deepbench.csv"


def main() -> None:
    """Draw the figure."""
    bench = Bench(parse(__doc__), str(LAYERS), 256)
    distinct = {layer.forward: layer for layer in reversed(bench.network.layers)}
    bench.network = replace(bench.network, layers=tuple(reversed(distinct.values())))
    bars, rows = [], []
    for limit in LIMITS_MIB:
        reports = {}
        for policy in ("undivided", "powerOfTwo"):
            report = bench.report(policy, workspace_limit_bytes=limit * MIB)
            reports[policy] = report
            bars.append((f"{limit} MiB\n{policy}", report))
            rows += list(rows_of(f"{limit} MiB {policy}", report))
        speedups = [kernel.speedup for kernel in reports["powerOfTwo"].kernels if kernel.speedup is not None]
        mean = exp(fsum(map(log, speedups)) / len(speedups))
        beside(
            f"{limit} MiB, all convolutions",
            "-",
            f"{total_ms(reports['undivided']) / total_ms(reports['powerOfTwo']):.2f} x",
        )
        beside(f"{limit} MiB, geometric mean of {len(speedups)} kernels", "-", f"{mean:.2f} x")
        beside(f"{limit} MiB, the kernel that gains most", "-", f"{max(speedups):.2f} x")
    path = bench.write("deepbench", rows)
    with done(path):
        draw_layers(bars, path, title=f"DeepBench, mini-batch 256, {bench.kind}")


if __name__ == "__main__":
    main()
