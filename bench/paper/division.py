"""Workspace division (WD) against workspace reuse (WR) within the same total: the paper's figures 12 and 13.

    python -m bench.paper.division                          plan and execute on the GPU, branches on four streams, too
    python -m bench.paper.division --backend replay:h200    plan from the recorded profile, without a GPU

AlexNet 256 with 120, 960 and 7680 MiB in total (8, 64 and 512 MiB for each of its 15 kernels), ResNet-50 32 with 2544
and 5088 MiB (16 and 32 MiB for each of 159), Inception-v3 64 with 282 and 2256 MiB (1 and 8 MiB for each of 282). All
plans of a kernel run in turn in one process (medians). The results hold the plans, with the division, and the times of
all kernels. Then Inception-v3's convolutions run through one handle, its branches on one stream and on four.
"""

from argparse import Namespace
from functools import partial
from statistics import median
from typing import Any

from bench.tools import script
from bench.tools.backends import open_graph, plain_benchmark
from bench.tools.results import RESULTS, save
from ucudnn.backends.base import Backend, ComputeBackend
from ucudnn.backends.cudnn.gpu.cupy_gpu import cupy_module
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.factory import open_benchmark
from ucudnn.configuration import Configuration
from ucudnn.handle import Handle
from ucudnn.networks.tables import Network, load_network
from ucudnn.planning.decision import Decisions, decide
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.reporting.plan_timing import samples_in_turn, times_in_turn
from ucudnn.settings import Settings

MIB = 2**20
CASES = {"alexnet": (8, 64, 512), "resnet50": (16, 32), "inception3": (1, 8)}
"""MiB of workspace for each kernel."""

COLUMNS = ("kernel", "count", "configuration", "workspace_bytes", "predicted_ms", "executed_ms")


def ways(network: Network, each_mib: int, benchmark: Benchmark, plain: Benchmark) -> dict[str, Decisions]:
    """Return the plans within a total of `each_mib` for each kernel; `plain` measures for the undivided plan."""
    kernels = network.kernels()
    total = each_mib * MIB * sum(kernel.count for kernel in kernels)

    def plan(policy: str, groups: Any = (), **limits: Any) -> Decisions:
        settings = Settings.load({}, policy=policy, **limits)
        return decide(kernels, plain if policy == "undivided" else benchmark, settings, groups)

    found = {
        "WR undivided": plan("undivided", workspace_limit_bytes=each_mib * MIB),
        "WR": plan("powerOfTwo", workspace_limit_bytes=each_mib * MIB),
        "WD": plan("powerOfTwo", total_workspace_bytes=total),
    }
    if network.groups:
        found["WD, grouped"] = plan("powerOfTwo", network.groups, total_workspace_bytes=total)
    found["shared"] = plan("powerOfTwo", workspace_limit_bytes=total)
    return found


def described(
    way: str, decisions: Decisions, executed: dict[tuple[ConvolutionProblem, Configuration], float]
) -> dict[str, Any]:
    """Return the row of one plan; kernels of the same problem and configuration share an entry."""
    parts: dict[tuple[ConvolutionProblem, Configuration], dict[str, Any]] = {}
    for each in decisions.kernels:
        key = each.kernel.problem, each.configuration
        row = parts.setdefault(
            key,
            {
                "kernel": str(each.kernel),
                "count": 0,
                "configuration": str(each.configuration),
                "workspace_bytes": each.configuration.workspace_bytes,
                "predicted_ms": each.configuration.time_ms,
                "executed_ms": executed.get(key),
            },
        )
        row["count"] += each.kernel.count
    rows = list(parts.values())
    needed = [each.workspace_bytes * (1 if way == "shared" else each.kernel.count) for each in decisions.kernels]
    done = all(row["executed_ms"] is not None for row in rows)
    return {
        "predicted_ms": sum(row["predicted_ms"] * row["count"] for row in rows),
        "executed_ms": sum(row["executed_ms"] * row["count"] for row in rows) if done else None,
        "workspace_bytes": max(needed) if way == "shared" else sum(needed),
        "arena_bytes": decisions.division.arena_bytes if decisions.division else None,
        "solvers": decisions.division.methods if decisions.division else None,
        "solver_seconds": decisions.solver_seconds,
        "columns": COLUMNS,
        "kernels": [[row[column] for column in COLUMNS] for row in rows],
    }


def execute(
    plans: list[Decisions], backend: ComputeBackend, repeats: int
) -> dict[tuple[ConvolutionProblem, Configuration], float]:
    """Return the milliseconds of every configuration of every plan; those of a kernel run in turn."""
    wanted: dict[ConvolutionProblem, dict[Configuration, None]] = {}
    for decisions in plans:
        for each in decisions.kernels:
            wanted.setdefault(each.kernel.problem, {})[each.configuration] = None
    times = {}
    for problem, configurations in wanted.items():
        given = {each: each for each in configurations}
        for configuration, time_ms in times_in_turn(problem, given, backend, repeats).items():
            times[problem, configuration] = time_ms
        script.note(".", end="")
    script.note("")
    return times


def show(network: str, each_mib: int, answer: dict[str, dict[str, Any]]) -> None:
    """Print the totals of one case, relative to WR undivided."""
    plain = answer["WR undivided"]
    for name, way in answer.items():
        executed = "" if way["executed_ms"] is None else f" executed {way['executed_ms']:8.3f}"
        ratio = (plain["executed_ms"] or plain["predicted_ms"]) / (way["executed_ms"] or way["predicted_ms"])
        held = (way["arena_bytes"] or way["workspace_bytes"]) / MIB
        print(
            f"{network:10} {each_mib:4} MiB a kernel  {name:14} predicted {way['predicted_ms']:8.3f}{executed} ms"
            f" ({ratio:.2f} x) {held:8.0f} MiB {', '.join(way['solvers'] or ())}",
            flush=True,
        )


class Steps:
    """Steps of a network's convolutions through a handle that divides a total among the branches of its modules.

    Every layer has its own tensors. The modules run forward in their order and then backward in the opposite order. A
    module begins when its predecessor has ended on all streams.
    """

    def __init__(self, network: Network, backend: ComputeBackend, total_bytes: int) -> None:
        self.cupy = cupy = cupy_module()
        self._backend = backend
        self.handle = Handle(backend=backend, policy="powerOfTwo", total_workspace=total_bytes, groups=network.groups)
        self._problems = {layer.name: layer.forward for layer in network.layers}
        self._operands = {name: backend.operands(problem) for name, problem in self._problems.items()}
        for kernel in network.kernels():
            self.handle.get_algorithm(kernel.problem, layer=kernel.layer)
        self.handle.optimize()
        modules = {name: group for group in network.groups for branch in group for name in branch}
        self._modules = list(dict.fromkeys(modules.get(name, ((name,),)) for name in self._problems))
        self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
        self._begin = cupy.cuda.Event(disable_timing=True)
        self._ends = [cupy.cuda.Event(disable_timing=True) for _ in self._streams]

    def step(self, count: int) -> None:
        """Queue a step on a number of streams; it begins and ends on the current stream."""
        for group in self._modules:
            self._module(group, count, Operation.FORWARD)
        for group in reversed(self._modules):
            self._module(group, count, Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER)

    def _module(self, group: tuple[tuple[str, ...], ...], count: int, *operations: Operation) -> None:
        main = self.cupy.cuda.get_current_stream()
        if count == 1:
            for branch in group:
                self._branch(branch, operations)
            return
        self._begin.record(main)
        for branch, stream, end in zip(group, self._streams, self._ends, strict=False):
            stream.wait_event(self._begin)
            with stream:
                self._branch(branch, operations)
            end.record(stream)
            main.wait_event(end)

    def _branch(self, branch: tuple[str, ...], operations: tuple[Operation, ...]) -> None:
        for name in branch if operations == (Operation.FORWARD,) else reversed(branch):
            x, w, y, _ = self._backend.bind(*self._operands[name])
            for operation in operations:
                self.handle.convolve(self._problems[name].with_operation(operation), x, w, y, layer=name)


def branches(network: Network, backend: ComputeBackend, total_bytes: int, repeats: int) -> dict[str, Any]:
    """Time a network's convolutions through a handle, the branches of each module on one stream and on four."""
    steps = Steps(network, backend, total_bytes)
    with steps.cupy.cuda.Stream(non_blocking=True):
        samples = samples_in_turn({count: partial(steps.step, count) for count in (1, 4)}, backend, repeats)
    times = {count: median(each) for count, each in samples.items()}
    report = steps.handle.report()
    return {
        "network": network.name,
        "total_bytes": total_bytes,
        "arena_bytes": report.arena_bytes,
        "predicted_ms": report.total("micro_batched_ms"),
        "one_stream_ms": times[1],
        "four_streams_ms": times[4],
        "ratio": times[1] / times[4],
        "alternatives": {each.name: each.time_ms for each in report.alternatives},
    }


def case_of(
    network: Network, each_mib: int, benchmarks: tuple[Benchmark, Benchmark], backend: Backend, repeats: int
) -> dict[str, Any]:
    """Plan one case and run its plans on a backend that executes; print and return the results."""
    plans = ways(network, each_mib, *benchmarks)
    times = execute(list(plans.values()), backend, repeats) if isinstance(backend, ComputeBackend) else {}
    case = {way: described(way, decisions, times) for way, decisions in plans.items()}
    show(network.name, each_mib, case)
    return case


def parsed() -> Namespace:
    """Return the command line."""
    parser = script.command_line(__doc__, __spec__.name, "paper/division_executed.json")
    parser.add_argument("network", nargs="*", default=[], help=f"{', '.join(CASES)} (all)")
    parser.add_argument("--backend", default="cudnn", help="cudnn or replay:PROFILE (%(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="samples of each plan (%(default)s)")
    arguments = parser.parse_args()
    if "replay" in arguments.backend:
        arguments.default_out = RESULTS / "paper" / "division_planned.json"
    return arguments


def main() -> None:
    """Run all cases and write them."""
    arguments = parsed()
    answer: dict[str, Any] = {"cases": {}}
    settings = Settings.load()
    backend: Backend | None = None
    for name in arguments.network or CASES:
        network = load_network(name)
        # A profile has a recording for each network; a GPU serves all networks.
        if not isinstance(backend, ComputeBackend):
            backend = open_graph(arguments.backend, name, settings)
        answer["conditions"] = dict(backend.conditions())
        benchmark = open_benchmark(backend, settings)
        benchmarks = benchmark, plain_benchmark(arguments.backend, network, benchmark, settings)
        for each_mib in CASES[name]:
            case = case_of(network, each_mib, benchmarks, backend, arguments.repeats)
            answer["cases"][f"{name}, {each_mib} MiB for each kernel"] = case
        if network.groups and isinstance(backend, ComputeBackend):
            answer["branches"] = [
                branches(network, backend, total * MIB, arguments.repeats) for total in (64, 256, 1024)
            ]
            for found in answer["branches"]:
                print({key: found[key] for key in ("total_bytes", "one_stream_ms", "four_streams_ms", "ratio")})
    save(script.out_of(arguments), answer)


if __name__ == "__main__":
    script.run_main(main)
