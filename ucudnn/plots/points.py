"""Pictures of desirable sets: a point for each configuration, with its micro-batches beside it (paper, figure 8)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from ucudnn.configuration import Configuration
from ucudnn.plots.style import MIB, Look, looks_of, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_LABELLED = 16
_HEIGHT = 0.04  # of the text beside a point; as the next three, in parts of the axes
_ASIDE = (0.008, 0.012)  # from a point to its text
_LETTER = 0.0125  # width of a letter
_STEP = 0.05  # from a text to the next one above it
_LOG = 10  # ratio of times beyond which their scale is logarithmic
_SHAPES = "os^DvP*X<>p"  # of points, for the choices of one engine's knobs


@dataclass(frozen=True, slots=True)
class _Note:
    """The place of a point's text, and the line from the point to it, in parts of the axes."""

    left: float
    right: float
    bottom: float
    line: tuple[float, float, float]

    def leaves_room(self, other: "_Note") -> bool:
        """Whether two notes do not touch."""
        apart = self.right < other.left or other.right < self.left or abs(self.bottom - other.bottom) > _STEP - 0.003
        return apart and not self._crosses(other.line) and not other._crosses(self.line)

    def _crosses(self, line: tuple[float, float, float]) -> bool:
        x, low, high = line
        return self.left - 0.01 < x < self.right and low < self.bottom + _HEIGHT and self.bottom < high


def desirable_figure(front: Sequence[Configuration], title: str = "", kind: str = "predicted") -> "Figure":
    """Draw workspace against time of a desirable set, with the micro-batches of each point (paper, figure 8)."""
    figure, axes = new_figure(title)
    points = [(each.workspace_bytes / MIB, each.time_ms) for each in front]
    axes.plot(*zip(*points, strict=True), drawstyle="steps-post", color="#aaaaaa", linewidth=1, zorder=1)
    axes.set(xlabel="workspace in MiB", ylabel=f"{kind} time in ms")
    _set_scales(axes, points)
    _add_points(figure, axes, front, looks_of(front))
    places = [(x, y) for x, y in axes.transAxes.inverted().transform(axes.transData.transform(points))]
    texts = [_division_text(each) for each in front]
    for index, note in _notes(places, [_LETTER * (len(text) + 0.5) for text in texts]).items():
        x, *ends = note.line
        if ends[0] != ends[1]:
            rising = places[index][1] == ends[0]
            xs = (places[index][0], x) if rising else (x, places[index][0])
            axes.plot(xs, ends, transform=axes.transAxes, color="#777777", linewidth=0.6)
        middle = note.bottom + _HEIGHT / 2
        axes.text(note.left, middle, texts[index], transform=axes.transAxes, va="center_baseline")
    return figure


def _add_points(figure: "Figure", axes: "Axes", front: Sequence[Configuration], looks: Mapping[str, Look]) -> None:
    """Draw the points: an engine has a color, a choice of its knobs a shape; several algorithms are a white point."""
    shapes: dict[str, str] = {}
    for name, look in looks.items():
        shapes[name] = _SHAPES[sum(looks[other].color == look.color for other in shapes) % len(_SHAPES)]
    styles = {name: {"marker": shapes[name], "markerfacecolor": look.color} for name, look in looks.items()}
    drawn = {}
    for each in front:
        name, *more = looks_of([each])
        label = "several algorithms" if more else looks[name].label
        style = {"marker": "o", "markerfacecolor": "white"} if more else styles[name]
        point = (each.workspace_bytes / MIB, each.time_ms)
        (drawn[label],) = axes.plot(*point, linestyle="", markeredgecolor="black", markeredgewidth=0.5, **style)
    # matplotlib leaves out labels that begin with an underscore.
    labels = [f" {label}" if label.startswith("_") else label for label in drawn]
    figure.legend([*drawn.values()], labels, loc="outside lower center", ncols=6)


def _set_scales(axes: "Axes", points: Sequence[tuple[float, float]]) -> None:
    """Choose scales, linear within about a decade, and leave room for the texts beside the points."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    least = max(min([x for x in xs if x] or [1.0]), max(xs) / 1e4)
    if max(xs) > 20 * least:
        axes.set_xscale("symlog", linthresh=least, linscale=0.5)
    if max(ys) > _LOG * min(ys):
        axes.set_yscale("log")
    for axis, values, below, above in ((axes.xaxis, xs, 0.04, 0.12), (axes.yaxis, ys, 0.12, 0.1)):
        scale = axis.get_transform()
        low, high = scale.transform([min(values), max(values)])
        span = (high - low or abs(high) or 1.0) / (1 - below - above)
        limits = scale.inverted().transform([low - below * span, low + (1 - below) * span])
        (axes.set_xlim if axis is axes.xaxis else axes.set_ylim)(*limits)
        axis.set_major_formatter(lambda value, _: f"{value:g}" if value >= 0 else "")
        axis.set_minor_formatter(lambda value, _: "")
    if max(ys) > _LOG * min(ys):  # one or two decades have too few powers of ten
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")


def _division_text(configuration: Configuration) -> str:
    """Return a text such as '128+2×64'; '4×1 in 8' stands for four single samples in eight slabs each."""
    sizes = [
        (f"{size} in {slabs}" if slabs else str(size), len([*parts]))
        for (size, slabs), parts in groupby(configuration.parts, key=lambda part: (part.size, len(part.slabs)))
    ]
    texts = [size if count == 1 else f"{count}×{size}" for size, count in sizes]
    return "+".join(texts if len(texts) <= 3 else [*texts[:2], "…"])


def _notes(places: Sequence[tuple[float, float]], widths: Sequence[float]) -> dict[int, _Note]:
    """Return notes that leave each other room, by point; the two ends come first, then points far apart."""
    count = len(places)
    spread = (round(step * (count - 1) / (_MOST_LABELLED - 1)) for step in range(_MOST_LABELLED))
    notes: dict[int, _Note] = {}
    for index in dict.fromkeys([count - 1, 0, *spread, *range(count)]):
        for note in _choices(places[index], widths[index]):
            inside = note.left > 0 and note.right < 1.01 and 0 < note.bottom < 1 - _HEIGHT
            if inside and len(notes) < _MOST_LABELLED and all(note.leaves_room(other) for other in notes.values()):
                notes.setdefault(index, note)
    return notes


def _choices(point: tuple[float, float], width: float) -> list[_Note]:
    """Return the possible notes of a point, the nearest first.

    Time falls as workspace rises, so the line of points leaves room above and to the right of a point, and below and to
    the left of it.
    """
    x, y = point
    right, left = x + _ASIDE[0], x - _ASIDE[0]
    above, below = y + _ASIDE[1], y - _ASIDE[1] - _HEIGHT
    choices = []
    for step in range(round(1 / _STEP)):
        high, low = above + step * _STEP, below - step * _STEP
        choices += [
            _Note(right, right + width, high, (right, y, high if step else y)),
            _Note(left - width, left, low, (left, low + _HEIGHT if step else y, y)),
        ]
    return choices
