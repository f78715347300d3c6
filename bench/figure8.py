"""The paper's figure 8: the desirable set of AlexNet's conv2 (Forward) at a mini-batch of 256, up to 120 MiB.

python bench/figure8.py                     planned from the recorded H200 profile
python bench/figure8.py --backend cudnn     measured on this machine's GPU, at all micro-batch sizes
"""

from figures import MIB, Bench, beside, done, parse
from ucudnn.plots import draw_desirable

from ucudnn.backends.base import ComputeBackend
from ucudnn.exploration import Request
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import Operation
from ucudnn.solvers.desirable import desirable_set


def main() -> None:
    """Draw the figure."""
    bench = Bench(parse(__doc__), "alexnet")
    (kernel,) = (
        each for each in bench.network.kernels() if each.layer == "conv2" and each.operation is Operation.FORWARD
    )
    problem = kernel.problem
    policy = BatchSizePolicy.ALL if isinstance(bench.backend, ComputeBackend) else BatchSizePolicy.POWER_OF_TWO
    request = Request(problem=problem, sizes=policy.sizes(problem.batch), limit_bytes=120 * MIB)
    front = desirable_set(bench.benchmark.micro_configurations(request), problem.batch)
    times = bench.times(problem, {str(each): each for each in front})
    rows = [
        {
            "configuration": str(each),
            "workspace_bytes": each.workspace_bytes,
            "predicted_ms": each.time_ms,
            "executed_ms": times[str(each)] if bench.kind == "executed" else None,
        }
        for each in front
    ]
    path = bench.write("figure8", rows)
    with done(path):
        draw_desirable(front, path, title=f"AlexNet conv2 (Forward), mini-batch 256, {policy.value}")
    beside("desirable configurations up to 120 MiB", "-", str(len(front)))
    beside("from the least to the most workspace, speedup", "-", f"{front[0].time_ms / front[-1].time_ms:.2f} x")


if __name__ == "__main__":
    main()
