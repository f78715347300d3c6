"""The tables of README.md and of docs/ that hold measured figures, made from the files of bench/results.

    python -m bench.tools.documents           compare all tables with the results; exit status 1 if one differs
    python -m bench.tools.documents --write   write the tables into the documents

A table is found by the first cell of its head. Every table names what a user has without ucudnn (PyTorch, Caffe's
cuDNN, or the first algorithm that cuDNN's heuristics offer) and what the same candidates take undivided. `not measured
yet` stands where the results lack a figure. Square brackets hold the least and the most of all rounds or steps.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

from bench.memory.link import STEPS as LINK_STEPS
from bench.memory.link import balance_rows, policy_rows
from bench.memory.paper_rows import load_rows, merged
from bench.memory.rival_table import COLUMNS, WAYS, fronts, within
from bench.peers.table import STEPS, milliseconds
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
    WITHOUT_COPIES,
)
from bench.tools.results import RESULTS, ROOT, load
from bench.tools.script import command_line, run_main
from bench.torch.comparison import Comparison, comparisons, geometric_mean, middle
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.algorithms.gathered import skips
from ucudnn.networks.tables import load_network
from ucudnn.networks.variants import variants
from ucudnn.units import format_bytes

UNKNOWN = "not measured yet"
MIB = 2**20
USUAL = 64 * MIB
NCHW, NHWC = "float32-tf32-first", "float32-tf32-last"
VARIANTS = {
    NCHW: variants(["float32"], ["tf32"], ["first"])[0],
    NHWC: variants(["float32"], ["tf32"], ["last"])[0],
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


@dataclass(frozen=True)
class Table:
    """A table of a document.

    Attributes:
        document: path from the repository's root.
        titles: the cells of its head, between bars; the first one is unique in the document.
        rows: makes its rows.
    """

    document: str
    titles: str
    rows: Callable[[], Iterable[Row]]

    @property
    def head(self) -> list[str]:
        """Return the cells of its head."""
        return [each.strip() for each in self.titles.split("|")]

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
    """Return a cell such as '11.1'; a dash if nothing computes it within the limit, '' if unknown."""
    row = _row(case, variant, limit, way)
    if row is None:
        return ""
    time_ms = row.get("executed_ms")
    if time_ms is None:
        return "–"
    text = milliseconds(time_ms)
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
            rows = (_row(case, variant, USUAL, way) or {} for way in ways)
            wide = _widest([row["range_ms"] for row in rows if row.get("range_ms")])
            yield [f"{title} {case[1]}{', NHWC' if variant == NHWC else ''}", *cells, ratio, free, wide]


def ideas() -> Iterable[Row]:
    """Yield what each idea gains within 64 MiB, as the ratio of two ways."""
    for case, title in NETWORKS.items():
        cells = []
        for slow, fast in STEPS.values():
            before, after = (_time(case, NCHW, USUAL, way) for way in (slow, fast))
            cells.append(f"{before / after:.2f}" if before and after else "")
        if not any(cells):
            cells[0] = UNKNOWN
        yield [f"{title} {case[1]}", *cells]


# --- PyTorch's training steps: torch/step.json, torch/iterations.json and torch/memory.json


def _step(name: str, policy: str, way: str) -> dict[str, Any]:
    return results("torch/step.json")["cases"][f"{name}, {policy}"]["ways"][way]


def _took(found: Mapping[str, Any]) -> str:
    """Return a cell such as '119.5 ms [119.3, 119.7] (64 MiB)'."""
    return f"{found['median_ms']:.1f} ms {spread(found['samples_ms'])} ({found['largest_bytes'] / MIB:.0f} MiB)"


def steps() -> Iterable[Row]:
    """Yield training steps by network and policy."""
    for name, title in (("resnet50", "ResNet-50 256"), ("alexnet", "AlexNet 256")):
        for policy in ("undivided", "powerOfTwo", "adaptive"):
            free, *limited = (_step(name, policy, way) for way in ("pytorch", "64MiB", "16MiB"))
            ratios = (f"{_took(each)}, {each['median_ms'] / free['median_ms']:.3f}" for each in limited)
            yield [f"{title}, `{policy}`", _took(free), *ratios]


PAPER = {  # whole iterations and convolutions alone in the paper, Figures 10 to 12, on a P100
    "alexnet": ("AlexNet 256, 64 MiB for each kernel", "1.40 (1.63)"),
    "resnet18": ("ResNet-18 128, 64 MiB for each kernel", "1.11 (1.21)"),
    "resnet50": ("ResNet-50 32, WD with 2544 MiB", "1.05 (1.14)"),
}


def iterations() -> Iterable[Row]:
    """Yield whole training steps beside the paper's whole iterations."""
    for name, (title, paper) in PAPER.items():
        for math, note in (("tf32", "TF32, graph API"), ("fma", "no TF32, legacy API")):
            case = results("torch/iterations.json")["cases"][f"{name}, {math}"]
            ways = [case["ways"][way] for way in ("pytorch", "undivided", "micro-batched")]
            times, gain = (ms(each["median_ms"]) for each in ways), case["gains"]["over undivided"]
            yield [f"{title}; {note}", *times, f"{gain:.2f}", paper, _widest(each["samples_ms"] for each in ways)]


CAPS = {0: "no cap", 44 * 2**30: "44 GiB", 36 * 2**30: "36 GiB", 34 * 2**30: "34 GiB"}


def _capped(way: str, cap: int) -> dict[str, Any]:
    return results("torch/memory.json")["trials"][f"{way} batch 4 cap {cap}"]


def caps() -> Iterable[Row]:
    """Yield steps under caps on PyTorch's memory."""
    names = {"pytorch": "PyTorch", "undivided": "undivided, within 1 GiB", "ucudnn": "ucudnn, within 1 GiB"}
    for way, name in names.items():
        found = [_capped(way, cap) for cap in CAPS]
        took = (f"{each.get('step_ms', 0):.0f} ms {spread(each.get('samples_ms', [0]))}" for each in found)
        yield [name, *(cell if each["trains"] else "out of memory" for cell, each in zip(took, found, strict=True))]


# --- Caffe: caffe/time.json


def _caffe(way: str) -> dict[str, Any]:
    return results("caffe/time.json")["times"][way]


def caffe() -> Iterable[Row]:
    """Yield Caffe's AlexNet by limit."""
    for limit, title in (("64 MiB", "64 MiB"), ("8 MiB", "8 MiB, Caffe's own")):
        found = [_caffe(f"{way}, {limit}") for way in ("plain", "undivided", "powerOfTwo")]
        cells, ratios = [], []
        for each in found:
            runs = spread(each["iterations of each run ms"])
            cells.append(f"{ms(each['convolutions ms'])}, {ms(each['iteration ms'])} {runs}")
        for what in ("convolutions ms", "iteration ms"):
            ratios.append(f"{found[0][what] / found[2][what]:.2f}")
        yield [title, *cells, ", ".join(ratios)]


def caffe_ideas() -> Iterable[Row]:
    """Yield what each idea gains for the convolutions of Caffe's AlexNet at 64 MiB."""
    ways = {
        "cuDNN's heuristics, as Caffe is": "plain",
        "measured choice, legacy API": "legacy undivided",
        "measured choice, graph API": "undivided",
        "micro-batches": "powerOfTwo",
    }
    times = [_caffe(f"{way}, 64 MiB")["convolutions ms"] for way in ways.values()]
    for title, before, time_ms in zip(ways, [times[0], *times], times, strict=False):
        yield [title, ms(time_ms), f"{before / time_ms:.2f}", f"{times[0] / time_ms:.2f}"]


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
        found = [
            _step(name, "powerOfTwo", "pytorch"),
            *(_step(name, each, limit) for each in ("undivided", "powerOfTwo")),
        ]
        times = [each["median_ms"] for each in found]
        free, middle, ours = (f"{time_ms:.1f} ms" for time_ms in times)
        sizes = [f" ({each['largest_bytes'] / MIB:.0f} MiB)" for each in found]
        said = f"{_against(times[0], times[2])} than PyTorch"
        yield [title, free + sizes[0], middle, ours + sizes[2], said, _widest(each["samples_ms"] for each in found)]
    yield _readme_row("VGG-16 64, channels last, 64 MiB, convolutions", ("vgg16", 64), NHWC, USUAL)
    yield _readme_row("AlexNet 256, 64 MiB, convolutions", ("alexnet", 256), NCHW, USUAL)
    yield _readme_row("3-D U-Net 4, 64 MiB, convolutions", ("unet3d", 4), NCHW, USUAL)
    found = [_capped(way, 36 * 2**30) for way in ("pytorch", "undivided", "ucudnn")]
    times = [each["step_ms"] for each in found]
    said = f"{_against(times[0], times[2])} than PyTorch, and runs at 34 GiB"
    title = "3-D U-Net in PyTorch under a cap of 36 GiB, training step"
    yield [title, *(f"{each:.0f} ms" for each in times), said, _widest(each["samples_ms"] for each in found)]
    found = [_caffe(f"{way}, 64 MiB") for way in ("plain", "undivided", "powerOfTwo")]
    times = [each["iteration ms"] for each in found]
    wide = _widest(each["iterations of each run ms"] for each in found)
    said = f"{_against(times[0], times[2])} than Caffe"
    yield ["AlexNet 256 in Caffe, 64 MiB, iteration", *map(ms, times), said, wide]


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


def solvers() -> Iterable[Row]:
    """Yield the times of solvers: medians, and in brackets the slowest case."""
    for title, found in results("paper/solvers.json")["classes"].items():
        times = ((found[name][f"{which}median_ms"] for which in ("", "worst_")) for name in ("ours", "highs", "glpk"))
        yield [title, str(found["cases"]), *(f"{_plain(middle)} ({_plain(worst)})" for middle, worst in times)]


def _plain(time_ms: float) -> str:
    """Return a time with two digits and without an exponent."""
    return f"{float(f'{time_ms:.2g}'):g}"


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
BUDGET_FILES = {"H200": "memory/execution.json", "H100": "memory/execution_h100.json"}


def fitted() -> Iterable[Row]:
    """Yield how long steps take within shares of PyTorch's peak on two GPUs: the slowest on the first one first."""
    rows = []
    for network, title in FITTED.items():
        cells, slowest = [title], []
        for file in BUDGET_FILES.values():
            cases = results(file)["cases"]
            stock, found = cases[f"{network} pytorch"], [cases.get(f"{network} auto {share}") for share in SHARES]
            cells.append(f"{ms(stock['step_ms'])}, {stock['allocated'] / 2**30:.1f} GiB")
            cells += [_fitted_cell(each, stock["step_ms"]) for each in found]
            ran = [each["step_ms"] / stock["step_ms"] for each in found if each is not None and "step_ms" in each]
            slowest.append(max(ran, default=0.0))
        rows.append((slowest, cells))
    yield from (cells for _, cells in sorted(rows, reverse=True))


def _fitted_cell(found: Mapping[str, Any] | None, stock_ms: float) -> str:
    if found is None:
        return UNKNOWN
    if "step_ms" in found:
        return f"{found['step_ms'] / stock_ms:.2f}"
    return "below the floor" if "below the floor" in found["reason"] else "ran out of memory"


def rivals() -> Iterable[Row]:
    """Yield the least time of each way to train a step in less memory, within shares of eager's peak.

    The first row of each step names it.
    """
    known = ""
    for named, *cells in fronts(results("memory/rivals.json").get("cases", {})):
        step, way = named.split(": ")
        yield [way if step == known else named, *cells]
        known = step
    if not known:
        yield [UNKNOWN, *[""] * len(COLUMNS)]


def rivals_within() -> Iterable[Row]:
    """Yield the same for some steps and shares, a column for each way."""
    yield from [*within(results("memory/rivals.json").get("cases", {}))] or [[UNKNOWN, *[""] * len(WAYS)]]


SHARDED = {"gpt2-large": "GPT-2 large 4, AdamW", "resnet50": "ResNet-50 128, AdamW"}
SHARDED_WAYS = ("fsdp2", "fsdp2 checkpoint", "fit", "fit 0.8", "fit 0.6")


def sharded() -> Iterable[Row]:
    """Yield times and peaks of steps that are divided among two GPUs, by FSDP2 and by `fit`."""
    cases = results("memory/sharded.json")["cases"]
    for model, title in SHARDED.items():
        found = [cases[f"{model} {way}"] for way in SHARDED_WAYS]
        yield [title, *(f"{ms(each['ms'])}, {each['peak_bytes'] / 2**30:.1f} GiB" for each in found)]


HOOKED = {
    "wav2vec2": "Wav2Vec2 with CTC, 8 of 10 s",
    "mixtral": "Mixtral of 8 small experts, 8 x 1024",
    "faster_rcnn": "Faster R-CNN, 8 of 800²",
    "resnet50": "ResNet-50 256, NHWC",
}


def hooked() -> Iterable[Row]:
    """Yield times of steps that have no plan beside those of eager PyTorch, the largest loss first."""
    for name, title in HOOKED.items():
        trials = results("memory/hooks.json")["cases"][name]["trials"]
        eager, *within = (trials[share] for share in ("1.0", "0.8", "0.6"))
        assert all(each["peak"] <= each["budget"] for each in within)
        taken = ("ended" if each["error"] else f"{each['ms'] / eager['ms']:.2f}" for each in within)
        yield [title, f"{ms(eager['ms'])}, {eager['peak'] / 2**30:.1f} GiB", *taken]


def volumes() -> Iterable[Row]:
    """Yield peaks of nnU-Net's plans: predicted, measured and by nnU-Net's own estimate, the largest error first."""
    cases = results("memory/nnunet.json")["cases"]
    found = [(cases[name.partition(", ")[0]], each) for name, each in cases.items() if name.endswith(", as planned")]
    rows = [(case, each) for case, each in found if each["way"] == "as planned"]
    for case, each in sorted(rows, key=lambda row: -abs(row[1]["allocated_bytes"] / row[1]["predicted"] - 1)):
        patch = "x".join(map(str, each["patch"]))
        sizes = each["predicted"], each["allocated_bytes"], case["nnunet_bytes"]
        yield [f"{each['plan']}, {each['batch']} of {patch}", *(f"{size / 2**30:.2f} GiB" for size in sizes)]


def patches() -> Iterable[Row]:
    """Yield the largest patches of nnU-Net's plans that train within 24 GiB, the least gain first."""
    cases = results("memory/nnunet.json")["cases"]
    found = [(cases[f"{each['plan']}, plain"], each) for name, each in cases.items() if name.endswith(", fit")]
    for plain, each in sorted(found, key=lambda row: prod(row[1]["patch"]) / prod(row[0]["patch"])):
        voxels = prod(each["patch"]) / prod(plain["patch"])
        sizes = ("x".join(map(str, one["patch"])) for one in (plain, each))
        yield [f"{each['plan']}, {each['batch']}", *sizes, f"{voxels:.2f}", f"{each['ms'] / plain['ms'] / voxels:.2f}"]


# --- programs that are tuned while they run: torch/networks.json, torch/networks_64MiB.json

MOST_RATIO, MOST_LIMITED_RATIO = 1.02, 1.05
"""Programs that take more than this of PyTorch's time stand in a table; all others are counted in its last rows."""


def tuned_programs() -> Iterable[Row]:
    """Yield the programs that take longer under `enable()` than PyTorch, the largest ratio first, and the means."""
    found = comparisons(results("torch/networks.json").get("cases", {}))
    for each in found:
        if each.setting.startswith("auto") and each.ratio > MOST_RATIO:
            yield [f"{each.title}, {'on' if each.benchmark else 'off'}", *_compared(each)]
    for setting, switch in (("auto", "on"), ("auto-off", "off")):
        yield _mean([each for each in found if each.setting == setting], f", {switch}")


def limited_programs() -> Iterable[Row]:
    """Yield the programs that take longer within 64 MiB than PyTorch, the largest ratio first, and the mean."""
    cases = results("torch/networks_64MiB.json").get("cases", {})
    found = [each for each in comparisons(cases) if each.setting == "64MiB"]
    for each in found:
        if each.ratio > MOST_LIMITED_RATIO:
            yield [each.title, *_compared(each), f"{each.more_bytes('allocated') / MIB:+.0f} MiB"]
    yield [*_mean(found, most=MOST_LIMITED_RATIO), ""]


def _mean(found: Sequence[Comparison], more: str = "", most: float = MOST_RATIO) -> Row:
    """Return the row that sums a table up, or that nothing was measured."""
    if not found:
        return [UNKNOWN, *[""] * 5]
    above = sum(each.ratio > most for each in found)
    title = f"geometric mean of all {len(found)}{more} ({above} above {most})"
    return [title, "", "", f"{geometric_mean(found):.3f}", "", ""]


def _compared(each: Comparison) -> Row:
    """Return the steps of PyTorch alone and of the setting, their ratio, that by turns, and the replaced kernels."""
    steps = (f"{middle(group, 'step_ms'):.1f} ms" for group in (each.stock, each.ours))
    turns = "" if each.by_turns is None else f"{each.by_turns:.3f}"
    return [*steps, f"{each.ratio:.3f}{'' if each.settled else ', not settled'}", turns, each.replaced]


# --- the papers on training in less memory: memory/*.json


def papers(name: str) -> Iterable[Row]:
    """Yield the figures of a paper beside ours; those that one explanation is for share a row."""
    return merged(load_rows(results(f"memory/{name}.json")))


# --- public models: memory/coverage.json

KINDS = {"to the bit": (70, 85, 100, 120), "by hooks": (70, 85, 100), "refused": (), "too slow": (), "failed": ()}
"""What became of a model, and the budgets, in percent of its peak, of which each is counted."""


def coverage() -> Iterable[Row]:
    """Yield how public models trained, by library: the one with the largest share of failures first, and all."""
    cases = [each for each in results("memory/coverage.json").get("cases", {}).values()]
    cases = [each for each in cases if each["outcome"] != "plain fails"]
    families = {each["family"]: [it for it in cases if it["family"] == each["family"]] for each in cases}

    def cells(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        yield str(len(found))
        outcomes = [each["outcome"] if each["outcome"] in KINDS else "failed" for each in found]
        for kind, shares in KINDS.items():
            several = [sum(each["outcome"] == kind and each["share"] == share for each in found) for share in shares]
            within = f" ({' / '.join(map(str, several))})" if any(several) else ""
            yield f"{outcomes.count(kind)}{within}"

    def trains(found: Sequence[Mapping[str, Any]]) -> float:
        return sum(each["outcome"] in ("to the bit", "by hooks") for each in found) / len(found)

    for family in sorted(families, key=lambda each: trains(families[each])):
        yield [family, *cells(families[family])]
    yield ["all", *cells(cases)]


RESULTS_PAGE, PAPERS_PAGE = "docs/results.md", "docs/memory-papers.md"
PAPERS = {
    "vdnn": "vDNN",
    "vdnn_ext": "the study",
    "swap": "swapping",
    "translation": "translation",
    "dymem": "Dymem",
}
TABLES = (
    Table(
        "docs/memory.md",
        " | ".join(["step within a budget", *(f"PyTorch, {gpu} | 90 % | 70 % | 50 %" for gpu in BUDGET_FILES)]),
        fitted,
    ),
    Table("docs/memory.md", "step without a plan, H200 | eager PyTorch | within 80 % of that | 60 %", hooked),
    Table(
        "docs/training-steps.md",
        "plan of nnU-Net, peak on an H200 | predicted | measured | nnU-Net's estimate",
        volumes,
    ),
    Table(
        "docs/training-steps.md",
        "plan of nnU-Net, mini-batch, 24 GiB on an H200 | largest plain patch | with `fit` | voxels | time of a voxel",
        patches,
    ),
    Table("docs/beside-other-ways.md", " | ".join(["step by each way, H200", *COLUMNS]), rivals),
    Table("README.md", " | ".join(["tensors of an H200 within", *WAYS]), rivals_within),
    Table(
        "docs/several-gpus.md",
        "step of two H200s | FSDP2 | with `checkpoint` | `fit` | within 80 % of FSDP2's peak | 60 %",
        sharded,
    ),
    Table(
        "README.md",
        "measured on an H200, float32, NCHW | without ucudnn | undivided | ucudnn | | spread",
        readme,
    ),
    Table(
        RESULTS_PAGE,
        "network, mini-batch | PyTorch, no limit | cuDNN heuristics | cuDNN legacy | cuDNN graph |"
        " undivided, same candidates | original | ucudnn | `adaptive` | ucudnn over undivided | no limit | spread",
        networks,
    ),
    Table(RESULTS_PAGE, " | ".join(["convolutions within 64 MiB", *STEPS]), ideas),
    Table(
        RESULTS_PAGE,
        "Caffe's AlexNet 256, 64 MiB | convolutions | over the row above | over the first",
        caffe_ideas,
    ),
    Table(
        RESULTS_PAGE,
        "a program that is tuned while it runs, `cudnn.benchmark` |"
        " PyTorch | `auto` | over PyTorch | by turns | replaced",
        tuned_programs,
    ),
    Table(
        RESULTS_PAGE,
        "a program within 64 MiB |"
        " PyTorch, no limit | within the limit | over PyTorch | by turns | replaced | peak more",
        limited_programs,
    ),
    Table(
        RESULTS_PAGE,
        "whole training step | PyTorch, no limit | undivided | micro-batched | gain | the paper's gain | spread",
        iterations,
    ),
    Table(
        "docs/cpp-caffe.md",
        "limit for each kernel | Caffe with plain cuDNN: convolutions, iteration | undivided, same candidates |"
        " `UcudnnHandle_t` | speedup over plain cuDNN",
        caffe,
    ),
    Table(
        "docs/how-it-measures.md",
        "policy | time to plan | micro-configurations measured | executed",
        policies,
    ),
    Table("docs/pytorch.md", "training step | PyTorch, no limit | 64 MiB | 16 MiB", steps),
    Table("docs/pytorch.md", " | ".join(("3-D U-Net, 4 x 1 x 128³, under a cap on memory", *CAPS.values())), caps),
    Table(
        "docs/memory.md",
        "time steps | peak of the layer, mini-batch 16: plain, this | time: plain, this |"
        " largest mini-batch: plain, this",
        attention,
    ),
    Table(
        "docs/slabs.md",
        "one sample | its workspace | within 256 MiB | within 128 MiB | smallest that keeps 90 %",
        slabs,
    ),
    Table(
        "docs/workspace-division.md",
        "convolutions | total | PyTorch, no limit | undivided, an equal limit for each |"
        " WR, an equal limit for each | WD | one workspace for all, in sequence",
        division,
    ),
    Table("docs/workspace-division.md", "kernels | divisions | ucudnn | HiGHS | GLPK", solvers),
    *(
        Table(PAPERS_PAGE, f"figure of {title} | paper | ours | why they differ", partial(papers, name))
        for name, title in PAPERS.items()
    ),
    Table(
        "docs/how-fit-works.md",
        "models of a library | trained | to the bit, within 70 / 85 / 100 / 120 % | by hooks, within 70 / 85 / 100 % |"
        " refused | too slow | failed",
        coverage,
    ),
    Table(
        PAPERS_PAGE,
        "policy | " + " | ".join(f"{step} {batch}" for step, batch in LINK_STEPS.items()),
        lambda: policy_rows(results("memory/link.json")),
    ),
    Table(
        PAPERS_PAGE,
        "step | operations for a byte, Titan X | H200 | leaves during forward, Titan X | H200",
        lambda: balance_rows(results("memory/link.json")),
    ),
)


def main() -> bool:
    """Compare or write all tables; return whether none differs."""
    parser = command_line(__doc__, __spec__.name)
    parser.add_argument("--write", action="store_true", help="write the tables into the documents")
    write, well = parser.parse_args().write, True
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
