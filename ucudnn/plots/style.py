"""The sizes, fonts and colors of all pictures, and the pieces that bars are made of.

Color-blind readers and grey prints can tell the colors apart: layers are shades from dark to light in network order,
algorithms have the colors of Okabe and Ito, and pieces of one color differ in their hatching.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from textwrap import fill
from typing import TYPE_CHECKING, Any

from ucudnn.configuration import Configuration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = 2**20
GIB = 2**30
STYLE: Any = {
    "font.size": 8.5,
    "figure.titlesize": 9.5,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.7,
    "text.parse_math": False,
    "svg.fonttype": "none",  # text can be searched and edited
}
DARK = "#0072B2", "#333333"  # text on these is white
_COLORS = (DARK[0], "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", DARK[1])
_LABEL_STEP = 0.15  # inches between names beside the axes
_HATCHES = ("////", "....", "xxxx", "----", "\\\\\\\\", "oooo", "//--")


def new_figure(title: str, height: float = 4.0) -> tuple["Figure", "Axes"]:
    """Return a figure of half a page with a title, and of so many inches in height, with its axes."""
    from matplotlib.figure import Figure  # pyplot would add state and windows

    figure = Figure(figsize=(7.0, height), dpi=150, layout="constrained")
    figure.suptitle(fill(title, 95))
    return figure, figure.add_subplot()


@dataclass(frozen=True, slots=True)
class Look:
    """The look of the pieces of one layer, operation or algorithm."""

    label: str
    color: Any
    hatch: str = ""

    def of(self, pieces: int = 1) -> dict[str, Any]:
        """Return the arguments of matplotlib for one piece of a bar.

        Args:
            pieces: how many pieces the bar has; the edges of many pieces are thinner, because they would hide them.
        """
        points = min(0.5, 20 / pieces)
        return {"facecolor": self.color, "edgecolor": "white", "linewidth": points, "hatch": self.hatch}


@dataclass(frozen=True, slots=True)
class BarPiece:
    """One call of a configuration: a micro-batch, or a slab of a micro-batch."""

    text: str
    algorithm: str
    time_ms: float
    share: float


def bar_pieces(configuration: Configuration) -> list[BarPiece]:
    """Return the calls of a configuration in order."""
    found = []
    for part in configuration.parts:
        share = part.size / configuration.size
        if not part.slabs:
            found.append(BarPiece(str(part.size), part.algorithm, part.time_ms, share))
        rows = sum(each.slab.rows for each in part.slabs)
        for each in part.slabs:
            own = each.slab.rows
            found.append(BarPiece(f"{own} rows", each.algorithm, each.time_ms, share * own / rows))
    return found


def add_legend(figure: "Figure", looks: Iterable[Look], place: Any, columns: int = 1) -> None:
    """Add a legend outside the axes, at a place that matplotlib names."""
    from matplotlib.patches import Patch

    # matplotlib leaves out labels that begin with an underscore.
    labels = [(f" {look.label}" if look.label.startswith("_") else look.label, look) for look in looks]
    figure.legend(handles=[Patch(label=label, **look.of()) for label, look in labels], loc=place, ncols=columns)


def beside_labels(figure: "Figure", axes: "Axes", end: float, labels: Iterable[tuple[float, str, Any]]) -> None:
    """Write names to the right of the axes, each with a line to its place, so far apart that all can be read.

    A label is y, text and the color of its line, from the bottom. Lines begin at x = `end`. The axes have limits.
    """
    low, high = axes.get_ylim()
    given = sorted(labels, key=lambda each: each[0])  # stable, so that names at one place keep their order
    figure.draw_without_rendering()  # only then is the height of the axes known
    inches = axes.get_window_extent().height / figure.dpi
    step = min(_LABEL_STEP / inches, 1.0 / max(1, len(given))) * (high - low)
    places: list[float] = []
    for center, *_ in given:
        places.append(max(places[-1] + step, center) if places else center)
    # What would stand above the axes pushes those below it down.
    places = [min(place, high - (len(places) - 1 - index) * step) for index, place in enumerate(places)]
    left, right = axes.get_xlim()
    right += 0.02 * (right - left)
    for (center, text, color), place in zip(given, places, strict=True):
        line = {"arrowstyle": "-", "color": color, "linewidth": 0.8, "shrinkA": 2, "shrinkB": 0, "relpos": (0, 0.5)}
        axes.annotate(
            text, (end, center), (right, place), va="center", size=7.5, annotation_clip=False, arrowprops=line
        )


def draw_marks(axes: "Axes", marks: Sequence[tuple[str, int]]) -> None:
    """Draw lines across memory; their texts stand at its left and right ends in turn, so that two do not overlap."""
    for index, (text, size) in enumerate(marks):
        axes.axhline(size / GIB, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
        box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1}
        end, offset, side = (1, (-3, 3), "right") if index % 2 else (0, (3, 3), "left")
        where: Any = axes.get_yaxis_transform()
        axes.annotate(text, (end, size / GIB), offset, xycoords=where, textcoords="offset points", ha=side, bbox=box)


def draw_phases(
    axes: Sequence["Axes"], phases: Sequence[tuple[str, float]], end_ms: float, top: float, rise: int
) -> None:
    """Draw where the parts of a step begin; their names stand so many points above the top of the first axes."""
    for name, begin in phases:
        for each in axes:
            each.axvline(begin, color="#777777", linewidth=0.6, linestyle=":")
        late = begin > 0.9 * end_ms
        style: Any = {"color": "#555555", "style": "italic", "ha": "right" if late else "left"}
        axes[0].annotate(name, (begin, top), (-3 if late else 3, rise), textcoords="offset points", **style)


def shaded(names: Sequence[str]) -> list[Look]:
    """Return a look for each name, from dark to light; white hatching stays visible on the lightest."""
    from matplotlib import colormaps

    shades = [colormaps["viridis"](0.78 * index / max(1, len(names) - 1)) for index in range(len(names))]
    return [Look(_short(name, 26), shade) for name, shade in zip(names, shades, strict=True)]


def _short(name: str, most: int = 24) -> str:
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-most // 2 + 1 :]}"


def looks_of(configurations: Iterable[Configuration]) -> dict[str, Look]:
    """Return the look of each algorithm.

    Each engine of cuDNN has a color. Choices of its knobs differ in hatching and in a letter. In grey, only the first
    two colors differ clearly, so the others are always hatched.
    """
    engines: dict[str, list[str]] = {}
    for name in dict.fromkeys(piece.algorithm for each in configurations for piece in bar_pieces(each)):
        engines.setdefault(re.sub(r"^(eng\d+)_k\d+=.*", r"\1", name), []).append(name)
    # Each color begins with another hatch.
    hatches = [cycle((*_HATCHES[start:], *_HATCHES[:start])) for start in range(len(_COLORS))]
    looks = {}
    for number, (engine, variants) in enumerate(engines.items()):
        color = number % len(_COLORS)
        for index, name in enumerate(variants):
            letter = f" {chr(ord('a') + index)}" if len(variants) > 1 else ""
            hatch = next(hatches[color]) if index or number > 1 else ""
            looks[name] = Look(_short(engine) + letter, _COLORS[color], hatch)
    return looks
