"""The paper's figure 9: AlexNet's conv2 at a mini-batch of 256 within 64 MiB, under each policy.

python bench/figure9.py                     planned from the recorded H200 profile
python bench/figure9.py --backend cudnn     executed on this machine's GPU
"""

from figures import MIB, Bench, beside, done, parse
from ucudnn.plots import draw_configurations

from ucudnn.decision import decide
from ucudnn.problem import Operation
from ucudnn.settings import Settings

POLICIES = ("undivided", "powerOfTwo", "adaptive", "all")


def main() -> None:
    """Draw the figure."""
    bench = Bench(parse(__doc__), "alexnet")
    rows, bars = [], []
    for operation in Operation:
        (kernel,) = (each for each in bench.network.kernels() if each.layer == "conv2" and each.operation is operation)
        found = {}
        for policy in bench.policies(POLICIES):
            settings = Settings.load({}, policy=policy, workspace_limit_bytes=64 * MIB)
            found[policy] = decide([kernel], bench.benchmark, settings).kernels[0].configuration
        times = bench.times(kernel.problem, found)
        for policy, configuration in found.items():
            bars.append((f"{operation.value}\n{policy}", configuration))
            rows.append(
                {
                    "operation": operation.value,
                    "policy": policy,
                    "configuration": str(configuration),
                    "workspace_bytes": configuration.workspace_bytes,
                    "time_ms": times[policy],
                }
            )
        best = min(times, key=lambda policy: times[policy])
        paper = "2.33 x" if operation is Operation.FORWARD else "-"
        beside(f"conv2 {operation.value}, {best} over undivided", paper, f"{times['undivided'] / times[best]:.2f} x")
    path = bench.write("figure9", rows)
    with done(path):
        draw_configurations(bars, path, title=f"AlexNet conv2, mini-batch 256, 64 MiB, {bench.kind}")


if __name__ == "__main__":
    main()
