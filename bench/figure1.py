"""The paper's figure 1: cuDNN with as much workspace as its best algorithm wants, and with one byte less.

    python bench/figure1.py                     planned from the recorded H200 profile
    python bench/figure1.py --backend cudnn     executed on this machine's GPU

All kernels of AlexNet 256; besides the paper's two bars, what micro-batches make of one byte less.
"""

from figures import Bench, beside, done, parse
from ucudnn.plots import draw_groups

from ucudnn.exploration import Request
from ucudnn.policy import BatchSizePolicy
from ucudnn.recording import NO_LIMIT
from ucudnn.solvers.desirable import desirable_set
from ucudnn.solvers.reuse import fastest_within


def main() -> None:
    """Draw the figure."""
    bench = Bench(parse(__doc__), "alexnet")
    rows = []
    series: dict[str, list[float | None]] = {"best": [], "-1 byte": [], "-1 byte, ucudnn": []}
    labels = []
    for kernel in bench.network.kernels():
        problem = kernel.problem
        sizes = BatchSizePolicy.POWER_OF_TWO.sizes(problem.batch)
        measured = bench.benchmark.micro_configurations(Request(problem=problem, sizes=sizes, limit_bytes=NO_LIMIT))
        undivided = desirable_set([each for each in measured if each.size == problem.batch], problem.batch)
        best = undivided[-1]
        given = {"best": best}
        if best.workspace_bytes:
            for name, front in (("-1 byte", undivided), ("-1 byte, ucudnn", desirable_set(measured, problem.batch))):
                within = fastest_within(front, best.workspace_bytes - 1)
                if within is not None:
                    given[name] = within
        times = bench.times(problem, given)
        labels.append(f"{kernel.layer}\n{problem.operation.value}")
        for name, values in series.items():
            values.append(times.get(name))
        rows += [
            {
                "layer": kernel.layer,
                "operation": problem.operation.value,
                "plan": name,
                "configuration": str(each),
                "workspace_bytes": each.workspace_bytes,
                "time_ms": times[name],
            }
            for name, each in given.items()
        ]
    path = bench.write("figure1", rows)
    with done(path):
        draw_groups(labels, series, path, ylabel="time [ms]", title=f"AlexNet 256, {bench.kind}")
    slower = [
        (less / best, label.replace("\n", " "))
        for best, less, label in zip(series["best"], series["-1 byte"], labels, strict=True)
        if best and less
    ]
    forward = [each for each in slower if each[1] == "conv2 Forward"]
    beside("one byte less, conv2 Forward", "4.51 x", f"{forward[0][0]:.2f} x" if forward else "no workspace")
    worst, where = max(slower)
    beside(f"one byte less, at worst ({where})", "4.51 x", f"{worst:.2f} x")
    ours = max(
        ours / best for best, ours in zip(series["best"], series["-1 byte, ucudnn"], strict=True) if best and ours
    )
    beside("the same in micro-batches, at worst", "-", f"{ours:.2f} x")


if __name__ == "__main__":
    main()
