"""Rows of `bench.torch.networks` beside those of PyTorch alone, and their picture. Not a script."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import exp, fsum, log
from pathlib import Path
from statistics import median
from typing import Any

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

_FORMS = {"nchw": "NCHW", "last": "NHWC", "bf16": "NHWC bfloat16"}
_ROW_INCHES = 0.24
_OURS, _WORSE = "#0072B2", "#D55E00"


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
        return f"{TITLES.get(self.network, self.network)}, {_FORMS.get(self.form, self.form)}"

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
    def slowest_stock(self) -> float:
        """Return the slowest process of PyTorch over their median."""
        return max(case["step_ms"] for case in self.stock) / middle(self.stock, "step_ms")

    @property
    def by_turns(self) -> float | None:
        """Return the step over PyTorch's by turns in the last process that took them; None if none did.

        That tells more than processes do where the host bounds a step, because hosts are faster at times.
        """
        turns = [case["by_turns"]["step"] for case in self.ours if "step" in (case.get("by_turns") or {})]
        return turns[-1] if turns else None

    def more_bytes(self, kind: str) -> int:
        """Return how much higher the highest peak is than PyTorch's highest one, in bytes."""
        ours, stock = (max(case["peaks"].get(kind, 0) for case in group) for group in (self.ours, self.stock))
        return int(ours - stock)

    @property
    def first_step_s(self) -> float | None:
        """Return the median of first steps in seconds; None if all began with a database of an earlier process."""
        first = [case for case in self.ours if case.get("database") != "kept"]
        return middle(first, "first_step_s") if first else None

    @property
    def replaced(self) -> str:
        """Return how many kernels ucudnn computes, and how many of them in micro-batches."""
        tuned: Mapping[str, Any] = (self.ours[-1].get("tuned") or [{}])[0]
        kernels = tuned.get("kernels", [])
        divided = sum(each["parts"] > 1 for each in kernels)
        return f"{len(kernels)} of {tuned.get('seen', 0)}{f', {divided} divided' if divided else ''}"


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
        base = groups.get((network, form, f"stock{'-off' * setting.endswith('-off')}", kind))
        if base is not None and not setting.startswith("stock"):
            found.append(Comparison(network, form, setting, group, base))
    return sorted(found, key=lambda each: (-each.ratio, each.network, each.form, each.setting))


def kind_of(case: Mapping[str, Any]) -> str:
    """Return the name of the GPU on which a process ran; '' if that was the CPU."""
    return str(case.get("conditions", {}).get("device", ""))


def middle(group: list[Any], field: str) -> float:
    """Return the median of a field over processes."""
    return float(median(case[field] for case in group))


def geometric_mean(found: Collection[Comparison]) -> float:
    """Return the geometric mean of ratios."""
    return exp(fsum(log(each.ratio) for each in found) / len(found))


def draw(cases: Mapping[str, Any], path: Path) -> None:
    """Draw the ratio of each network and form under `auto`, and the spread of PyTorch's own processes as a band.

    Args:
        cases: what is kept.
        path: file to write, in the format of its suffix.
    """
    from matplotlib.figure import Figure

    found = [each for each in comparisons(cases) if each.setting in ("auto", "auto-off")]
    figure = Figure(figsize=(7.0, 1.2 + _ROW_INCHES * len(found)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for row, each in enumerate(found):
        base = middle(each.stock, "step_ms")
        stock, ours = ([case["step_ms"] / base for case in group] for group in (each.stock, each.ours))
        axes.fill_betweenx([row - 0.4, row + 0.4], min(stock), max(stock), color="#BBBBBB", linewidth=0)
        color = _WORSE if each.ratio > max(1.02, each.slowest_stock) else _OURS
        axes.plot(ours, [row] * len(ours), ".", color=color, alpha=0.4)
        inside = "white" if each.replaced.startswith("0 ") else color
        axes.plot([each.ratio], [row], "o", color=color, markerfacecolor=inside, markersize=5)
    axes.axvline(1.0, color="#333333", linewidth=0.8)
    names = [f"{each.title}{'' if each.benchmark else ', no cudnn.benchmark'}" for each in found]
    axes.set_yticks(range(len(found)), names, fontsize=7)
    axes.invert_yaxis()
    told = "time of a step over PyTorch's; grey: PyTorch's own processes; small points: single processes\n"
    figure.supxlabel(f"{told}hollow: no kernel was replaced; orange: above 1.02 and above the grey", fontsize=8)
    figure.savefig(path)
