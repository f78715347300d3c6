"""The paper's figure 10: AlexNet at a mini-batch of 256 within 8, 64 and 512 MiB for each kernel, under each policy.

    python -m bench.paper.figure10                     plan from the recorded H200 profile
    python -m bench.paper.figure10 --backend cudnn     execute on this machine's GPU
    python -m bench.paper.figure10 --from CSV          draw again

Figure 11 is the same figure of another network.
"""

from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.paper.figures import MIB, Bench, Row, Table, beside, parse, show
from ucudnn.plots import draw_layers

POLICIES = ("undivided", "powerOfTwo", "adaptive", "all")
LIMITS_MIB = (8, 64, 512)


def measure(bench: Bench) -> Iterator[list[Row]]:
    """Yield the rows of each limit."""
    for limit in LIMITS_MIB:
        given = {"workspace_limit_bytes": limit * MIB}
        policies = bench.policies(POLICIES)
        yield bench.rows({f"{limit} MiB {policy}": {"policy": policy, **given} for policy in policies})


def draw(table: Table, path: Path) -> None:
    """Draw the figure."""
    draw_layers(table.bars(lambda plan: plan.replace(" MiB ", " MiB\n")), path, title=table.title)
    print(f"wrote {path}")


def tell(table: Table, network: str, paper: dict[int, str]) -> None:
    """Print the paper's numbers and ours."""
    for limit in LIMITS_MIB:
        for policy in POLICIES[1:]:
            gain = table.gain(f"{limit} MiB undivided", f"{limit} MiB {policy}")
            if gain != "-":
                beside(f"{network}, {limit} MiB, {policy} over undivided", paper.get(limit, "-"), gain)


def figure(arguments: Namespace, name: str, network: str, paper: dict[int, str]) -> None:
    """Measure and draw one of the figures, and print the paper's numbers beside ours.

    Args:
        arguments: command line.
        name: name of the files.
        network: name of the network.
        paper: the paper's speedup of convolutions on a P100, of `all` over `undivided`, by limit in MiB.
    """
    if not arguments.drawn:
        bench = Bench(arguments, network)
        arguments.drawn = [bench.record(name, measure(bench))]
    for path in arguments.drawn:
        show(path, arguments.module, partial(tell, network=network, paper=paper), draw)


def main() -> None:
    """Measure and draw the figure of AlexNet."""
    arguments = parse(__doc__, __spec__.name)
    figure(arguments, "figure10", "alexnet", {8: "no gain", 64: "1.63 x (all)", 512: "no gain"})


if __name__ == "__main__":
    main()
