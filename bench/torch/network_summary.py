"""The table and the picture of the cells of `bench.torch.networks`, losers first. Not a script."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import exp, fsum, log
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from bench.torch.network_order import stock_of
from ucudnn.errors import BackendUnavailableError, InvalidValueError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20
COLUMNS = (
    *("network", "form", "setting", "stock ms", "ms", "ratio", "by turns", "first s, stock", "first s"),
    *("allocated MiB", "reserved MiB", "host us", "replaced", "compared", "lost s (all steps)", "processes"),
)
TITLES = {
    "resnet50": "ResNet-50 256",
    "efficientnet_b0": "EfficientNet-B0 128",
    "regnety_032": "RegNetY-032 128",
    "convnext_tiny": "ConvNeXt-tiny 64",
    "densenet121": "DenseNet-121 64",
    "vgg16": "VGG-16 64",
    "inception_v3": "Inception-v3 64",
    "unet2d": "2-D U-Net 16, 256²",
    "unet3d": "3-D U-Net 4, 64³",
    "mobilenetv3_large_100": "MobileNetV3-large 128",
    "resnext50_32x4d": "ResNeXt-50 128",
    "hrnet_w18": "HRNet-W18 64",
}
"""Names and mini-batches of networks."""

AHEAD = ("imports", "model", "waiting")
"""Parts of a process before it has the GPU."""

_FORM_TITLES = {"nchw": "NCHW", "last": "NHWC", "bf16": "NHWC bfloat16"}
_ROW_INCHES = 0.24
_OURS, _WORSE = "#0072B2", "#D55E00"
_MOST_RATIO = 1.02  # that is promised
_WORDS_IN_A_LINE = 3  # of what a picture explains


@dataclass(frozen=True)
class Comparison:
    """The processes of a network in a form under a setting, beside those of PyTorch alone.

    Attributes:
        network: name of the network.
        form: its type and layout.
        setting: what is compared with PyTorch.
        ours: the processes under the setting.
        stock: those of PyTorch alone, with the same `cudnn.benchmark`.
    """

    network: str
    form: str
    setting: str
    ours: list[Any]
    stock: list[Any]

    @property
    def title(self) -> str:
        """Return the network and its form, as readers know them."""
        return f"{TITLES.get(self.network, self.network)}, {_FORM_TITLES.get(self.form, self.form)}"

    @property
    def settled(self) -> bool:
        """Whether nothing was tried any more in any process when it was timed."""
        return all(case.get("settled", True) for case in self.ours)

    @property
    def benchmark(self) -> bool:
        """Whether `torch.backends.cudnn.benchmark` was on."""
        return not self.setting.endswith("-off")

    @property
    def ratio(self) -> float:
        """Return the step over PyTorch's, by the medians of the processes."""
        return middle(self.ours, "step_ms") / middle(self.stock, "step_ms")

    @property
    def band(self) -> tuple[float, float] | None:
        """Return the fastest and the slowest process of PyTorch over their median; None if there was one process."""
        steps = [case["step_ms"] for case in self.stock]
        return None if len(steps) < 2 else (min(steps) / median(steps), max(steps) / median(steps))

    @property
    def by_turns(self) -> tuple[float, float, float] | None:
        """Return the lower quartile, the median and the upper quartile of the step over PyTorch's, by turns.

        They are of the last process that took turns; None if none did. They tell more than processes do where the host
        bounds a step, because hosts are faster at times.
        """
        turns = [each for each in self._turns if "step" in each]
        if not turns:
            return None
        low, high = turns[-1]["step_quartiles"]
        return low, turns[-1]["step"], high

    @property
    def _turns(self) -> list[Any]:
        """Return what the processes that took turns found."""
        return [case["by_turns"] for case in self.ours if case.get("by_turns")]

    def more_bytes(self, kind: str) -> int:
        """Return how much higher the highest peak is than PyTorch's highest one, in bytes."""
        ours, stock = (max(case["peaks"].get(kind, 0) for case in group) for group in (self.ours, self.stock))
        return int(ours - stock)

    @property
    def first(self) -> list[Any]:
        """Return the processes that began with an empty database; those whose database is not known count as such."""
        return [case for case in self.ours if case.get("database") != "kept"]

    @property
    def first_step_s(self) -> float | None:
        """Return the median of first steps in seconds, with an empty database; None if none began with one."""
        return middle(self.first, "first_step_s") if self.first else None

    @property
    def host_us(self) -> float:
        """Return the microseconds that a step takes the host longer, for each of its convolutions and gradients.

        Where a process has compared that by turns, its median counts, because the hosts of processes differ by more.
        """
        if self._turns:
            return float(median(each["over_us"] for each in self._turns))
        kernels = self.ours[-1].get("kernels")
        longer_ms = middle(self.ours, "host_ms") - middle(self.stock, "host_ms")
        return longer_ms / kernels * 1e3 if kernels else float("nan")

    @property
    def replaced(self) -> str:
        """Return how many kernels ucudnn computes, and how many of them in micro-batches."""
        kernels = self._kernels
        divided = sum(kernel["parts"] > 1 for kernel in kernels)
        return f"{len(kernels)} ({divided} divided) of {self._tuned.get('seen', 0)}"

    @property
    def replaces(self) -> bool:
        """Whether ucudnn computes any kernel; otherwise the ratio is how far processes differ."""
        return bool(self._kernels)

    @property
    def compared(self) -> float:
        """Return what the last comparison of steps in the program has found."""
        return float(self._tuned.get("gain") or 0)

    @property
    def lost(self) -> str:
        """Return the seconds that trials lost, with an empty database, and the seconds of tuning.

        In brackets is by how much all steps of tuning were longer than the program's own. More than the first number
        means that trials cost more than they count, or that the program has become faster meanwhile.
        """
        if not self.first:
            return ""
        case = self.first[-1]
        tuned: Any = (case.get("tuned") or [{}])[0]
        own_ms = tuned.get("step_ms") or 0
        all_ms = (case["tuning_mean_ms"] - own_ms) * case["tuning_steps"] if own_ms else 0
        return f"{tuned.get('lost_seconds', 0):.2f} ({all_ms / 1e3:.2f}) of {case['tuning_s']:.0f}"

    @property
    def _kernels(self) -> list[Any]:
        found: list[Any] = self._tuned.get("kernels", [])
        return found

    @property
    def _tuned(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = (self.ours[-1].get("tuned") or [{}])[0]
        return found


def comparisons(cases: Mapping[str, Any]) -> list[Comparison]:
    """Return each network, form and setting that is measured beside PyTorch, the largest ratio first.

    Processes on one kind of GPU are compared, never those on different ones.
    """
    groups: dict[tuple[str, str, str, str], list[Any]] = {}
    for name, case in cases.items():
        if "error" not in case:
            network, form, setting, _ = name.split()
            groups.setdefault((network, form, setting, kind_of(case)), []).append(case)
    found = []
    for (network, form, setting, kind), group in groups.items():
        base = groups.get((network, form, stock_of(setting), kind))
        if base is not None and not setting.startswith("stock"):
            found.append(Comparison(network, form, setting, group, base))
    return sorted(found, key=lambda each: (-each.ratio, each.network, each.form, each.setting))


def kind_of(case: Mapping[str, Any]) -> str:
    """Return the name of the GPU on which a process ran; '' if that was the CPU."""
    return str(case.get("conditions", {}).get("device", ""))


def promised(cases: Mapping[str, Any]) -> list[Comparison]:
    """Return the comparisons of `enable()` without arguments, the largest ratio first."""
    return [each for each in comparisons(cases) if each.setting in ("auto", "auto-off")]


def middle(group: list[Any], field: str) -> float:
    """Return the median of a field over processes."""
    return float(median(case[field] for case in group))


def by_setting(found: Iterable[Comparison]) -> dict[str, list[Comparison]]:
    """Return comparisons by their settings, which promise different things."""
    settings: dict[str, list[Comparison]] = {}
    for each in found:
        settings.setdefault(each.setting, []).append(each)
    return dict(sorted(settings.items()))


def geometric_mean(found: Collection[Comparison]) -> float:
    """Return the geometric mean of ratios."""
    return exp(fsum(log(each.ratio) for each in found) / len(found))


def rows(cases: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each network, form and setting, losers first."""
    for each in comparisons(cases):
        first = "" if each.first_step_s is None else f"{each.first_step_s:.1f}"
        turns = "" if each.by_turns is None else _spread(*each.by_turns)
        cells = (
            *(each.network, each.form, each.setting),
            *(f"{middle(each.stock, 'step_ms'):.2f}", f"{middle(each.ours, 'step_ms'):.2f}", f"{each.ratio:.3f}"),
            *(turns, f"{middle(each.stock, 'first_step_s'):.1f}", first),
            *(f"{each.more_bytes(kind) / MIB:+.0f}" for kind in ("allocated", "reserved")),
            *(f"{each.host_us:+.1f}", each.replaced, f"{each.compared:.3f}", each.lost),
            f"{len(each.stock)}, {len(each.ours)}",
        )
        yield f"| {' | '.join(cells)} |"


def _spread(low: float, middle: float, high: float) -> str:
    return f"{middle:.3f} ({low:.2f} to {high:.2f})"


def show(cases: Mapping[str, Any], void: Mapping[str, Collection[str]]) -> None:
    """Print the table, the mean of each setting, the errors, and the cells whose code has changed since, with files."""
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
    print("\n".join(rows(cases)))
    for setting, found in by_setting(comparisons(cases)).items():
        print(f"{setting}: geometric mean {geometric_mean(found):.4f} of {len(found)} cells")
    for name, case in cases.items():
        if "error" in case:
            print(f"{name}: {case['error']}")
    print("\n".join(spent(cases)))
    kinds = Counter(filter(None, map(kind_of, cases.values())))
    if len(kinds) > 1:
        told = ", ".join(f"{count} on {kind}" for kind, count in kinds.most_common())
        print(f"not compared with each other: cells {told}")
    if void:
        print(f"void, because code has changed since: {', '.join(sorted(void))}")
        print(f"changed: {', '.join(sorted({part for parts in void.values() for part in parts}))}")


def spent(cases: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each setting with the mean seconds that parts of its processes took while they had the GPU."""
    groups: dict[str, list[Any]] = {}
    for name, case in cases.items():
        if "spent_s" in case:
            groups.setdefault(name.split()[2], []).append(case)
    for setting, group in sorted(groups.items()):
        parts = {part: None for case in group for part in case["spent_s"] if part not in AHEAD}
        mean = {part: fmean(case["spent_s"].get(part, 0) for case in group) for part in parts}
        process = fmean(case["process_s"] for case in group)
        told = "".join(f"{part} {seconds:.1f}, " for part, seconds in mean.items())
        yield f"{setting}: seconds of a process {process:.1f}: {told}the rest {process - fsum(mean.values()):.1f}"


def draw(cases: Mapping[str, Any], path: Path) -> None:
    """Draw the ratio of each network and form as a point, and the spread of PyTorch's processes as a band.

    A cross is the ratio by turns in one process, where processes do not differ by their hosts.

    Args:
        cases: what is kept.
        path: file to write, in the format of its suffix.

    Raises:
        BackendUnavailableError: if matplotlib is not installed.
        InvalidValueError: if there is nothing to draw.
    """
    found = promised(cases)
    if not found:
        raise InvalidValueError(f"{path}: there is nothing to draw")
    try:
        _figure(found).savefig(path)
    except ImportError as error:
        raise BackendUnavailableError("pictures need matplotlib: pip install 'ucudnn[plot]'") from error


def _figure(found: list[Comparison]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 1.2 + _ROW_INCHES * len(found)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for row, each in enumerate(found):
        low, high = each.band or (1.0, 1.0)
        axes.fill_betweenx([row - 0.4, row + 0.4], low, high, color="#BBBBBB", linewidth=0)
        color = _WORSE if _is_worse(each) else _OURS
        base = middle(each.stock, "step_ms")
        axes.plot([case["step_ms"] / base for case in each.ours], [row] * len(each.ours), ".", color=color, alpha=0.4)
        inside = color if each.replaces else "white"
        axes.plot([each.ratio], [row], "o", color=color, markerfacecolor=inside, markersize=5)
        if each.by_turns is not None:
            axes.plot([each.by_turns[1]], [row], "x", color="#333333", markersize=4)
    axes.axvline(1.0, color="#333333", linewidth=0.8)
    names = [f"{each.title}{'' if each.benchmark else ', no cudnn.benchmark'}" for each in found]
    axes.set_yticks(range(len(found)), names, fontsize=7)
    axes.invert_yaxis()
    figure.supxlabel(_explanation(found), fontsize=8)
    return figure


def _is_worse(each: Comparison) -> bool:
    """Whether it takes longer than is promised: more than 1.02 of PyTorch's time and than PyTorch's slowest process."""
    return each.ratio > max(_MOST_RATIO, (each.band or (1.0, 1.0))[1])


def _explanation(found: list[Comparison]) -> str:
    """Return what the picture shows, without what is not in it."""
    words = {
        "grey: PyTorch's own processes": any(each.band for each in found),
        "small points: single processes": any(len(each.ours) > 1 for each in found),
        "crosses: by turns in one process": any(each.by_turns for each in found),
        "hollow: no kernel was replaced": not all(each.replaces for each in found),
        f"orange: above {_MOST_RATIO} and above the grey": any(map(_is_worse, found)),
    }
    told = ["time of a step over PyTorch's", *(each for each, there in words.items() if there)]
    return "\n".join("; ".join(told[at : at + _WORDS_IN_A_LINE]) for at in range(0, len(told), _WORDS_IN_A_LINE))
