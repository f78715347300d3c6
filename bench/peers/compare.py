"""Peers side by side on one GPU: cuDNN's two APIs undivided, PyTorch, the original's method, and ucudnn.

    python -m bench.peers.compare                                 all networks, NCHW float32 TF32, 64 MiB
    python -m bench.peers.compare resnet50:256 --limit 8MiB --limit none --variant float16-last --way PyTorch
    python -m bench.peers.compare --all --seconds 400 --database times.db     repeat this until nothing is left

For each network and variant, the script plans all ways at all limits. Then, for each distinct convolution, every
distinct configuration and PyTorch run in turn on the same tensors, stream and clock (medians). The time of a way is the
sum over the network's kernels, forward and both backward passes. Earlier results stay in the file (--out): several
calls complete it, and a pair of network and variant with all wanted results is not measured again. A pair is written as
a whole. If time is up (--seconds), it gets the limits that were planned by then. The exit status
is 1 if something is left at the end.

`bench.peers.ways` says how each way chooses its algorithms. The results for each network, variant, limit and way:
`predicted_ms` is the sum of the benchmarked times; `executed_ms` is the sum of the executed medians; `range_ms` is the
least and the most of all kernels' times in one round;
`over_graph` and `over_legacy` are the speedups over `cuDNN graph` and `cuDNN legacy`; `planning_seconds` is the time of
that call, in which `planning_measured` micro-configurations were measured and the others known from the database or
from an earlier way or limit (for PyTorch: the time of its first calls); `workspace_bytes` is the most of any kernel;
`short_share` is the part of the time in kernels below 0.05 ms, where the host's launches count; `distance` (with
--check) is the largest distance from a plain algorithm's output. `absent` says why a way does not exist at a limit.
`failed` says why it did not run; the next call tries again.
"""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import fsum, inf
from pathlib import Path
from time import perf_counter

from bench.peers.run import FAILURES, Outcome, Outcomes, Rig, Run, execute, said
from bench.peers.table import Answer, Row, is_done, key_of, load, merge
from bench.peers.ways import PYTORCH, WAYS, offered_first
from bench.tools.results import RESULTS, save
from bench.tools.script import command_line, note, run_main
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.recording import NO_LIMIT
from ucudnn.configuration import Configuration
from ucudnn.errors import InfeasibleError, MeasurementError, UnsupportedProblemError
from ucudnn.kernel import Kernel
from ucudnn.networks.tables import Network, load_network
from ucudnn.networks.variants import Variant, variants
from ucudnn.planning.decision import decide
from ucudnn.problem import ConvolutionProblem, DataType, MathMode
from ucudnn.settings import Settings
from ucudnn.units import format_bytes, parse_bytes

NETWORKS = ("alexnet", "vgg16", "resnet18", "resnet50", "resnet50:256", "densenet121", "inception3", "unet3d")
LIMITS = ("8MiB", "16MiB", "64MiB", "512MiB", "none")
SHORT_MS = 0.05
NONE_FITS = (InfeasibleError, MeasurementError, UnsupportedProblemError)


def variant_name(variant: Variant) -> str:
    """Return a name such as 'float32-tf32-first', or 'float16-last' for a type without math modes."""
    math = f"-{variant.math.value}" if variant.dtype is DataType.FLOAT32 else ""
    return f"{variant.dtype.value}{math}-{'last' if variant.channels_last else 'first'}"


VARIANTS = {variant_name(each): each for each in variants(["float32", "float16"], ["tf32", "fma"], ["first", "last"])}


@dataclass(kw_only=True)
class Planned:
    """The plan of a way at a limit, or the reason why there is none.

    Attributes:
        kernels: the kernels with their configurations; none if there is no plan.
        time_ms: the sum of the benchmarked times; None for a way that measures nothing.
        absent: why the way does not exist at the limit.
        failed: why it could not be planned.
        seconds: duration of planning.
        measured: micro-configurations that planning measured.
    """

    kernels: Sequence[tuple[Kernel, Configuration]] = ()
    time_ms: float | None = None
    absent: str = ""
    failed: str = ""
    seconds: float = 0.0
    measured: int = 0


def plan(name: str, network: Network, limit: int | None, rig: Rig) -> Planned:
    """Plan a network in one way within a limit; if that fails, name the kernel."""
    way = WAYS[name]
    if way is None:
        return Planned(absent=rig.no_peer)
    benchmark = rig.benchmark(way.candidates, [layer.forward for layer in network.layers])
    limit_bytes = NO_LIMIT if limit is None else limit
    policy = way.policy or "undivided"
    settings = Settings.load({}, policy=policy, workspace_limit_bytes=limit_bytes, slabs=way.slabs)
    before, begin = benchmark.measured, perf_counter()
    planned = Planned()
    try:
        if way.policy is None:
            planned.kernels = offered_first(network.kernels(), rig.backends[benchmark.backend.name], limit_bytes)
        else:
            decisions = decide(network.kernels(), benchmark, settings)
            planned.kernels = [(each.kernel, each.configuration) for each in decisions.kernels]
            planned.time_ms = sum(each.configuration.time_ms * each.kernel.count for each in decisions.kernels)
    except FAILURES as error:
        reason = _named(error, network, benchmark, settings)
        planned.absent, planned.failed = (reason, "") if isinstance(error, NONE_FITS) else ("", reason)
    planned.seconds, planned.measured = perf_counter() - begin, benchmark.measured - before
    return planned


def _named(error: Exception, network: Network, benchmark: Benchmark, settings: Settings) -> str:
    """Return an error with the first kernel that causes it."""
    if isinstance(error, InfeasibleError | MeasurementError):
        return said(error)  # names the kernel itself
    for kernel in network.kernels():
        try:
            decide([kernel], benchmark, settings)
        except FAILURES as its:
            return f"{kernel}: {said(its)}"
    return said(error)


def parts_of(name: str, planned: Planned, network: Network, rig: Rig) -> list[tuple[Kernel, Run]]:
    """Return the kernels of a way, each with its run."""
    way = WAYS[name]
    if way is None:
        return [(kernel, Run(runner=PYTORCH)) for kernel in network.kernels()] if rig.peer else []
    runner = rig.runner(way.candidates)
    return [(kernel, Run.of(runner, configuration)) for kernel, configuration in planned.kernels]


def tolerance(variant: Variant) -> float:
    """Return the largest distance of outputs by rounding; a wrong layout has a distance of about 1."""
    return 1e-4 if variant.dtype is DataType.FLOAT32 and variant.math is MathMode.FMA else 1e-2


def measured(
    name: str,
    planned: Planned,
    parts: Sequence[tuple[Kernel, Run]],
    outcomes: Mapping[ConvolutionProblem, Outcomes],
) -> Row:
    """Return the row of a way at a limit, without its key."""
    row: Row = {"planning_seconds": planned.seconds, "planning_measured": planned.measured}
    if planned.absent or planned.failed:
        return {**row, **({"absent": planned.absent} if planned.absent else {"failed": planned.failed})}
    found: list[tuple[Kernel, Outcome]] = [(kernel, outcomes[kernel.problem][run]) for kernel, run in parts]
    if WAYS[name] is None:
        row["planning_seconds"] = fsum({kernel.problem: each.first_seconds for kernel, each in found}.values())
    for kernel, each in found:
        if each.failed:
            return {**row, "failed": f"{kernel}: {each.failed}"}
    times = [(each.time_ms or 0.0) * kernel.count for kernel, each in found]
    short = [time_ms for time_ms, (_, each) in zip(times, found, strict=True) if (each.time_ms or 0.0) < SHORT_MS]
    return {
        **row,
        "predicted_ms": planned.time_ms,
        "executed_ms": fsum(times),
        "range_ms": range_ms(found),
        "repeats": min(len(each.samples_ms) for _, each in found),
        "workspace_bytes": _most(each.workspace_bytes for _, each in found),
        "short_share": fsum(short) / fsum(times),
        "distance": _most(each.distance for _, each in found),
    }


def range_ms(found: Sequence[tuple[Kernel, Outcome]]) -> list[float]:
    """Return the least and the most milliseconds of all kernels in one round; slow kernels have the fewest rounds."""
    rounds = min(len(each.samples_ms) for _, each in found)
    totals = [fsum(each.samples_ms[index] * kernel.count for kernel, each in found) for index in range(rounds)]
    return [min(totals), max(totals)]


def _most(values: Iterable[float | None]) -> float | None:
    """Return the largest value; None if one is missing."""
    known = list(values)
    return None if None in known else max((each for each in known if each is not None), default=None)


def measure(network: Network, cells: Sequence[tuple[int | None, str]], rig: Rig, options: Namespace) -> list[Row]:
    """Plan all ways at all limits, run the plans, and return a row for each limit and way."""
    planned: dict[tuple[int | None, str], Planned] = {}
    parts: dict[tuple[int | None, str], list[tuple[Kernel, Run]]] = {}
    wanted: dict[ConvolutionProblem, dict[Run, None]] = {}
    for limit, name in cells:
        if perf_counter() > options.until and parts and all(limit != before for before, _ in parts):
            note("  time is up; the other limits are left out")
            break
        cell = limit, name
        planned[cell] = plan(name, network, limit, rig)
        parts[cell] = parts_of(name, planned[cell], network, rig)
        for kernel, run in parts[cell]:
            wanted.setdefault(kernel.problem, {})[run] = None
        within = "" if limit is None else f" within {format_bytes(limit)}"
        reason = planned[cell].absent or planned[cell].failed
        if reason or WAYS[name] is not None:
            note(f"  {name}{within}: {reason or f'planned in {planned[cell].seconds:.2f} s'}")
    outcomes: dict[ConvolutionProblem, Outcomes] = {}
    with rig.one_stream():
        for problem, runs in wanted.items():
            outcomes[problem] = execute(problem, runs, rig, options.repeats, options.check)
            note(".", end="")
    note("")
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return [
        {"limit_bytes": limit, "way": name, "at": at}
        | measured(name, planned[limit, name], parts[limit, name], outcomes)
        for limit, name in parts
    ]


def run_pair(network: Network, variant: str, rig: Rig, answer: Answer, options: Namespace) -> bool:
    """Measure a network in a variant if results are missing; return whether nothing failed."""
    case = {"network": network.name, "batch": network.batch, "variant": variant}
    cells = [(limit, way) for limit in options.limit for way in options.way]
    conditions = rig.conditions()
    title = f"{network.name} {network.batch} {variant}"
    if not options.again and all(is_done(answer, (*case.values(), *cell), conditions, options.check) for cell in cells):
        note(f"{title}: done before")
        return True
    note(f"{title}:")
    rows = [case | row for row in measure(VARIANTS[variant].of_network(network), cells, rig, options)]
    merge(answer, rows, conditions)
    save(options.out, answer)
    for row in rows:
        print(title, row["limit_bytes"], row["way"], row.get("executed_ms") or row.get("absent") or row["failed"])
    wrong = [text for row in rows if (text := complaint(row, options.check))]
    for text in wrong:
        note(f"  {text}")
    return not wrong


def complaint(row: Row, check: bool) -> str:
    """Return the complaint about a row; '' if there is none."""
    if "failed" in row:
        return f"{row['way']} failed: {row['failed']}"
    distance = row.get("distance")
    if check and "executed_ms" in row and (distance is None or distance > tolerance(VARIANTS[row["variant"]])):
        return f"{row['way']}: outputs are {distance} apart from those of a plain algorithm"
    return ""


def network_of(text: str) -> Network:
    """Return a network from 'resnet50', 'resnet50:256', or the path of a CSV file."""
    name, _, batch = text.rpartition(":")
    return load_network(name, int(batch)) if name and batch.isdigit() else load_network(text)


def way_named(text: str) -> str:
    """Return a way by its name in any case, with u for μ."""

    def plain(name: str) -> str:
        return name.casefold().replace("μ", "u")

    found = next((name for name in WAYS if plain(name) == plain(text)), None)
    if found is None:
        raise ArgumentTypeError(f"{text!r} is not known: give one of {', '.join(WAYS)}")
    return found


def parsed() -> Namespace:
    """Return the command line with its defaults."""
    parser = command_line(__doc__, __spec__.name)
    parser.add_argument("network", nargs="*", help=f"of {', '.join(NETWORKS)}, or a CSV file, each also as NAME:BATCH")
    parser.add_argument("--limit", action="append", help="such as 64MiB (the default), or none; may be repeated")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="may be repeated (float32-tf32-first)")
    parser.add_argument("--way", action="append", type=way_named, help=f"of {', '.join(WAYS)}; may be repeated (all)")
    parser.add_argument("--all", action="store_true", help="all limits and variants, unless some are named")
    parser.add_argument("--seconds", type=float, default=inf, help="start no plan after this time")
    parser.add_argument("--database", help="file of measurements (UCUDNN_DATABASE)")
    parser.add_argument(
        "--repeats", type=int, default=7, help="samples of each run (%(default)s); of slow runs fewer, at least 3"
    )
    parser.add_argument("--check", action="store_true", help="compare the outputs of all ways")
    parser.add_argument("--again", action="store_true", help="also measure what the file has")
    parser.add_argument("--backend", default="cudnn", choices=("cudnn", "cpu"), help="cpu to try the script out")
    parser.add_argument("--out", type=Path, default=RESULTS / "peers/compare.json", help="file of the results")
    options = parser.parse_args()
    options.until = perf_counter() + options.seconds
    limits = options.limit or (LIMITS if options.all else ("64MiB",))
    options.limit = list(dict.fromkeys(None if each == "none" else parse_bytes(each) for each in limits))
    options.variant = list(dict.fromkeys(options.variant or (VARIANTS if options.all else ("float32-tf32-first",))))
    options.way = [way for way in WAYS if not options.way or way in options.way]
    options.network = [network_of(text) for text in options.network or NETWORKS]
    return options


def measure_pairs(answer: Answer, options: Namespace) -> bool:
    """Measure the pairs of network and variant that are missing; return whether all are done."""
    rig = Rig(options.backend, options.database)
    pairs = [(network, variant) for variant in options.variant for network in options.network]
    failed = {key_of(row)[:3] for row in answer["rows"] if "failed" in row}
    # Pairs with the largest expected speedup come first, and pairs that failed before come last.
    pairs.sort(key=lambda pair: ((pair[0].name, pair[0].batch, pair[1]) in failed, VARIANTS[pair[1]].channels_last))
    well = True
    for index, (network, variant) in enumerate(pairs):
        if perf_counter() > options.until:
            note(f"time is up; not looked at: {len(pairs) - index} pairs of network and variant")
            return False
        try:
            well &= run_pair(network, variant, rig, answer, options) and perf_counter() <= options.until
        except Exception as error:  # noqa: BLE001, because the other pairs can still use the time on the GPU
            note(f"{network.name} {network.batch} {variant} failed: {said(error)}")
            well = False
    return well


def main() -> bool:
    """Measure what is missing, and return whether nothing failed or is left."""
    options = parsed()
    return measure_pairs(load(options.out), options)


if __name__ == "__main__":
    run_main(main)
