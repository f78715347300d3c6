"""What rivals have found: a table of all cells, the front of each rival, rows for documents, and pictures."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ucudnn.plots import draw_front
from ucudnn.units import format_bytes

EAGER, CHECKPOINT, SAVE_ON_CPU, COMPILE = "eager", "checkpoint", "save_on_cpu", "compile"
OFFLOAD, RATIO, ACCUMULATE = "compile-offload", "compile-budget", "accumulate"
WITHIN = OURS, DIVIDED, COMPILED = "ours", "ours-divided", "ours-compiled"
UNBOUNDED = "ours-compiled-unbounded"
FITTED = (*WITHIN, UNBOUNDED)
_WITH_SETTINGS = (RATIO, ACCUMULATE, OFFLOAD, *WITHIN)
TITLES = {
    EAGER: "eager PyTorch",
    CHECKPOINT: "`checkpoint` of each block",
    SAVE_ON_CPU: "`save_on_cpu`",
    ACCUMULATE: "gradient accumulation",
    COMPILE: "`torch.compile`",
    RATIO: "`activation_memory_budget`",
    OFFLOAD: "compiled activation offloading",
    OURS: "`fit`",
    DIVIDED: "`fit(divide=True)`",
    COMPILED: "`fit(compile=True)`",
    UNBOUNDED: "`fit(compile=True)` without a budget",
}
NETWORKS = {
    "resnet50_last": "ResNet-50 256, NHWC",
    "unet2d_256": "2-D U-Net 16, 256²",
    "gpt2_medium": "GPT-2 medium 8, bfloat16",
    "unet3d_instance": "3-D U-Net 4, 128³, instance norm",
    "unet3d": "3-D U-Net 4, 128³, batch norm",
    "vnet": "V-Net 2, 128³",
    "vgg16_bn": "VGG-16 64, batch norm",
    "efficientnet_v2_s": "EfficientNetV2-S 64, 300², NHWC",
}
SHARES = (1.0, 0.7, 0.5, 0.4, 0.3)
"""Most bytes of tensors in the columns of the documents, as shares of eager's."""
COLUMNS = ["within eager's peak", *(f"{share:.0%}".replace("%", " %") for share in SHARES[1:]), "least peak"]

WAYS = [TITLES[each] for each in (SAVE_ON_CPU, ACCUMULATE, CHECKPOINT, RATIO, OURS, COMPILED)]
"""Ways to train in less memory that README compares."""


class Cell(NamedTuple):
    """A rival with one setting: a share of eager's memory, a ratio of `activation_memory_budget`, a number of parts."""

    network: str
    rival: str
    setting: float = 0.0

    def __str__(self) -> str:
        """Return the name under which the cell is kept."""
        return f"{self.network} {self.rival}{f' {self.setting:g}' if self.rival in _WITH_SETTINGS else ''}"


Cases = Mapping[str, Mapping[str, Any]]


def of_network(cases: Cases, network: str) -> dict[str, list[Mapping[str, Any]]]:
    """Return the cells of a network, by rival."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for case in cases.values():
        if case["network"] == network:
            found.setdefault(case["rival"], []).append(case)
    return found


def front(cells: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the cells that no other one beats in both peak and time, the largest peak first."""
    found: list[Mapping[str, Any]] = []
    ran = [each for each in cells if "step_ms" in each]
    for each in sorted(ran, key=lambda each: (each["allocated"], each["step_ms"])):
        if not found or each["step_ms"] < found[-1]["step_ms"]:
            found.append(each)
    return found[::-1]


def lines(cases: Cases, network: str) -> Iterator[list[str]]:
    """Yield a row for each cell of a network, losers first: those that failed, then the slowest."""
    base = cases.get(str(Cell(network, EAGER)), {})
    every = [each for cells in of_network(cases, network).values() for each in cells]
    for each in sorted(every, key=lambda each: ("step_ms" in each, -each.get("step_ms", 0.0))):
        name = str(Cell(network, each["rival"], each["setting"]))
        if "step_ms" not in each:
            yield [name, "", "", "", "", "", each["reason"]]
            continue
        shares = {what: f" {each[what] / base[what]:.0%}" if what in base else "" for what in ("allocated", "process")}
        sizes = [format_bytes(each[what]) + share for what, share in shares.items()]
        over = f"{each['step_ms'] / base['step_ms']:.3f}" if "step_ms" in base else ""
        spread = f"{each['fastest_ms']:.1f} to {each['slowest_ms']:.1f}"
        note = [each.get("policy", ""), *(f"{key} {begun:.1f} s" for key, begun in each.get("begun_s", {}).items())]
        note += ["over its budget"] if each["process"] > (each.get("budget") or each["process"]) else []
        yield [name, f"{each['step_ms']:.1f} ms", over, spread, *sizes, " ".join(note)]


HEADINGS = ["rival of one step", "step", "over eager", "spread", "peak", "process", ""]


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    """Print a table in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(each.ljust(width) for each, width in zip(row, widths, strict=True)).rstrip())


def fronts(cases: Cases) -> Iterator[list[str]]:
    """Yield rows for the documents: the least time of each rival within shares of eager's peak, losers first."""
    for network, title in NETWORKS.items():
        found = of_network(cases, network)
        base = next((each for each in found.get(EAGER, ()) if "step_ms" in each), None)
        if base is None:
            continue
        rows = []
        for rival, cells in found.items():
            ran = front(cells)
            if not ran:  # it cannot train this network, such as gradient accumulation with batch normalization
                continue
            times = [
                min((each["step_ms"] for each in ran if each["allocated"] <= share * base["allocated"]), default=None)
                for share in SHARES
            ]
            ratios = ["–" if each is None else f"{each / base['step_ms']:.2f}" for each in times]
            if rival == EAGER:
                ratios[0] = f"{base['step_ms']:.1f} ms, {base['allocated'] / 2**30:.1f} GiB"
            least = f"{min(each['allocated'] for each in ran) / base['allocated']:.0%}"
            rank = [each is None for each in times][::-1], times[0] or 0.0
            rows.append((rank, [f"{title}: {TITLES[rival]}", *ratios, least.replace("%", " %")]))
        yield from (row for _, row in sorted(rows, key=lambda each: each[0], reverse=True))


def within(cases: Cases) -> Iterator[list[str]]:
    """Yield the least times of `WAYS` over eager's, for each network at two shares where one of them runs."""
    found: dict[str, dict[str, str]] = {}
    for named, *ratios in fronts(cases):
        network, way = named.split(": ")
        for column, ratio in [*zip(COLUMNS, ratios, strict=True)][1:3]:
            found.setdefault(f"{column} of eager's: {network}", {})[way] = ratio
    rows = ([title, *(each.get(way, "–") for way in WAYS)] for title, each in found.items())
    yield from (row for row in rows if {*row[1:]} != {"–"})


def draw(cases: Cases, network: str, path: Path) -> None:
    """Draw time against peak, with a line for the front of each rival; errors are those of `ucudnn.plots`."""
    found = of_network(cases, network)
    found.setdefault(COMPILE, []).extend(found.pop(RATIO, []))  # without a budget the ratio is 1
    drawn = {rival: [(each["allocated"], each["step_ms"]) for each in front(cells)] for rival, cells in found.items()}
    draw_front(drawn, path, (), f"{NETWORKS.get(network, network)}: time of a training step by measured peak")
