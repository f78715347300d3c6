"""The paper's figures 10 and 11: networks within 8, 64 and 512 MiB for each kernel, under each policy.

python bench/figure10.py                                AlexNet 256, planned from the recorded H200 profile
python bench/figure10.py --backend cudnn                executed on this machine's GPU
python bench/figure11.py [--backend cudnn]              ResNet-18 128
"""

import argparse
from pathlib import Path

from figures import MIB, Bench, beside, done, parse, rows_of, total_ms
from ucudnn.plots import draw_layers

POLICIES = ("undivided", "powerOfTwo", "adaptive", "all")
LIMITS_MIB = (8, 64, 512)


def draw(arguments: argparse.Namespace, name: str, network: str, paper: dict[int, str]) -> Path:
    """Draw one of the figures, and print what the paper says of it.

    Args:
        arguments: of the command line.
        name: of the files.
        network: name of the network.
        paper: its speedup of convolutions under `all` over `undivided`, by limit in MiB.
    """
    bench = Bench(arguments, network)
    bars, rows = [], []
    for limit in LIMITS_MIB:
        found = {}
        for policy in bench.policies(POLICIES):
            report = bench.report(policy, workspace_limit_bytes=limit * MIB)
            found[policy] = report
            bars.append((f"{limit} MiB\n{policy}", report))
            rows += list(rows_of(f"{limit} MiB {policy}", report))
        plain = total_ms(found["undivided"])
        for policy, report in found.items():
            if policy != "undivided":
                said = paper.get(limit, "-") if policy == "all" else "-"
                beside(f"{network}, {limit} MiB, {policy} over undivided", said, f"{plain / total_ms(report):.2f} x")
    path = bench.write(name, rows)
    with done(path):
        draw_layers(bars, path, title=f"{network}, mini-batch {bench.network.batch}, {bench.kind}")
    return path


if __name__ == "__main__":
    draw(parse(__doc__), "figure10", "alexnet", {8: "no gain", 64: "1.63 x", 512: "no gain"})
