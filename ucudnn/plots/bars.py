"""Pictures with bars: stacks of layers, groups of bars, and rows of micro-batches (paper, figures 1 and 9 to 13)."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise, repeat
from math import fsum
from typing import TYPE_CHECKING

from ucudnn.configuration import Configuration
from ucudnn.plots.style import (
    DARK,
    MIB,
    Look,
    add_legend,
    bar_pieces,
    beside_labels,
    looks_of,
    new_figure,
    shaded,
)
from ucudnn.units import format_ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ucudnn.reporting.kernel_report import KernelReport
    from ucudnn.reporting.report import Report

Bar = tuple[str, "Report"]
"""A label, which may have several lines, and the report whose bar stands above it."""

_OPERATIONS = {"Forward": "", "BackwardData": "/////", "BackwardFilter": "....."}
_MOST_LAYERS = 8
_MANY_LAYERS = 24
_MANY_BARS = 12  # with more bars, the numbers above them are short
_LEAST_LAYER = 0.02  # of the tallest bar: with more layers than _MOST_LAYERS, a smaller layer is joined with others
_LEAST_PIECE = 0.01  # of the tallest bar: a smaller piece is not hatched
_HALF_BAR = 0.4  # half the width of a bar, which is matplotlib's default

_Stack = dict[tuple[str, str], float]
"""The heights of pieces by layer and operation, in network order; '' stands for several that are joined."""


def _stacks(bars: Sequence[Bar], fields: Iterable[str], unit: float = 1.0) -> list[_Stack]:
    """Return the stack of each report: the sum of a field over all kernels of a layer and operation."""
    names, stacks = _names(bars), list[_Stack]()
    for (_, report), field in zip(bars, fields, strict=True):
        stack: _Stack = {}
        for kernel in report.kernels:
            key = names[_layer(kernel)], kernel.operation
            stack[key] = stack.get(key, 0.0) + getattr(kernel, field) * kernel.count / unit
        stacks.append(stack)
    return stacks


def _layer(kernel: "KernelReport") -> str:
    return kernel.layer or kernel.problem.removeprefix(kernel.operation).strip()


def _names(bars: Sequence[Bar]) -> dict[str, str]:
    """Return the names of pieces by layer, such as 'conv2 ×3' for three layers of one shape.

    If there are many layers, their modules give the names: 'Mixed_5b' for 'Mixed_5b.branch1x1'. The modules are the
    outermost ones that differ.
    """
    counts: dict[str, int] = {}
    for _, report in bars:
        alike = Counter[tuple[str, str]]()
        for kernel in report.kernels:
            alike[_layer(kernel), kernel.operation] += kernel.count
        for (layer, _), count in alike.items():
            counts[layer] = max(count, counts.get(layer, 1))
    if len(counts) > _MANY_LAYERS:
        for depth in range(1, max(layer.count(".") for layer in counts) + 1):
            modules = {layer: ".".join(layer.split(".")[:depth]) for layer in counts}
            if len({*modules.values()}) > 1:
                return modules
    return {layer: f"{layer} ×{count}" if count > 1 else layer for layer, count in counts.items()}


def _largest_layers(panels: Sequence[Sequence[_Stack]], least: float = 0.0) -> list[str]:
    """Return the layers that are drawn apart, in network order.

    Args:
        panels: the stacks of each picture in the figure.
        least: of the tallest stack of a picture; a layer that is smaller in all pictures is joined with others.
    """
    most: dict[str, float] = {}
    for stacks in panels:
        for stack in stacks:
            for layer in dict.fromkeys(layer for layer, _ in stack):
                share = fsum(each for key, each in stack.items() if key[0] == layer) / (_tallest(stacks) or 1.0)
                most[layer] = max(most.get(layer, 0.0), share)
    largest = {*sorted(most, key=lambda layer: -most[layer])[:_MOST_LAYERS]}
    return [layer for layer in most if layer in largest and most[layer] >= least and most[layer]]


def _joined(stacks: Sequence[_Stack], layers: Sequence[str]) -> list[_Stack]:
    joined = []
    for stack in stacks:
        kept = {key: each for key, each in stack.items() if key[0] in layers}
        rest = fsum(each for key, each in stack.items() if key not in kept)
        joined.append({**kept, ("", ""): rest} if rest else kept)
    return joined


def _tallest(stacks: Iterable[_Stack]) -> float:
    return max(fsum(stack.values()) for stack in stacks)


def layers_figure(bars: Sequence[Bar], title: str = "") -> "Figure":
    """Draw the milliseconds of each layer and operation as a piece of a stack, with a stack for each report.

    Times are executed ones if a report has them, and else predicted ones. A kernel counts as often as it occurs.

    Args:
        bars: labels and reports; bars whose labels begin with the same line stand together.
        title: stands above the picture.
    """
    figure, axes = new_figure(title)
    stacks, kind = _times(bars)
    many = len({layer for stack in stacks for layer, _ in stack}) > _MOST_LAYERS
    layers = _largest_layers([stacks], _LEAST_LAYER if many else 0.0)
    _draw_stacks(figure, axes, bars, _joined(stacks, layers), layers, f"{kind} time in ms")
    _name_operations(figure, stacks)
    return figure


def division_figure(
    bars: Sequence[Bar], title: str = "", *, times: bool = True, shared: Collection[str] = ()
) -> "Figure":
    """Draw the workspace of each layer and operation in MiB (paper, figure 13), and what it buys; see `layers_figure`.

    Args:
        bars: labels and reports.
        title: stands above the picture.
        times: whether the milliseconds are drawn above the workspace, so that layers without workspace are seen, too.
        shared: labels of bars whose kernels have one workspace in turn, of which the largest is drawn.
    """
    workspace = _stacks(bars, repeat("workspace_bytes", len(bars)), MIB)
    for (label, report), stack in zip(bars, workspace, strict=True):
        if label in shared:
            most = max(report.kernels, key=lambda kernel: kernel.workspace_bytes)
            stack.clear()
            stack[_names(bars)[_layer(most)], most.operation] = most.workspace_bytes / MIB
    panels = [(workspace, "workspace in MiB")]
    if times:
        stacks, kind = _times(bars)
        panels.insert(0, (stacks, f"{kind} time in ms"))
    tall = len(bars) > _MANY_BARS  # their labels stand upright
    figure, first = new_figure(title, (8.0 if tall else 6.0) if times else 4.0)
    first.remove()
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    layers = _largest_layers([stacks for stacks, _ in panels])
    for place, (stacks, ylabel) in zip(axes, panels, strict=True):
        _draw_stacks(figure, place, bars, _joined(stacks, layers), layers, ylabel)
    _name_operations(figure, workspace)
    return figure


def _times(bars: Sequence[Bar]) -> tuple[list[_Stack], str]:
    stacks = _stacks(bars, ["executed_ms" if report.executed else "micro_batched_ms" for _, report in bars])
    return stacks, " or ".join(sorted({"executed" if report.executed else "predicted" for _, report in bars}))


def _draw_stacks(
    figure: "Figure",
    axes: "Axes",
    bars: Sequence[Bar],
    stacks: Sequence[_Stack],
    layers: Sequence[str],
    ylabel: str,
) -> None:
    looks = dict(zip(layers, shaded(layers), strict=True))
    looks[""] = Look("other layers", "#b8b8b8")
    labels, tallest = [label for label, _ in bars], _tallest(stacks)
    places = _places(labels)
    for place, stack in zip(places, stacks, strict=True):
        bottom = 0.0
        for (layer, operation), amount in stack.items():
            style = looks[layer].of() | {"hatch": _OPERATIONS.get(operation, "")}
            if amount < _LEAST_PIECE * tallest:
                style |= {"hatch": "", "linewidth": 0.0}  # hatching and edges would hide it
            axes.bar(place, amount, bottom=bottom, **style)
            bottom += amount
        short = bottom >= 100 or (len(bars) > _MANY_BARS and bottom >= 10)
        total = f"{bottom:.0f}" if short else f"{bottom:.3g}"
        axes.text(place, bottom, total, ha="center", va="bottom", size=8.5 if len(bars) <= _MANY_BARS else 7)
    _finish_bars(figure, axes, places, labels, ylabel)
    _name_layers(figure, axes, stacks, looks, places)


def _name_layers(
    figure: "Figure", axes: "Axes", stacks: Sequence[_Stack], looks: Mapping[str, Look], places: Sequence[float]
) -> None:
    """Write the names of layers beside the last stack.

    Where it lacks some, as with branches, they stand in a legend, with numbers that stand in the pieces, too, because
    shades that do not touch are hard to tell apart.
    """
    there = [layer for layer in looks if any(layer == other for stack in stacks for other, _ in stack)]
    if {*there} != {layer for layer, _ in stacks[-1]}:
        numbers = {layer: str(number) for number, layer in enumerate((each for each in there if each), 1)}
        labels = [f"{numbers.get(layer, '')} {looks[layer].label}".strip() for layer in there]
        named = [replace(looks[layer], label=name) for layer, name in zip(there, labels, strict=True)]
        add_legend(figure, named[::-1], "outside right center")
        figure.draw_without_rendering()
        for place, stack in zip(places, stacks, strict=True):
            _number_pieces(axes, place, stack, numbers)
        return
    edges: dict[str, list[float]] = {}
    top = 0.0
    for (layer, _), amount in stacks[-1].items():
        edges.setdefault(layer, []).extend((top, top + amount))
        top += amount
    names = [((min(edges[layer]) + max(edges[layer])) / 2, looks[layer].label, looks[layer].color) for layer in there]
    beside_labels(figure, axes, places[-1] + _HALF_BAR, names)


def _number_pieces(axes: "Axes", place: float, stack: _Stack, numbers: Mapping[str, str]) -> None:
    """Write the number of its layer into each piece of a stack that has room for it."""
    bottom = 0.0
    for (layer, _), amount in stack.items():
        plate = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # hides the hatching behind the text
        middle = bottom + amount / 2
        written = axes.text(place, middle, numbers.get(layer, ""), ha="center", va="center", size=6.5, bbox=plate)
        (_, low), (_, high) = axes.transData.transform([(place, bottom), (place, bottom + amount)])
        if written.get_window_extent().height + 4 > high - low:
            written.remove()
        bottom += amount


def _name_operations(figure: "Figure", stacks: Sequence[_Stack]) -> None:
    there = {operation for stack in stacks for _, operation in stack}
    hatched = [Look(name, "#666666", hatch) for name, hatch in _OPERATIONS.items() if name in there]
    add_legend(figure, hatched, "outside lower center", 3)


def groups_figure(
    labels: Sequence[str], series: Mapping[str, Sequence[float | None]], ylabel: str, title: str = ""
) -> "Figure":
    """Draw groups of bars side by side (paper, figure 1).

    Args:
        labels: a label for each group.
        series: heights by the name of a series, one for each label; None for no bar.
        ylabel: names the heights and their unit.
        title: stands above the picture.
    """
    figure, axes = new_figure(title)
    looks, places, width = shaded([*series]), _places(labels), 0.8 / len(series)
    for index, (look, heights) in enumerate(zip(looks, series.values(), strict=True)):
        for place, height in zip(places, heights, strict=True):
            if height is not None:
                axes.bar(place + (index + 0.5) * width - 0.4, height, width, **look.of())
    add_legend(figure, looks, "outside lower center", 4)
    _finish_bars(figure, axes, places, labels, ylabel)
    return figure


def _places(labels: Sequence[str]) -> list[float]:
    """Return the places of bars; bars whose labels begin with the same line stand closer together."""
    heads = [label.partition("\n")[0] for label in labels]
    return [*accumulate((0.9 if before == head else 1.2 for before, head in pairwise(heads)), initial=0.0)]


def _finish_bars(figure: "Figure", axes: "Axes", places: Sequence[float], labels: Sequence[str], ylabel: str) -> None:
    """Set limits and labels; a first line that several labels share is written once, below the others."""
    heads, tails = zip(*[label.partition("\n")[::2] for label in labels], strict=True)
    shared = all(tails) and len({*heads}) < len(heads)
    axes.set_xticks(places, tails if shared else labels)
    axes.tick_params(axis="x", which="both", length=0)
    axes.set(ylabel=ylabel, xlim=(-0.6, places[-1] + 0.6), ylim=(0, 1.08 * max(0.0, axes.dataLim.y1) or 1.0))
    figure.draw_without_rendering()  # only then are the sizes of texts known
    extents = [label.get_window_extent() for label in axes.get_xticklabels()]
    upright = any(left.x1 + 4 > right.x0 for left, right in pairwise(extents))
    if upright:
        axes.set_xticks(places, [label.get_text().replace("\n", " ") for label in axes.get_xticklabels()], rotation=90)
    if shared:
        groups = [[*each] for _, each in groupby(zip(heads, places, strict=True), key=lambda each: each[0])]
        centers = [(each[0][1] + each[-1][1]) / 2 for each in groups]
        axes.xaxis.remove_overlapping_locs = False
        axes.set_xticks(centers, [each[0][0] for each in groups], minor=True)
        depth = max(extent.width if upright else extent.height for extent in extents) * 72 / figure.dpi
        axes.tick_params(axis="x", which="minor", pad=depth + 7)


def configurations_figure(
    rows: Sequence[tuple[str, Configuration]], title: str = "", kind: str = "predicted"
) -> "Figure":
    """Draw the milliseconds of configurations as rows, with a piece for each micro-batch (paper, figure 9)."""
    figure, axes = new_figure(title, max(2.2, 1.3 + 0.42 * len(rows)))
    looks = looks_of(configuration for _, configuration in rows)
    for row, (_, configuration) in enumerate(rows):
        left = 0.0
        pieces = bar_pieces(configuration)
        for piece in pieces:
            axes.barh(row, piece.time_ms, left=left, **looks[piece.algorithm].of(len(pieces)))
            left += piece.time_ms
        axes.annotate(format_ms(left), (left, row), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.set(
        xlabel=f"{kind} time in ms",
        ylim=(len(rows) - 0.4, -0.6),
        xlim=(0, max(configuration.time_ms for _, configuration in rows) * 1.12),
    )
    add_legend(figure, looks.values(), "outside lower center", 4)
    figure.draw_without_rendering()
    for row, (_, configuration) in enumerate(rows):
        left = 0.0
        for (text, algorithm), alike in groupby(
            bar_pieces(configuration), key=lambda each: (each.text, each.algorithm)
        ):
            times = [piece.time_ms for piece in alike]
            edges = [left + fsum(times[:index]) for index in range(len(times) + 1)]
            color, left = looks[algorithm].color, edges[-1]
            if not all(_inscribe(axes, row, *ends, text, color) for ends in pairwise(edges)):
                _inscribe(axes, row, edges[0], left, f"{len(times)}×{text}", color)
    return figure


def _inscribe(axes: "Axes", row: int, left: float, right: float, text: str, color: str) -> bool:
    """Write a text into a piece if there is room, and return whether there is."""
    ink = "white" if color in DARK else "black"
    plate = {"facecolor": color, "edgecolor": "none", "pad": 0.6}  # hides the hatching behind the text
    written = axes.text((left + right) / 2, row, text, ha="center", va="center", color=ink, bbox=plate)
    (start, _), (end, _) = axes.transData.transform([(left, row), (right, row)])
    fits = bool(written.get_window_extent().width + 7 <= end - start)
    if not fits:
        written.remove()
    return fits
