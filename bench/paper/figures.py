"""The paper's figures 1 and 8 to 13, planned from a recorded profile or executed on a GPU.

    python -m bench.paper.figures figure10                     plan from the recorded H200 profile
    python -m bench.paper.figures figure10 --backend cudnn     execute on this machine's GPU
    python -m bench.paper.figures figure10 --from CSV          draw again

figure1: kernels of AlexNet 256 with as much workspace as the best algorithm wants, with one byte less, and with that
in micro-batches. figure8: the desirable set of AlexNet's conv2 (Forward) up to 120 MiB. figure9: conv2 within 64 MiB by
policy. figure10 and figure11: AlexNet and ResNet-18 within 8, 64 and 512 MiB for each kernel by policy. figure12, which
draws 13 as well: WR and WD within the same totals. Files are FIGURE_executed.csv or FIGURE_planned.csv, with the device
and all versions. Each figure is drawn from its CSV file, and the paper's numbers are printed beside ours.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import fsum
from pathlib import Path
from typing import Any, NamedTuple

from bench.paper.figure_files import FAILURES, MIB, Row, Table, drawn_later, parts_text, read, write
from bench.tools.backends import measured, open_graph, plain_benchmark, undivided
from bench.tools.results import RESULTS
from bench.tools.script import command_line, note, run_main
from ucudnn.backends.base import ComputeBackend
from ucudnn.benchmarking.factory import open_benchmark
from ucudnn.benchmarking.request import Request
from ucudnn.configuration import Configuration
from ucudnn.kernel import Kernel
from ucudnn.networks.tables import load_network
from ucudnn.planning.decision import decide
from ucudnn.plots import draw_configurations, draw_desirable, draw_division, draw_groups, draw_layers
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.reporting.plan_timing import times_in_turn
from ucudnn.settings import Settings
from ucudnn.solvers.desirable import desirable_set
from ucudnn.solvers.reuse import fastest_within

LEAST_REPEATS = 3
SLOW_MS = 300.0
"""Milliseconds for all samples of one kernel, beyond which there are fewer samples."""

BEST, LESS, OURS = ONE_BYTE = ("best", "-1 byte", "-1 byte, ucudnn")
POLICIES = ("undivided", "powerOfTwo", "adaptive", "all")
LIMITS_MIB = (8, 64, 512)
EACH_MIB = {"alexnet": (8, 64, 512), "resnet50": (16, 32)}
WAYS = (("WR", "undivided"), ("WR", "powerOfTwo"), ("WD", "powerOfTwo"))

Times = Mapping[str, float | None]


class Bench:
    """A network on a backend.

    Args:
        arguments: command line.
        network: name of the network.
    """

    def __init__(self, arguments: Namespace, network: str) -> None:
        self.network = load_network(network)
        settings = Settings.load(database=arguments.database)
        self.backend = open_graph(arguments.backend, network, settings)
        self.benchmark = open_benchmark(self.backend, settings)
        self._undivided = plain_benchmark(arguments.backend, self.network, self.benchmark, settings)
        self.executes = isinstance(self.backend, ComputeBackend)
        self._repeats = arguments.repeats

    def policies(self) -> list[str]:
        """Return the policies that can be planned; profiles know only the powers of two."""
        return [*(POLICIES if self.executes else POLICIES[:2])]

    def conv2(self, operation: Operation) -> Kernel:
        """Return a kernel of conv2."""
        return next(each for each in self.network.kernels() if (each.layer, each.operation) == ("conv2", operation))

    def planned(self, label: str, kernels: Sequence[Kernel], **values: Any) -> list[tuple[Kernel, Configuration]]:
        """Return the kernels with their configurations; a message names those that cannot be planned."""
        settings = Settings.load({}, slabs=False, **values)
        benchmark = self._undivided if settings.policy is BatchSizePolicy.UNDIVIDED else self.benchmark
        together = settings.total_workspace_bytes is not None
        found = []
        for some in [kernels] if together else [[each] for each in kernels]:
            try:
                found += [(each.kernel, each.configuration) for each in decide(some, benchmark, settings).kernels]
            except FAILURES as error:
                note(f"left out: {label}: {error}")
        return found

    def rows(self, ways: Mapping[str, Mapping[str, Any]]) -> list[Row]:
        """Plan the network in several ways, run the plans in turn on a backend that executes, and return all kernels.

        Args:
            ways: settings by label.
        """
        found = {label: self.planned(label, self.network.kernels(), **values) for label, values in ways.items()}
        wanted: dict[ConvolutionProblem, dict[str, Configuration]] = {}
        for plan in found.values():
            for kernel, configuration in plan:
                wanted.setdefault(kernel.problem, {})[str(configuration)] = configuration
        times = {problem: self.times(problem, given) for problem, given in wanted.items()}
        return [
            {"plan": label, **_place(kernel), "count": kernel.count, **self.row(each, times[kernel.problem])}
            for label, plan in found.items()
            for kernel, each in plan
            if str(each) in times[kernel.problem]
        ]

    def times(self, problem: ConvolutionProblem, given: Mapping[str, Configuration]) -> Times:
        """Run configurations in turn and return their milliseconds; None for each on a backend that only plans.

        If a run fails, no times are returned, and a message says why.
        """
        if not isinstance(self.backend, ComputeBackend):
            return dict.fromkeys(given)
        once_ms = 2 * fsum(each.time_ms for each in given.values())  # one run warms up for each sample
        repeats = min(self._repeats, max(LEAST_REPEATS, int(SLOW_MS / once_ms)))
        try:
            return times_in_turn(problem, given, self.backend, repeats)
        except FAILURES as error:
            note(f"left out: {problem}: {error}")
            return {}

    def row(self, configuration: Configuration, times: Times, name: str = "") -> Row:
        """Return the columns of a configuration, whose time is found under a name, or else under its own text."""
        return {
            "configuration": str(configuration),
            "workspace_bytes": configuration.workspace_bytes,
            "predicted_ms": configuration.time_ms,
            "executed_ms": times[name or str(configuration)],
        }


def _place(kernel: Kernel) -> Row:
    return {"layer": kernel.layer, "operation": kernel.operation.value}


def beside(what: str, paper: str, ours: str) -> None:
    """Print a figure of the paper beside ours."""
    print(f"{what:64}  paper {paper:>12}   here {ours:>10}")


# --- figure 1


def measure_one_byte(bench: Bench) -> Iterator[list[Row]]:
    """Yield the rows of each kernel."""
    for kernel in bench.network.kernels():
        problem = kernel.problem
        found = measured(bench.benchmark, problem)
        whole = undivided(found, problem)
        given = {BEST: whole[-1]}
        if given[BEST].workspace_bytes:
            for name, front in ((LESS, whole), (OURS, desirable_set(found, problem.batch))):
                within = fastest_within(front, given[BEST].workspace_bytes - 1)
                if within is not None:
                    given[name] = within
        times = bench.times(problem, given)
        rows = {name: bench.row(each, times, name) for name, each in given.items() if name in times}
        yield [{**_place(kernel), "plan": name, **row} for name, row in rows.items()]


def draw_one_byte(table: Table, path: Path) -> None:
    """Draw the times as groups of bars."""
    places = table.places("plan")
    series = {plan: [table.ms(rows[plan]) if plan in rows else None for rows in places.values()] for plan in ONE_BYTE}
    draw_groups(
        ["\n".join(each) for each in places], path, series, ylabel=f"{table.kind} time in ms", title=table.title
    )


def tell_one_byte(table: Table) -> None:
    """Print the paper's number and ours. The paper gives that of conv2 only, and its figure shows Forward only."""
    for plan, what in ((LESS, "one byte less"), (OURS, "the same in micro-batches")):
        ratios = {
            " ".join(place): table.ms(rows[plan]) / table.ms(rows[BEST])
            for place, rows in table.places("plan").items()
            if plan in rows
        }
        if plan == LESS and "conv2 Forward" in ratios:
            beside("one byte less, conv2 Forward", "4.51 x", f"{ratios['conv2 Forward']:.2f} x")
        for where in [max(ratios, key=lambda each: ratios[each])] if ratios else ():
            beside(f"{what}, at worst ({where})", "-", f"{ratios[where]:.2f} x")


# --- figures 8 and 9


def measure_desirable(bench: Bench) -> Iterator[list[Row]]:
    """Yield the desirable set, at all sizes where these are known."""
    problem = bench.conv2(Operation.FORWARD).problem
    policy = BatchSizePolicy.ALL if bench.executes else BatchSizePolicy.POWER_OF_TWO
    request = Request(problem=problem, sizes=policy.sizes(problem.batch), limit_bytes=120 * MIB)
    front = desirable_set(bench.benchmark.micro_configurations(request), problem.batch)
    times = bench.times(problem, {str(each): each for each in front})
    yield [{**bench.row(each, times), "parts": parts_text(each)} for each in front if str(each) in times]


def draw_points(table: Table, path: Path) -> None:
    """Draw each configuration as a point."""
    draw_desirable([table.configuration(row) for row in table.rows], path, title=table.title, kind=table.kind)


def tell_desirable(table: Table) -> None:
    """Print the size of the set and its range of times."""
    times = [table.ms(row) for row in table.rows]
    beside("desirable configurations up to 120 MiB", "-", str(len(times)))
    beside("from the least to the most workspace, speedup", "-", f"{times[0] / times[-1]:.2f} x")


def measure_conv2(bench: Bench) -> Iterator[list[Row]]:
    """Yield the rows of each operation."""
    for operation in Operation:
        kernel, found = bench.conv2(operation), {}
        for policy in bench.policies():
            for _, each in bench.planned(policy, [kernel], policy=policy, workspace_limit_bytes=64 * MIB):
                found[policy] = each
        times = bench.times(kernel.problem, found)
        rows = {policy: bench.row(each, times, policy) for policy, each in found.items() if policy in times}
        yield [{**_place(kernel), "policy": key, **row, "parts": parts_text(found[key])} for key, row in rows.items()]


def draw_bars(table: Table, path: Path) -> None:
    """Draw each plan as a bar of its micro-batches."""
    bars = [(f"{row['operation']}\n{row['policy']}", table.configuration(row)) for row in table.rows]
    draw_configurations(bars, path, title=table.title, kind=table.kind)


def tell_conv2(table: Table) -> None:
    """Print the paper's number and ours."""
    for (layer, operation), rows in table.places("policy").items():
        times = {policy: table.ms(row) for policy, row in rows.items()}
        if "undivided" in times:
            best = min(times, key=lambda policy: times[policy])
            paper = "2.33 x (all)" if operation == Operation.FORWARD.value else "-"
            beside(f"{layer} {operation}, {best} over undivided", paper, f"{times['undivided'] / times[best]:.2f} x")


# --- figures 10 to 13


def measure_limits(bench: Bench) -> Iterator[list[Row]]:
    """Yield the rows of each limit."""
    for limit in LIMITS_MIB:
        given = {"workspace_limit_bytes": limit * MIB}
        yield bench.rows({f"{limit} MiB {policy}": {"policy": policy, **given} for policy in bench.policies()})


def draw_limits(table: Table, path: Path) -> None:
    """Draw each limit and policy as a bar."""
    draw_layers(table.bars(lambda plan: plan.replace(" MiB ", " MiB\n")), path, title=table.title)


def tell_limits(table: Table, paper: Mapping[int, str]) -> None:
    """Print the paper's speedups of convolutions on a P100, of `all` over `undivided`, and ours."""
    for limit in LIMITS_MIB:
        for policy in POLICIES[1:]:
            gain = table.gain(f"{limit} MiB undivided", f"{limit} MiB {policy}")
            if gain != "-":
                beside(f"{limit} MiB, {policy} over undivided", paper.get(limit, "-"), gain)


def measure_totals(bench: Bench) -> Iterator[list[Row]]:
    """Yield the rows of each total."""
    kernels = sum(kernel.count for kernel in bench.network.kernels())
    for limit in EACH_MIB[bench.network.name]:
        wr, wd = {"workspace_limit_bytes": limit * MIB}, {"total_workspace_bytes": limit * kernels * MIB}
        given = {(way, policy): {"policy": policy, **(wd if way == "WD" else wr)} for way, policy in WAYS}
        total = f"{limit * kernels} MiB in total"
        yield bench.rows({f"{total}, {way} {policy}": each for (way, policy), each in given.items()})


def _total_label(plan: str) -> str:
    """Return the label of a bar: '120' above 'WD p'."""
    total, _, way = plan.partition(" MiB in total, ")
    name, _, policy = way.partition(" ")
    return f"{total} MiB\n{name} {policy[0]}"


def draw_totals(table: Table, path: Path) -> None:
    """Draw figure 12, and figure 13 from the rows of the least total, as the paper does."""
    title = f"{table.title}; u: undivided, p: powerOfTwo"
    draw_layers(table.bars(_total_label), path, title=title)
    division = path.with_name(path.name.replace("figure12", "figure13"))
    draw_division(table.bars(_total_label)[: len(WAYS)], division, title=title)
    print(f"wrote {division}")


def tell_totals(table: Table) -> None:
    """Print the paper's numbers and ours."""
    for total in dict.fromkeys(row["plan"].partition(" ")[0] for row in table.rows):
        plans = [f"{total} MiB in total, {way} {policy}" for way, policy in WAYS]
        for (way, _), plan in zip(WAYS[1:], plans[1:], strict=True):
            paper = "1.38 x (all)" if (way, total) == ("WD", "120") else "-"
            beside(f"{total} MiB, {way} over WR undivided", paper, table.gain(plans[0], plan))


class Figure(NamedTuple):
    """A figure: its networks, by the names of their files, and how it is measured, drawn and told."""

    networks: Mapping[str, str]
    measure: Callable[[Bench], Iterator[list[Row]]]
    draw: Callable[[Table, Path], None]
    tell: Callable[[Table], None]


LIMITS = partial(tell_limits, paper={8: "no gain", 64: "1.63 x (all)", 512: "no gain"})
FIGURES = {
    "figure1": Figure({"figure1": "alexnet"}, measure_one_byte, draw_one_byte, tell_one_byte),
    "figure8": Figure({"figure8": "alexnet"}, measure_desirable, draw_points, tell_desirable),
    "figure9": Figure({"figure9": "alexnet"}, measure_conv2, draw_bars, tell_conv2),
    "figure10": Figure({"figure10": "alexnet"}, measure_limits, draw_limits, LIMITS),
    "figure11": Figure(
        {"figure11": "resnet18"}, measure_limits, draw_limits, partial(tell_limits, paper={64: "1.21 x (all)"})
    ),
    "figure12": Figure({f"figure12_{each}": each for each in EACH_MIB}, measure_totals, draw_totals, tell_totals),
}


def main() -> None:
    """Measure and draw a figure."""
    parser = command_line(__doc__, __spec__.name)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("--backend", default="replay:h200", help="cudnn, or replay:PROFILE without a GPU (%(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="samples of each plan (%(default)s); at least 3 if slow")
    parser.add_argument("--database", help="file of measurements (UCUDNN_DATABASE)")
    parser.add_argument("--out", type=Path, default=RESULTS / "paper", help="folder of the files (bench/results/paper)")
    parser.add_argument("--from", dest="drawn", type=Path, nargs="+", metavar="CSV", help="only draw these files")
    arguments = parser.parse_args()
    figure, paths = FIGURES[arguments.figure], arguments.drawn or []
    for name, network in {} if paths else figure.networks.items():
        bench = Bench(arguments, network)
        path = arguments.out / f"{name}_{'executed' if bench.executes else 'planned'}.csv"
        conditions = bench.backend.conditions()
        title = f"{network}, mini-batch {bench.network.batch}, {conditions.get('device', bench.backend.name)}"
        rows: list[Row] = []
        for chunk in figure.measure(bench):
            rows += chunk
            write(path, [title, ", ".join(f"{key} {value}" for key, value in conditions.items())], rows)
        paths.append(path)
    for path in paths:
        table = read(path)
        print(f"{path}: {table.title}")
        figure.tell(table)
        drawn_later(figure.draw, table, path.with_suffix(".png"))


if __name__ == "__main__":
    run_main(main)
