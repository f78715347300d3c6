"""Pictures of a training step: memory by owner, time against peak, and the queues and addresses of one plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

from ucudnn.plots.style import GIB, Look, add_legend, draw_marks, draw_phases, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STAYING = ("#333333", "#6b6b6b", "#9a9a9a", "#c4c4c4")  # what is there during the whole step, at the bottom
_LAYERS = ("#08306b", "#2171b5", "#6baed6", "#9ecae1", "#c6dbef")  # what is saved, by layer
_REST = ("#009E73", "#E69F00", "#D55E00", "#CC79A7")  # what comes and goes
_FAMILIES = ("#333333", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9")  # one for each kind of policy
_SHAPES = "osD^vP*X<>"  # of one color
_MOST_NAMED = 7  # policies in a picture, beyond which some have neither a color nor a name
_SAME = 1.001  # times the time of a plan that is as fast
_LOG = 3  # ratio of times beyond which their scale is logarithmic
_LEAST_NAMED = 0.008  # of the height: a thinner band has no name


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPicture:
    """What is drawn of the memory of a step.

    Attributes:
        times_ms: when each operation begins, and the end of the last one.
        staying: bytes during each operation of what is there during the whole step, by owner.
        saved: bytes of what is saved for backward, by layer.
        rest: bytes of what comes and goes.
        marks: lines across the picture: text and bytes.
        peak: text of the peak.
        phases: names of the parts of the step and when they begin, in milliseconds.
    """

    times_ms: Sequence[float]
    staying: Mapping[str, Sequence[int]]
    saved: Mapping[str, Sequence[int]]
    rest: Mapping[str, Sequence[int]]
    marks: Sequence[tuple[str, int]]
    peak: str
    phases: Sequence[tuple[str, float]]

    def __bool__(self) -> bool:
        bands = (*self.staying.values(), *self.saved.values(), *self.rest.values())
        return self.times_ms[-1] > 0 and any(map(any, bands))


def memory_figure(picture: MemoryPicture, title: str = "") -> "Figure":
    """Draw the memory of a training step over time, with a band for each owner."""
    figure, axes = new_figure(title)
    bands = [
        (name, series, color)
        for group, colors in ((picture.staying, _STAYING), (picture.saved, _LAYERS), (picture.rest, _REST))
        for (name, series), color in zip(group.items(), colors, strict=False)
    ]
    series = [[size / GIB for size in (*values, values[-1])] for _, values, _ in bands]
    totals = [sum(values) for values in zip(*series, strict=True)]
    axes.stackplot(
        picture.times_ms, series, step="post", colors=[color for *_, color in bands], linewidth=0.3, edgecolor="white"
    )
    height, end, thin = max(totals) * 1.13, picture.times_ms[-1], max(totals) * _LEAST_NAMED
    axes.set(xlim=(0, end), ylim=(0, height), xlabel="time in ms", ylabel="memory in GiB")
    highest = max(range(len(totals)), key=totals.__getitem__)
    at = picture.times_ms[highest]
    axes.annotate(
        picture.peak,
        (at, totals[highest]),
        (0, 6),
        textcoords="offset points",
        ha="left" if at < end / 3 else "right" if at > 2 * end / 3 else "center",
    )
    axes.plot([at], [totals[highest]], "v", color="black", markersize=4, clip_on=False)
    draw_marks(axes, picture.marks)
    draw_phases([axes], picture.phases, end, height, -9)
    seen = [Look(name, color) for (name, _, color), values in zip(bands, series, strict=True) if max(values) > thin]
    add_legend(figure, seen[::-1], "outside right center")  # from the top, as the bands lie
    return figure


def front_figure(
    fronts: Mapping[str, Sequence[tuple[int, float]]], marks: Sequence[tuple[str, int]] = (), title: str = ""
) -> "Figure":
    """Draw the time of a training step against its peak, with a line for each policy.

    Where there are many policies, those have a color and a name that are the fastest at one of their peaks.

    Args:
        fronts: peak in bytes and milliseconds of plans, by the name of their policy.
        marks: lines across the picture: text and bytes.
        title: stands above the picture.
    """
    figure, axes = new_figure(title, 4.6)
    drawn = {
        name: sorted((peak / GIB, time_ms) for peak, time_ms in points) for name, points in fronts.items() if points
    }
    named = [*drawn] if len(drawn) <= _MOST_NAMED else _best(drawn)
    families = [*dict.fromkeys(name.partition("-")[0] for name in named)]
    shapes = {color: cycle(_SHAPES) for color in _FAMILIES}
    others = [points for name, points in drawn.items() if name not in named]
    for index, points in enumerate(others):
        label = "_" if index else f"{len(others)} others"
        axes.plot(*zip(*points, strict=True), ".-", label=label, color="#c8c8c8", linewidth=0.8, markersize=4)
    for name in named:
        color = _FAMILIES[families.index(name.partition("-")[0]) % len(_FAMILIES)]
        style: Any = {"color": color, "linewidth": 1, "markersize": 4.5, "markerfacecolor": "none"}
        axes.plot(*zip(*drawn[name], strict=True), f"{next(shapes[color])}-", label=name, **style)
    axes.set(xlabel="peak in GiB", ylabel="time of a step in ms")
    low, high = axes.dataLim.y0, axes.dataLim.y1
    axes.set(xlim=(0, 1.08 * axes.dataLim.x1), ylim=(0, 1.15 * high))
    if 0 < _LOG * low < high:
        axes.set(yscale="log", ylim=(low / 1.3, 1.3 * high))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    for text, size in marks:
        if size / GIB > axes.get_xlim()[1]:
            continue
        axes.axvline(size / GIB, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(text, (size / GIB, 0), (4, 4), xycoords=("data", "axes fraction"), textcoords="offset points")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def _best(fronts: Mapping[str, Sequence[tuple[float, float]]]) -> list[str]:
    """Return the first of the fastest policies, and those that no other one beats at one of their lower peaks."""
    every = sorted(point for points in fronts.values() for point in points)
    least = {peak: min(time_ms for other, time_ms in every if other <= peak) for peak, _ in every}
    fastest_ms = _SAME * min(time_ms for _, time_ms in every)
    first = next(name for name, points in fronts.items() if min(time_ms for _, time_ms in points) <= fastest_ms)
    return [
        name
        for name, points in fronts.items()
        if name == first or any(fastest_ms < time_ms <= _SAME * least[peak] for peak, time_ms in points)
    ]


COLORS: Mapping[str, str] = {
    "forward": "#0072B2",
    "backward": "#56B4E9",
    "optimizer": "#333333",
    "recomputation": "#E69F00",
    "to the host": "#D55E00",
    "from the host": "#009E73",
    "between ranks": "#CC79A7",
    "made in forward": "#0072B2",
    "back from the host": "#009E73",
    "recomputed": "#E69F00",
    "made in backward": "#56B4E9",
    "scratch": "#999999",
    "measured compute": "#666666",
    "predicted memory": "#08306b",
    "measured memory": "#D55E00",
}
"""Color of each kind of work and of each kind of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePicture:
    """What the queues of a device do during a step, and the memory.

    Attributes:
        lanes: work by the name of its queue, from the top: (kind, start and end in milliseconds).
        memory: (milliseconds, bytes that exist from then on).
        measured: the same as measured; nothing where it was not.
        end_ms: end of the step.
        marks: lines across the memory: text and bytes.
        phases: names of the parts of the step and when they begin, in milliseconds.
    """

    lanes: Mapping[str, Sequence[tuple[str, float, float]]]
    memory: Sequence[tuple[float, int]]
    end_ms: float
    marks: Sequence[tuple[str, int]]
    phases: Sequence[tuple[str, float]]
    measured: Sequence[tuple[float, int]] = ()

    def __bool__(self) -> bool:
        return bool(self.memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressPicture:
    """Where a pool puts each piece of memory, and when."""

    pieces: Sequence[tuple[str, int, int, float, float]]  # kind, first byte, bytes, begin and end in milliseconds
    extent_bytes: int
    live_bytes: int
    end_ms: float

    def __bool__(self) -> bool:
        return bool(self.pieces)


def queues_figure(picture: QueuePicture, title: str = "") -> "Figure":
    """Draw what the queues of a device do during a step, with the memory below."""
    figure, first = new_figure(title, 4.2)
    first.remove()
    lanes, memory = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.6))
    for row, work in enumerate(picture.lanes.values()):
        for kind in dict.fromkeys(kind for kind, *_ in work):
            spans = [(start, end - start) for found, start, end in work if found == kind]
            lanes.broken_barh(spans, (row - 0.38, 0.76), facecolor=COLORS[kind], linewidth=0)
    lanes.set(ylim=(len(picture.lanes) - 0.5, -0.5), yticks=range(len(picture.lanes)))
    lanes.set_yticklabels(picture.lanes)
    lanes.tick_params(left=False)
    kinds = [*dict.fromkeys(kind for work in picture.lanes.values() for kind, *_ in work)]
    curves = (("predicted memory", picture.memory, 0.7), ("measured memory", picture.measured, 0.9))
    for name, points, width in curves if picture.measured else curves[:1]:
        times = [*(time for time, _ in points), picture.end_ms]
        sizes = [size / GIB for _, size in (*points, points[-1])]
        memory.step(times, sizes, where="post", color=COLORS[name], linewidth=width)
        kinds += [name] if picture.measured else []
    memory.fill_between(*memory.lines[0].get_data(), step="post", color="#c6dbef", linewidth=0)
    height = 1.12 * max(size / GIB for _, size in (*picture.memory, *picture.measured, *picture.marks))
    memory.set(xlim=(0, picture.end_ms), ylim=(0, height), xlabel="time in ms", ylabel="memory in GiB")
    draw_marks(memory, picture.marks)
    draw_phases([lanes, memory], picture.phases, picture.end_ms, -0.5, 2)
    add_legend(figure, [Look(kind, COLORS[kind]) for kind in kinds], "outside lower center", 6)
    return figure


def addresses_figure(picture: AddressPicture, title: str = "") -> "Figure":
    """Draw where a pool puts each piece of memory, and from when to when."""
    from matplotlib.collections import PolyCollection

    figure, axes = new_figure(title, 4.2)
    kinds = [kind for kind in COLORS if any(piece[0] == kind for piece in picture.pieces)]
    least = picture.end_ms / 1500  # a piece that ends at once is still seen
    for kind in kinds:
        corners = []
        for found, address, size, begin, end in picture.pieces:
            if found == kind:
                low, high, right = address / GIB, (address + size) / GIB, max(end, begin + least)
                corners.append([(begin, low), (right, low), (right, high), (begin, high)])
        axes.add_collection(PolyCollection(corners, facecolor=COLORS[kind], edgecolor="white", linewidth=0.25))
    top = picture.extent_bytes / GIB
    axes.set(xlim=(0, picture.end_ms), ylim=(0, 1.1 * top), xlabel="time in ms", ylabel="address in the pool in GiB")
    waste = picture.extent_bytes / picture.live_bytes - 1 if picture.live_bytes else 0.0
    draw_marks(axes, [(f"pool: {waste:.1%} above what is alive at most", picture.extent_bytes)])
    add_legend(figure, [Look(kind, COLORS[kind]) for kind in kinds], "outside lower center", 6)
    return figure
