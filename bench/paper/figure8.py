"""The paper's figure 8: the desirable set of AlexNet's conv2 (Forward) at a mini-batch of 256, up to 120 MiB.

    python -m bench.paper.figure8                     plan from the recorded H200 profile
    python -m bench.paper.figure8 --backend cudnn     execute on this machine's GPU, at all micro-batch sizes
    python -m bench.paper.figure8 --from CSV          draw again

Each point is one configuration: its workspace and its time.
"""

from collections.abc import Iterator
from pathlib import Path

from bench.paper.figures import MIB, Bench, Row, Table, beside, parse, parts_text, show
from ucudnn.benchmarking.request import Request
from ucudnn.plots import draw_desirable
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import Operation
from ucudnn.solvers.desirable import desirable_set


def policy_of(bench: Bench) -> BatchSizePolicy:
    """Return the policy: all sizes; powers of two for a profile, which knows no others."""
    return BatchSizePolicy.ALL if bench.policies(["all"]) else BatchSizePolicy.POWER_OF_TWO


def measure(bench: Bench) -> Iterator[list[Row]]:
    """Yield the rows."""
    (kernel,) = (
        each for each in bench.network.kernels() if each.layer == "conv2" and each.operation is Operation.FORWARD
    )
    problem = kernel.problem
    request = Request(problem=problem, sizes=policy_of(bench).sizes(problem.batch), limit_bytes=120 * MIB)
    front = desirable_set(bench.benchmark.micro_configurations(request), problem.batch)
    times = bench.times(problem, {str(each): each for each in front})
    yield [{**bench.row(each, times), "parts": parts_text(each)} for each in front if str(each) in times]


def draw(table: Table, path: Path) -> None:
    """Draw the figure."""
    draw_desirable([table.configuration(row) for row in table.rows], path, title=table.title, kind=table.kind)
    print(f"wrote {path}")


def tell(table: Table) -> None:
    """Print the size of the set and its range of times."""
    times = [table.ms(row) for row in table.rows]
    beside("desirable configurations up to 120 MiB", "-", str(len(times)))
    beside("from the least to the most workspace, speedup", "-", f"{times[0] / times[-1]:.2f} x")


def main() -> None:
    """Measure and draw the figure."""
    arguments = parse(__doc__, __spec__.name)
    if not arguments.drawn:
        bench = Bench(arguments, "alexnet")
        arguments.drawn = [bench.record("figure8", measure(bench), "conv2 (Forward)", policy_of(bench).value)]
    for path in arguments.drawn:
        show(path, arguments.module, tell, draw)


if __name__ == "__main__":
    main()
