"""The paper's figures 12 and 13: WR against WD within the same total, and the division itself.

    python bench/figure12.py                     planned from the recorded H200 profile
    python bench/figure12.py --backend cudnn     executed on this machine's GPU

AlexNet 256 with 120, 960 and 7680 MiB in total, ResNet-50 32 with 2544 and 5088 MiB; `bench/division.py` measures the
same in more ways, and Inception-v3.
"""

from figures import MIB, Bench, beside, done, parse, rows_of, total_ms
from ucudnn.plots import draw_division, draw_layers

EACH_MIB = {"alexnet": (8, 64, 512), "resnet50": (16, 32)}
PAPER = {("alexnet", 8): "1.38 x"}


def main() -> None:
    """Draw both figures of both networks."""
    arguments = parse(__doc__)
    for name, limits in EACH_MIB.items():
        bench = Bench(arguments, name)
        kernels = sum(kernel.count for kernel in bench.network.kernels())
        bars, rows = [], []
        totals = {}
        for limit in limits:
            for way, policy in (("WR", "undivided"), ("WR", "powerOfTwo"), ("WD", "powerOfTwo")):
                given = {"workspace_limit_bytes": limit * MIB}
                if way == "WD":
                    given = {"total_workspace_bytes": limit * MIB * kernels}
                report = bench.report(policy, **given)
                bars.append((f"{way} {policy[0]}\n{limit * kernels}", report))
                rows += list(rows_of(f"{limit * kernels} MiB in total, {way} {policy}", report))
                totals[limit, way, policy] = total_ms(report)
            plain = totals[limit, "WR", "undivided"]
            for way in ("WR", "WD"):
                said = PAPER.get((name, limit), "-") if way == "WD" else "-"
                ours = plain / totals[limit, way, "powerOfTwo"]
                beside(f"{name}, {limit * kernels} MiB, {way} over WR undivided", said, f"{ours:.2f} x")
        if name == "resnet50":
            ratio = totals[32, "WR", "undivided"] / totals[16, "WD", "powerOfTwo"]
            beside("resnet50, WD with 2544 MiB over WR undivided with 5088 MiB", "1.14 x", f"{ratio:.2f} x")
        else:
            ratio = totals[64, "WR", "undivided"] / totals[8, "WD", "powerOfTwo"]
            beside("alexnet, WD with 120 MiB over WR undivided with 960 MiB", "1.24 x", f"{ratio:.2f} x")
        path = bench.write(f"figure12_{name}", rows)
        with done(path):
            title = f"{name}, mini-batch {bench.network.batch}, {bench.kind}; below: total workspace in MiB"
            draw_layers(bars, path, title=title)
        division = path.with_name(path.name.replace("figure12", "figure13"))
        with done(division):  # the paper divides the least of the totals; its rows are in figure 12's table
            draw_division(bars[:3], division, title=f"{name}: workspace of the kernels, in MiB in total below")


if __name__ == "__main__":
    main()
