"""Plan for a GPU that you do not have: what a workspace limit costs AlexNet on an H200, and what micro-batches save.

    python3 -m venv .venv && .venv/bin/pip install --quiet . && .venv/bin/python examples/plan_for_another_gpu.py

The times were recorded on an H200 and come with the package. `ucudnn profile` records those of another GPU.
"""

import ucudnn
from ucudnn.networks.tables import load_network
from ucudnn.reporting.report import Report


def plan(limit: str) -> Report:
    """Return the plan of AlexNet's convolutions, forward and backward, within a limit for each of them."""
    handle = ucudnn.Handle(backend="replay:h200", workspace_limit=limit)
    for kernel in load_network("alexnet").kernels():
        handle.get_algorithm(kernel.problem, layer=kernel.layer)
    handle.optimize()
    return handle.report()


def main() -> None:
    """Print a line for each limit, then where micro-batches save most within 64 MiB."""
    print("limit    one algorithm  micro-batches  largest workspace")
    for limit in ("8MiB", "32MiB", "64MiB", "256MiB", "1GiB"):
        report = plan(limit)
        whole, divided = report.total("undivided_ms"), report.total("micro_batched_ms")
        largest = report.shared_workspace_bytes / 2**20
        print(f"{limit:7}  {whole:10.1f} ms  {divided:10.1f} ms  {largest:13.0f} MiB")
    print("\nwithin 64 MiB, these gain most:")
    for kernel in sorted(plan("64MiB").kernels, key=lambda each: each.speedup or 0, reverse=True)[:3]:
        sizes = kernel.configuration.partition(" ")[0]
        print(
            f"{kernel.layer} {kernel.operation}: {kernel.speedup:.1f} times faster in micro-batches of {sizes} samples"
        )


if __name__ == "__main__":
    main()
