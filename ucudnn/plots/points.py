"""Pictures of desirable sets: points, each with a bar beside it that shows its micro-batches (paper, figure 8)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from ucudnn.configuration import Configuration
from ucudnn.plots.style import MIB, add_legend, bar_pieces, looks_of, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_LABELLED = 16
_BAR = (0.11, 0.034)  # width and height of the bar beside a point; as the next three, in parts of the axes
_ASIDE = (0.012, 0.022)  # from a point to its bar
_LETTER = 0.0125  # width of a letter beside the bar
_STEP = 0.048  # from a bar to the next one above it
_LOG = 10  # ratio of times beyond which their scale is logarithmic


@dataclass(frozen=True, slots=True)
class _Note:
    """The place of a point's bar and text, and the line from the point to them, in parts of the axes.

    Attributes:
        left: left end of the bar.
        right: right end of the text.
        bottom: lower end of the bar.
        line: x of a vertical line, and its two ends.
    """

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
        return self.left - 0.01 < x < self.right and low < self.bottom + _BAR[1] and self.bottom < high


def desirable_figure(front: Sequence[Configuration], title: str, kind: str = "predicted") -> "Figure":
    """Return a figure of workspace against time; see `draw_desirable`."""
    from matplotlib.patches import Rectangle

    figure, axes = new_figure(title)
    points = [(each.workspace_bytes / MIB, each.time_ms) for each in front]
    axes.plot(*zip(*points, strict=True), "o-", drawstyle="steps-post", color="#777777", linewidth=1, markersize=3.5)
    axes.set(xlabel="workspace in MiB", ylabel=f"{kind} time in ms")
    _set_scales(axes, points)
    places = [(x, y) for x, y in axes.transAxes.inverted().transform(axes.transData.transform(points))]
    texts = [_division_text(each) for each in front]
    notes = _notes(places, [_BAR[0] + _LETTER * (len(text) + 0.5) for text in texts])
    looks = looks_of(front[index] for index in sorted(notes))
    for index, note in notes.items():
        left, (x, *ends) = note.left, note.line
        if ends[0] != ends[1]:
            rising = places[index][1] == ends[0]
            xs = (places[index][0], x) if rising else (x, places[index][0])
            axes.plot(xs, ends, transform=axes.transAxes, color="#777777", linewidth=0.6)
        pieces = bar_pieces(front[index])
        for piece in pieces:
            width = _BAR[0] * piece.share
            style = looks[piece.algorithm].of(4 * len(pieces))
            axes.add_patch(Rectangle((left, note.bottom), width, _BAR[1], transform=axes.transAxes, **style))
            left += width
        middle = note.bottom + _BAR[1] / 2
        axes.text(left + _LETTER / 2, middle, texts[index], transform=axes.transAxes, va="center_baseline")
    add_legend(figure, looks.values(), "outside lower center", 6)
    return figure


def _set_scales(axes: "Axes", points: Sequence[tuple[float, float]]) -> None:
    """Choose scales, linear within about a decade, and leave room for the bars beside the points."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    least = max(min([x for x in xs if x] or [1.0]), max(xs) / 1e4)
    if max(xs) > 20 * least:
        axes.set_xscale("symlog", linthresh=least, linscale=0.5)
    if max(ys) > _LOG * min(ys):
        axes.set_yscale("log")
    for axis, values, below, above in ((axes.xaxis, xs, 0.04, 0.19), (axes.yaxis, ys, 0.15, 0.1)):
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
            inside = note.left > 0 and note.right < 1.01 and 0 < note.bottom < 1 - _BAR[1]
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
    above, below = y + _ASIDE[1], y - _ASIDE[1] - _BAR[1]
    choices = []
    for step in range(round(1 / _STEP)):
        high, low = above + step * _STEP, below - step * _STEP
        choices += [
            _Note(right, right + width, high, (right, y, high if step else y)),
            _Note(left - width, left, low, (left, low + _BAR[1] if step else y, y)),
        ]
    return choices
