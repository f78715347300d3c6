"""The tables of README.md and of docs/ that hold measured figures, made from the files of bench/results.

    python -m bench.tools.documents           compare all tables with the results; exit status 1 if one differs
    python -m bench.tools.documents --write   write the tables into the documents

A table is found by the first cell of its head. Every table names what a user has without ucudnn (PyTorch, Caffe's
cuDNN, or the first algorithm that cuDNN's heuristics offer) and what the same candidates take undivided. `not measured
yet` stands where the results lack a figure. Square brackets hold the least and the most of all rounds or steps.
"""

import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import Any

from bench.peers.compare import ORDERS
from bench.peers.table import STEPS, milliseconds, times
from bench.peers.ways import (
    ADAPTIVE,
    GRAPH,
    GRAPH_ONLY,
    HEURISTICS,
    LEGACY,
    ORIGINAL,
    POWER_OF_TWO,
    PYTORCH,
    UNDIVIDED,
    WAYS,
    WITHOUT_COPIES,
)
from bench.tools.results import RESULTS, ROOT, load
from bench.tools.script import command_line, run_main
from bench.torch.network_summary import (
    TITLES,
    Comparison,
    by_setting,
    comparisons,
    geometric_mean,
    kind_of,
    middle,
    promised,
)
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.algorithms.gathered import skips
from ucudnn.networks.tables import load_network
from ucudnn.networks.variants import variants
from ucudnn.units import format_bytes

UNKNOWN = "not measured yet"
MIB = 2**20
USUAL = 64 * MIB
NCHW, NHWC, NO_TF32 = "float32-tf32-first", "float32-tf32-last", "float32-fma-first"
VARIANTS = {
    NCHW: variants(["float32"], ["tf32"], ["first"])[0],
    NHWC: variants(["float32"], ["tf32"], ["last"])[0],
    NO_TF32: variants(["float32"], ["fma"], ["first"])[0],
}
NETWORKS = {
    ("alexnet", 256): "AlexNet",
    ("vgg16", 64): "VGG-16",
    ("resnet18", 128): "ResNet-18",
    ("resnet50", 32): "ResNet-50",
    ("resnet50", 256): "ResNet-50",
    ("densenet121", 64): "DenseNet-121",
    ("inception3", 64): "Inception-v3",
    ("unet3d", 4): "3-D U-Net",
}

Row = list[str]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a document.

    Attributes:
        document: path from the repository's root.
        head: the cells of its head; the first one is unique in the document.
        rows: makes its rows.
    """

    document: str
    head: tuple[str, ...]
    rows: Callable[[], Iterable[Row]]

    def lines(self) -> list[str]:
        """Return the table in Markdown."""
        cells = [list(self.head), ["---"] * len(self.head), *self.rows()]
        return ["|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in cells]

    def place(self, text: Sequence[str]) -> slice:
        """Return the lines that the table takes in a document.

        Raises:
            ValueError: if the document does not have the table once.
        """
        begins = [index for index, line in enumerate(text) if line.startswith(f"| {self.head[0]} |")]
        if len(begins) != 1:
            raise ValueError(f"{self.document}: {len(begins)} tables begin with {self.head[0]!r}")
        end = begins[0]
        while end < len(text) and text[end].startswith("|"):
            end += 1
        return slice(begins[0], end)


@cache
def results(name: str) -> Any:
    """Return what a file of bench/results holds; {} if it is not there yet."""
    path = RESULTS / name
    return load(path) if path.exists() else {}


def ms(time_ms: float | None) -> str:
    """Return a time such as '11.1 ms', or that it is not known."""
    return UNKNOWN if time_ms is None else f"{milliseconds(time_ms)} ms"


def spread(samples_ms: Sequence[float]) -> str:
    """Return the least and the most of samples in square brackets, with three digits behind the leading ones."""
    return f"[{min(samples_ms):.4g}, {max(samples_ms):.4g}]"


# --- all convolutions of a network: peers/compare.json


@cache
def _peers() -> dict[tuple[Any, ...], dict[str, Any]]:
    return {
        (row["network"], row["batch"], row["variant"], row["limit_bytes"], row["way"]): row
        for row in results("peers/compare.json")["rows"]
    }


@cache
def _same_candidates(network: str, batch: int, variant: str) -> bool:
    """Whether ucudnn's candidates are those of the graph API on the tensors as they are, for all layers."""
    layers = VARIANTS[variant].of_network(load_network(network, batch)).layers
    return not any(skips(each.forward) or Candidates.BEST.offers("legacy", each.forward) for each in layers)


def _row(case: tuple[str, int], variant: str, limit: int | None, way: str) -> dict[str, Any] | None:
    """Return the row of a way; a way that cannot differ from the graph API's has that one's row."""
    found = _peers().get((*case, variant, limit, way))
    same = {UNDIVIDED: GRAPH, WITHOUT_COPIES: POWER_OF_TWO, GRAPH_ONLY: POWER_OF_TWO}.get(way)
    if found is None and same is not None and _same_candidates(*case, variant):
        found = _peers().get((*case, variant, limit, same))
    return found


def _time(case: tuple[str, int], variant: str, limit: int | None, way: str) -> float | None:
    row = _row(case, variant, limit, way)
    return None if row is None else row.get("executed_ms")


def _cell(case: tuple[str, int], variant: str, limit: int | None, way: str) -> str:
    """Return a cell such as '11.1 [11.0, 11.3]'; a dash if nothing computes it within the limit, '' if unknown."""
    row = _row(case, variant, limit, way)
    if row is None:
        return ""
    time_ms = row.get("executed_ms")
    if time_ms is None:
        return "–"
    text = milliseconds(time_ms)
    if row.get("range_ms"):
        text += f" {spread(row['range_ms'])}"
    return f"{text} ({format_bytes(row['workspace_bytes'])})" if way == PYTORCH else text


def networks() -> Iterable[Row]:
    """Yield all convolutions of each network within 64 MiB."""
    for variant in (NCHW, NHWC):
        for case, title in NETWORKS.items():
            ways = (PYTORCH, HEURISTICS, LEGACY, GRAPH, UNDIVIDED, ORIGINAL, POWER_OF_TWO, ADAPTIVE)
            cells = [_cell(case, variant, USUAL, way) for way in ways]
            over, divided = (_time(case, variant, USUAL, way) for way in (UNDIVIDED, POWER_OF_TWO))
            ratio = f"{over / divided:.2f}" if over and divided else ""
            free = ", ".join(milliseconds(_time(case, variant, None, way) or 0) for way in (GRAPH, POWER_OF_TWO))
            yield [f"{title} {case[1]}{', NHWC' if variant == NHWC else ''}", *cells, ratio, free]


def ideas() -> Iterable[Row]:
    """Yield what each idea gains within 64 MiB, as the ratio of two ways."""
    for variant, note in ((NCHW, ""), (NO_TF32, ", no TF32")):
        for case, title in NETWORKS.items():
            cells = []
            for slow, fast in STEPS.values():
                before, after = (_time(case, variant, USUAL, way) for way in (slow, fast))
                cells.append(f"{before / after:.2f}" if before and after else "")
            if not any(cells):
                cells[0] = UNKNOWN
            yield [f"{title} {case[1]}{note}", *cells]


def graph_alone() -> Iterable[Row]:
    """Yield AlexNet at 64 MiB in the graph API alone, with and without TF32."""
    for math, variant in (("tf32", NCHW), ("fma", NO_TF32)):
        total = results("gpu/execute.json")["cases"][f"alexnet, 64MiB, graph, powerOfTwo, float32 {math}"]["total"]
        free = _cell(("alexnet", 256), variant, USUAL, PYTORCH)
        undivided, divided = total["undivided_executed_ms"], total["executed_ms"]
        best = _time(("alexnet", 256), variant, USUAL, POWER_OF_TWO)
        title = "AlexNet 256, with TF32" if math == "tf32" else "AlexNet 256, without TF32"
        yield [title, free, ms(undivided), ms(divided), f"{undivided / divided:.2f}", ms(best)]


# --- PyTorch's training steps: torch/step.json, torch/iterations.json and torch/memory.json


def _step(name: str, policy: str, way: str) -> dict[str, Any] | None:
    case = results("torch/step.json")["cases"].get(f"{name}, {policy}")
    return None if case is None else case["ways"][way]


def _took(found: Mapping[str, Any] | None, digits: int = 1) -> str:
    """Return a cell such as '119.5 ms [119.3, 119.7]'."""
    if found is None:
        return UNKNOWN
    return f"{found['median_ms']:.{digits}f} ms {spread(found['samples_ms'])}"


def _largest(found: Mapping[str, Any]) -> str:
    return f"({found['largest_bytes'] / MIB:.0f} MiB)"


def steps() -> Iterable[Row]:
    """Yield training steps by network and policy."""
    for name, title in (("resnet50", "ResNet-50 256"), ("alexnet", "AlexNet 256")):
        for policy in ("undivided", "powerOfTwo", "adaptive"):
            free = _step(name, policy, "pytorch")
            cells = [UNKNOWN] * 3
            if free is not None:
                cells = [f"{_took(free)} {_largest(free)}"]
                for limit in ("64MiB", "16MiB"):
                    found = _step(name, policy, limit)
                    assert found is not None
                    ratio = found["median_ms"] / free["median_ms"]
                    cells.append(f"{_took(found)} {_largest(found)}, {ratio:.3f}")
            yield [f"{title}, `{policy}`", *cells]


PAPER = {  # whole iterations and convolutions alone in the paper, Figures 10 to 12, on a P100
    "alexnet": ("AlexNet 256, 64 MiB for each kernel", "1.40 (1.63)"),
    "resnet18": ("ResNet-18 128, 64 MiB for each kernel", "1.11 (1.21)"),
    "resnet50": ("ResNet-50 32, WD with 2544 MiB", "1.05 (1.14)"),
}


def iterations() -> Iterable[Row]:
    """Yield whole training steps beside the paper's whole iterations."""
    cases = results("torch/iterations.json").get("cases", {})
    for name, (title, paper) in PAPER.items():
        for math, note in (("tf32", "TF32, graph API"), ("fma", "no TF32, legacy API")):
            case = cases.get(f"{name}, {math}")
            cells = [UNKNOWN] * 4
            if case is not None and "gains" in case:
                ways = [_took(case["ways"][way]) for way in ("pytorch", "undivided", "micro-batched")]
                cells = [*ways, f"{case['gains']['over undivided']:.2f}"]
            yield [f"{title}; {note}", *cells, paper]


def _caps() -> list[int]:
    return results("torch/memory.json").get("caps") or [0, 44 * 2**30, 38 * 2**30, 36 * 2**30, 34 * 2**30]


def cap_head() -> tuple[str, ...]:
    """Return the head of the table of caps."""
    caps = (f"{cap / 2**30:.0f} GiB" if cap else "no cap" for cap in _caps())
    return ("3-D U-Net, 4 x 1 x 128³, under a cap on memory", *caps)


def _trial(way: str, cap: int) -> str:
    found = results("torch/memory.json")["trials"].get(f"{way} batch 4 cap {cap}")
    if found is None:
        return UNKNOWN
    return f"{found['step_ms']:.0f} ms {spread(found['samples_ms'])}" if found["trains"] else "out of memory"


def caps() -> Iterable[Row]:
    """Yield steps under caps on PyTorch's memory."""
    names = {"pytorch": "PyTorch", "undivided": "undivided, within 1 GiB", "ucudnn": "ucudnn, within 1 GiB"}
    for way, name in names.items():
        yield [name, *(_trial(way, cap) for cap in _caps())]


# --- Caffe: caffe/time.json


def _caffe(way: str) -> dict[str, Any] | None:
    return results("caffe/time.json")["times"].get(way)


def _caffe_cell(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return UNKNOWN
    runs = found["iterations of each run ms"]
    iteration = f"{milliseconds(found['iteration ms'])} ms{f' {spread(runs)}' if len(runs) > 1 else ''}"
    return f"{milliseconds(found['convolutions ms'])} ms, {iteration}"


def caffe() -> Iterable[Row]:
    """Yield Caffe's AlexNet by limit."""
    for limit, title in (("64 MiB", "64 MiB"), ("8 MiB", "8 MiB, Caffe's own")):
        found = [_caffe(f"{way}, {limit}") for way in ("plain", "undivided", "powerOfTwo")]
        plain, _, divided = found
        assert plain is not None
        assert divided is not None
        ratios = (f"{plain[what] / divided[what]:.2f}" for what in ("convolutions ms", "iteration ms"))
        yield [title, *map(_caffe_cell, found), ", ".join(ratios)]


def caffe_ideas() -> Iterable[Row]:
    """Yield what each idea gains for the convolutions of Caffe's AlexNet at 64 MiB."""
    ways = {
        "cuDNN's heuristics, as Caffe is": "plain",
        "measured choice, legacy API": "legacy undivided",
        "measured choice, graph API": "undivided",
        "micro-batches": "powerOfTwo",
    }
    first = last = None
    for title, way in ways.items():
        found = _caffe(f"{way}, 64 MiB")
        assert found is not None
        time_ms = found["convolutions ms"]
        first, last = first or time_ms, last or time_ms
        yield [title, ms(time_ms), f"{last / time_ms:.2f}", f"{first / time_ms:.2f}"]
        last = time_ms


# --- README, policies, slabs and division


def _against(slow: float, fast: float) -> str:
    ratio = slow / fast
    if abs(ratio - 1) < 0.005:
        return "nothing to gain"
    return f"{ratio:.2f} times faster" if ratio > 1 else f"**{1 / ratio:.2f} times slower**"


def readme() -> Iterable[Row]:
    """Yield the rows of README.md, losers first; the last cells compare, and say how far samples are apart."""
    for name, title, limit in (
        ("alexnet", "AlexNet 256 in PyTorch, 16 MiB for each kernel, training step", "16MiB"),
        ("resnet50", "ResNet-50 256 in PyTorch, 64 MiB, training step", "64MiB"),
    ):
        free, found = (_step(name, "powerOfTwo", way) for way in ("pytorch", limit))
        assert free is not None
        assert found is not None
        undivided = _step(name, "undivided", limit)
        middle = UNKNOWN if undivided is None else f"{undivided['median_ms']:.1f} ms"
        ends = [f"{each['median_ms']:.1f} ms {_largest(each)}" for each in (free, found)]
        verdict = f"{_against(free['median_ms'], found['median_ms'])} than PyTorch"
        samples = [each["samples_ms"] for each in (free, undivided, found) if each is not None]
        yield [title, ends[0], middle, ends[1], verdict, _widest(samples)]
    yield _readme_row("VGG-16 64, channels last, 64 MiB, convolutions", ("vgg16", 64), NHWC, USUAL)
    yield _readme_row("AlexNet 256, no limit, convolutions", ("alexnet", 256), NCHW, None)
    _, (_, _, undivided_text, divided_text, ratio, _) = graph_alone()
    title = "AlexNet 256, 64 MiB, without TF32, graph API alone"
    free_text = _without(("alexnet", 256), NO_TF32, USUAL)
    yield [title, free_text, undivided_text, divided_text, f"{ratio} times faster", ""]
    yield _readme_row("AlexNet 256, 64 MiB, without TF32, all candidates", ("alexnet", 256), NO_TF32, USUAL)
    yield _readme_row("AlexNet 256, 64 MiB, convolutions", ("alexnet", 256), NCHW, USUAL)
    yield _readme_row("VGG-16 64, 64 MiB, convolutions", ("vgg16", 64), NCHW, USUAL)
    yield _readme_row("3-D U-Net 4, 64 MiB, convolutions", ("unet3d", 4), NCHW, USUAL)
    trials = results("torch/memory.json")["trials"]
    capped = {way: trials.get(f"{way} batch 4 cap {36 * 2**30}", {}).get("step_ms") for way in ("pytorch", "undivided")}
    ours = trials[f"ucudnn batch 4 cap {36 * 2**30}"]["step_ms"]
    steps_ms = [UNKNOWN if each is None else f"{each:.0f} ms" for each in (*capped.values(), ours)]
    faster = f"{_against(capped['pytorch'], ours)} than PyTorch, and runs at 34 GiB"
    runs = [trials[f"{way} batch 4 cap {36 * 2**30}"]["samples_ms"] for way in ("pytorch", "undivided", "ucudnn")]
    yield ["3-D U-Net in PyTorch under a cap of 36 GiB, training step", *steps_ms, faster, _widest(runs)]
    for granted in (64, 8):
        plain, undivided, divided = (_caffe(f"{way}, {granted} MiB") for way in ("plain", "undivided", "powerOfTwo"))
        assert plain is not None
        assert divided is not None
        all_ms = [ms(None if each is None else each["iteration ms"]) for each in (plain, undivided, divided)]
        faster = f"{_against(plain['iteration ms'], divided['iteration ms'])} than Caffe"
        runs = [each["iterations of each run ms"] for each in (plain, undivided, divided) if each is not None]
        yield [f"AlexNet 256 in Caffe, {granted} MiB, iteration", *all_ms, faster, _widest(runs)]


def _widest(samples_ms: Iterable[Sequence[float] | None]) -> str:
    """Return how far the samples of one time are apart at most, as a share of the least; '' if some were not kept."""
    found = [*samples_ms]
    if not all(found):
        return ""
    return f"{max(max(each) / min(each) - 1 for each in found if each):.1%}".replace("%", " %")


def _readme_row(title: str, case: tuple[str, int], variant: str, limit: int | None) -> Row:
    undivided, divided = (_time(case, variant, limit, way) for way in (UNDIVIDED, POWER_OF_TWO))
    assert divided is not None
    faster = UNKNOWN if undivided is None else _against(undivided, divided)
    rows = [_row(case, variant, limit, way) or {} for way in (PYTORCH, UNDIVIDED, POWER_OF_TWO)]
    wide = _widest(row.get("range_ms") for row in rows)
    return [title, _without(case, variant, limit), ms(undivided), ms(divided), faster, wide]


def _without(case: tuple[str, int], variant: str, limit: int | None) -> str:
    """Return PyTorch's own time and workspace, such as '20.5 ms (588 MiB)'."""
    free = _row(case, variant, limit, PYTORCH)
    assert free is not None
    return f"{ms(free['executed_ms'])} ({format_bytes(free['workspace_bytes'])})"


def policies() -> Iterable[Row]:
    """Yield the planning time of each policy, and what its plan takes, for AlexNet at 64 MiB."""
    every = results("gpu/benchmarking.json")
    free = _row(("alexnet", 256), NCHW, USUAL, PYTORCH)
    assert free is not None
    limit = format_bytes(free["workspace_bytes"])
    yield ["PyTorch with `cudnn.benchmark`, no limit", "", "", f"{ms(free['executed_ms'])} ({limit})"]
    yield ["undivided, the same candidates", "", "", ms(_time(("alexnet", 256), NCHW, USUAL, UNDIVIDED))]
    for policy in ("powerOfTwo", "adaptive", "all"):
        planned = every[f"{policy}, 64MiB"]["cases"][f"{policy}, 64MiB"]
        executed = every["executed 64MiB"]["cases"][policy]["executed_ms"]
        yield [f"`{policy}`", f"{planned['seconds']:.1f} s", str(planned["measured"]), f"{executed:.2f} ms"]
        if policy == "powerOfTwo":
            found = every["exhaustive"]["cases"]["exhaustive, 64 MiB"]
            predicted = f"{found['predicted_ms']:.2f} ms predicted ({planned['predicted_ms']:.2f} without)"
            title = "`powerOfTwo`, exhaustive, slabs too"
            yield [title, f"{found['seconds']:.1f} s", str(found["measured"]), predicted]


SLAB_CASES = {
    ("volume", "float32"): "32 x 128³, 64 filters, float32",
    ("decoder", "bfloat16"): "96 x 17 x 256², 96 filters, bfloat16",
    ("decoder", "float16"): "96 x 17 x 256², 96 filters, float16",
    ("plane", "float32"): "64 x 2048², 64 filters, float32",
}


def slabs() -> Iterable[Row]:
    """Yield what one sample in slabs takes within limits, as a share of its fastest undivided speed."""
    rows = {(each["case"], each["dtype"], each["operation"]): each for each in results("gpu/slabs.json")["rows"]}
    for (case, dtype), title in SLAB_CASES.items():
        for operation in ("Forward", "BackwardData", "BackwardFilter"):
            row = rows[case, dtype, operation]
            cells = []
            for limit in (256 * MIB, 128 * MIB):
                shares = [
                    max(each["share_of_fastest"] for each in row[kind] if each["workspace_bytes"] <= limit)
                    for kind in ("front", "undivided")
                ]
                planned = [each["share_of_fastest"] for each in row["limits"] if each["limit_bytes"] == limit]
                shares[:1] = planned or shares[:1]
                cells.append(f"{shares[0]:.0%} ({shares[1]:.0%})".replace("%", " %"))
            own = f"{row['fastest_undivided_workspace_bytes'] / MIB:.0f} MiB"
            yield [f"{title}, {operation}", own, *cells, f"{row['kept_workspace_bytes'] / MIB:.0f} MiB"]


def division() -> Iterable[Row]:
    """Yield WR and WD within the same totals."""
    cases = results("paper/division_executed.json")["cases"]
    chosen = (
        (("alexnet", 256), "8 MiB", 120),
        (("alexnet", 256), "64 MiB", 960),
        (("resnet50", 32), "16 MiB", 2544),
        (("inception3", 64), "1 MiB", 282),
    )
    for case, limit, total in chosen:
        found = cases[f"{case[0]}, {limit} for each kernel"]
        free = _row(case, NCHW, USUAL, PYTORCH)
        assert free is not None
        without = f"{free['executed_ms']:.1f} ms ({format_bytes(free['workspace_bytes'])})"
        taken = [f"{found[way]['executed_ms']:.1f} ms" for way in ("WR undivided", "WR", "WD", "shared")]
        needs = found["shared"]["workspace_bytes"]
        if needs < 0.95 * total * MIB:
            taken[-1] += f" (needs {-(-needs // MIB)} MiB)"
        yield [f"{NETWORKS[case]} {case[1]}", f"{total} MiB", without, *taken]


def attention() -> Iterable[Row]:
    """Yield additive attention with its score kept and computed again, by the number of time steps."""
    found = results("memory/attention.json")
    for steps_of_time, case in found["cases"].items():
        layer, translator = ([case[what][way] for way in ("plain", "ucudnn")] for what in ("layer", "translator"))
        sizes = (each["peak_bytes"] / MIB for each in layer)
        peaks = ", ".join(f"{size:.1f}" if size < 1000 else f"{size:.0f}" for size in sizes)
        taken = ", ".join(f"{each['time_ms']:.1f}" for each in layer)
        pairs = zip(translator, found["paper"][steps_of_time], strict=True)
        batches = ", ".join(f"{each['batch']} ({paper})" for each, paper in pairs)
        yield [steps_of_time, f"{peaks} MiB", f"{taken} ms", batches]


FITTED = {
    "densenet121": "DenseNet-121 64",
    "gpt2": "GPT-2 8",
    "inception_v3": "Inception-v3 64",
    "resnet50": "ResNet-50 256",
    "unet2d": "2-D U-Net 8, 512 x 512",
    "unet3d": "3-D U-Net 4, 128³",
    "vgg16_bn": "VGG-16 with batch normalization, 64",
}
SHARES = ("90%", "70%", "50%")


def fitted(file: str) -> Iterable[Row]:
    """Yield how long steps take within shares of PyTorch's peak: those that failed first, then the slowest."""
    cases: Mapping[str, Any] = results(file)["cases"]
    rows = []
    for network, title in FITTED.items():
        stock = cases[f"{network} pytorch"]
        found = [cases.get(f"{network} auto {share}") for share in SHARES]
        ratios = [each["step_ms"] / stock["step_ms"] for each in found if each is not None and "step_ms" in each]
        failed = any(each is not None and "OutOfMemoryError" in each.get("reason", "") for each in found)
        took = f"{ms(stock['step_ms'])}, {stock['allocated'] / 2**30:.1f} GiB"
        cells = [_fitted_cell(each, stock["step_ms"]) for each in found]
        rows.append((failed, max(ratios, default=0.0), [title, took, *cells]))
    for _, _, row in sorted(rows, key=lambda each: each[:2], reverse=True):
        yield row


def _fitted_cell(found: Mapping[str, Any] | None, stock_ms: float) -> str:
    if found is None:
        return UNKNOWN
    if "step_ms" in found:
        return f"{found['step_ms'] / stock_ms:.2f}"
    return "below the floor" if "below the floor" in found["reason"] else "ran out of memory"


# --- programs that are tuned while they run: torch/networks.json, torch/networks_64MiB.json


def tuned_programs() -> Iterable[Row]:
    """Yield each network, form and setting beside PyTorch alone, the largest ratio first."""
    found = promised(results("torch/networks.json").get("cases", {}))
    for each in found:
        peaks = ", ".join(f"{each.more_bytes(kind) / MIB:+.0f}" for kind in ("allocated", "reserved"))
        steps = f"{middle(each.stock, 'first_step_s'):.1f} s, {_first_step(each)}"
        switch = "on" if each.benchmark else "off"
        yield [each.title, switch, *_compared(each), f"{peaks} MiB", steps, each.replaced, _measured_at(each)]
    for group in by_setting(found).values():
        switch = "on" if group[0].benchmark else "off"
        yield [f"geometric mean of {len(group)}", switch, "", "", f"{geometric_mean(group):.3f}", "", "", "", ""]
    if not found:
        yield [UNKNOWN, *[""] * 8]


def limited_programs() -> Iterable[Row]:
    """Yield each network and form within 64 MiB beside PyTorch alone, the largest ratio first."""
    cells = results("torch/networks_64MiB.json").get("cases", {})
    found = [each for each in comparisons(cells) if each.setting == "64MiB"]
    for each in found:
        peak = f"{each.more_bytes('allocated') / MIB:+.0f} MiB"
        turns = UNKNOWN if each.by_turns is None else f"{each.by_turns[1]:.3f}"
        yield [each.title, *_compared(each), turns, peak, _first_step(each), each.replaced, _measured_at(each)]
    if not found:
        yield [UNKNOWN, *[""] * 8]


def ranks_and_image_sizes() -> Iterable[Row]:
    """Yield programs of two ranks, and those whose images change in size, the largest ratio over PyTorch first."""
    found: list[tuple[float, str, str, str, str, str]] = []
    for name, case in results("torch/rank_training.json")["cases"].items():
        stock, ours = (
            median(rank["step_ms"] for setting, ranks in case["runs"] if setting == way for rank in ranks)
            for way in ("stock", "auto")
        )
        title = (
            f"{_network(name)} {case['batch']} for each of two ranks under DistributedDataParallel, {_enabled('auto')}"
        )
        found.append((ours / stock, title, ms(stock), ms(ours), f"{ours / stock:.3f}", case["commit"]))
    for name, case in results("torch/image_sizes.json")["cases"].items():
        base, (_, batch, _, sizes, _) = case["runs"]["stock-off"], name.split()
        for setting, run in case["runs"].items():
            ratio, late = (run[field] / base[field] for field in ("seconds", "late_ms"))
            if run is not base:
                program = f"{_network(name)} {batch}, {sizes} image sizes in random order, {case['steps']} steps"
                title = f"{program}, {_enabled(setting)}"
                said = f"{ratio:.3f}, {late:.3f} in the second half"
                both = f"{base['seconds']:.1f} s", f"{run['seconds']:.1f} s"
                found.append((ratio, title, *both, said, case["commit"]))
    for _, *row in sorted(found, reverse=True):
        yield row


def _network(case: str) -> str:
    """Return the name of the network with which the name of a case begins, without a mini-batch."""
    return TITLES[case.split()[0]].rpartition(" ")[0]


def _enabled(setting: str) -> str:
    limit = setting.removesuffix("-off")
    return "`enable()`" if limit == "auto" else f'`enable(workspace_limit="{limit}")`'


def _compared(each: Comparison) -> list[str]:
    """Return the steps of PyTorch alone and of the setting, with their spreads, and the ratio."""
    steps = (f"{middle(group, 'step_ms'):.1f} ms{_processes(group)}" for group in (each.stock, each.ours))
    return [*steps, _ratio(each)]


def _ratio(each: Comparison) -> str:
    return f"{each.ratio:.3f}{'' if each.settled else ', not settled'}"


def _first_step(each: Comparison) -> str:
    return UNKNOWN if each.first_step_s is None else f"{each.first_step_s:.1f} s"


def _processes(group: Sequence[Mapping[str, Any]]) -> str:
    return f" {spread([case['step_ms'] for case in group])}" if len(group) > 1 else ""


def _measured_at(each: Comparison) -> str:
    """Return the commits of the processes, those of PyTorch alone first, each once, and the GPU of them all."""
    known = dict.fromkeys(case["commit"][:7] for case in (*each.stock, *each.ours) if case.get("commit"))
    gpu = re.search(r"\b[A-Z]+\d+\b", kind_of(each.ours[0]))
    return ", ".join(known if gpu is None else [*known, gpu.group()])


TABLES = (
    *(
        Table(
            document="docs/memory.md",
            head=(f"step within a budget, {gpu}", "PyTorch", "90 %", "70 %", "50 %"),
            rows=partial(fitted, file),
        )
        for gpu, file in (("H100", "memory/execution_h100.json"), ("H200", "memory/execution.json"))
    ),
    Table(
        document="README.md",
        head=("measured on an H200, float32, NCHW", "without ucudnn", "undivided", "ucudnn", "", "spread"),
        rows=readme,
    ),
    Table(
        document="docs/results.md",
        head=(
            *("network, mini-batch", "PyTorch, no limit", "cuDNN heuristics", "cuDNN legacy", "cuDNN graph"),
            *("undivided, same candidates", "original", "ucudnn", "`adaptive`", "ucudnn over undivided", "no limit"),
        ),
        rows=networks,
    ),
    Table(
        document="docs/results.md",
        head=("ranks and image sizes", "PyTorch", "ucudnn", "over PyTorch", "commit"),
        rows=ranks_and_image_sizes,
    ),
    Table(document="docs/results.md", head=("convolutions within 64 MiB", *STEPS), rows=ideas),
    Table(
        document="docs/results.md",
        head=("graph API alone, 64 MiB", "PyTorch, no limit", "undivided", "micro-batched", "gain", "all candidates"),
        rows=graph_alone,
    ),
    Table(
        document="docs/results.md",
        head=("Caffe's AlexNet 256, 64 MiB", "convolutions", "over the row above", "over the first"),
        rows=caffe_ideas,
    ),
    Table(
        document="docs/results.md",
        head=(
            *("a program that is tuned while it runs", "`cudnn.benchmark`", "PyTorch", "`auto`", "over PyTorch"),
            *("peaks more: allocated, reserved", "first step: PyTorch, `auto`", "replaced kernels", "commits, GPU"),
        ),
        rows=tuned_programs,
    ),
    Table(
        document="docs/results.md",
        head=(
            *("a program within 64 MiB", "PyTorch, no limit", "within the limit", "over PyTorch", "by turns"),
            *("peak more: allocated", "first step", "replaced first plans", "commits, GPU"),
        ),
        rows=limited_programs,
    ),
    Table(
        document="docs/results.md",
        head=("whole training step", "PyTorch, no limit", "undivided", "micro-batched", "gain", "the paper's gain"),
        rows=iterations,
    ),
    Table(
        document="bench/results/README.md",
        head=("network, mini-batch", "variant", "limit", *WAYS),
        rows=lambda: times(results("peers/compare.json"), list(WAYS), ORDERS),
    ),
    Table(
        document="docs/cpp-caffe.md",
        head=(
            *("limit for each kernel", "Caffe with plain cuDNN: convolutions, iteration"),
            *("undivided, same candidates", "`UcudnnHandle_t`", "speedup over plain cuDNN"),
        ),
        rows=caffe,
    ),
    Table(
        document="docs/how-it-measures.md",
        head=("policy", "time to plan", "micro-configurations measured", "executed"),
        rows=policies,
    ),
    Table(document="docs/pytorch.md", head=("training step", "PyTorch, no limit", "64 MiB", "16 MiB"), rows=steps),
    Table(document="docs/pytorch.md", head=cap_head(), rows=caps),
    Table(
        document="docs/memory.md",
        head=(
            *("time steps", "peak of the layer, mini-batch 16: plain, this"),
            *("time: plain, this", "largest mini-batch: plain, this"),
        ),
        rows=attention,
    ),
    Table(
        document="docs/slabs.md",
        head=("one sample", "its workspace", "within 256 MiB", "within 128 MiB", "smallest that keeps 90 %"),
        rows=slabs,
    ),
    Table(
        document="docs/workspace-division.md",
        head=(
            *("convolutions", "total", "PyTorch, no limit", "undivided, an equal limit for each"),
            *("WR, an equal limit for each", "WD", "one workspace for all, in sequence"),
        ),
        rows=division,
    ),
)


def parsed() -> Namespace:
    """Return the command line."""
    parser = command_line(__doc__, __spec__.name)
    parser.add_argument("--write", action="store_true", help="write the tables into the documents")
    return parser.parse_args()


def main() -> bool:
    """Compare or write all tables; return whether none differs."""
    write, well = parsed().write, True
    for table in TABLES:
        path = ROOT / table.document
        text = path.read_text(encoding="utf-8").splitlines()
        place, lines = table.place(text), table.lines()
        if text[place] == lines:
            continue
        if write:
            text[place] = lines
            path.write_text("\n".join(text) + "\n", encoding="utf-8")
            continue
        well = False
        print(f"{table.document}: the table {table.head[0]!r} is not that of the results")
    return well


if __name__ == "__main__":
    run_main(main)
