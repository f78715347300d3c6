"""Looks: sizes, letters and colors of all pictures.

Colors stay apart for color-blind eyes and in grey: layers are shades from dark to light in network order, algorithms
have Okabe and Ito's colors, and what shares a color is told apart by hatching.
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
    "svg.fonttype": "none",  # text stays text, to be searched and edited
}
DARK = "#0072B2", "#333333"  # white text on them
_COLORS = (DARK[0], "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", DARK[1])
_HATCHES = ("////", "....", "xxxx", "----", "\\\\\\\\", "oooo", "//--")


def new_figure(title: str, height: float = 4.0) -> tuple["Figure", "Axes"]:
    """Return a figure of half a page, in inches, with its axes."""
    from matplotlib.figure import Figure  # without pyplot there is no state and no window

    figure = Figure(figsize=(7.0, height), dpi=150, layout="constrained")
    figure.suptitle(fill(title, 95))
    return figure, figure.add_subplot()


@dataclass(frozen=True, slots=True)
class Look:
    """How pieces of one kind are drawn."""

    label: str
    color: Any
    hatch: str = ""

    def of(self, pieces: int = 1) -> dict[str, Any]:
        """Return the style of a piece of a bar of so many: the edges of many would leave nothing else."""
        points = min(0.5, 20 / pieces)
        return {"facecolor": self.color, "edgecolor": "white", "linewidth": points, "hatch": self.hatch}


@dataclass(frozen=True, slots=True)
class Piece:
    """A call of a configuration: a micro-batch, or a slab of one.

    Attributes:
        text: its micro-batch size, or '8 rows'.
        algorithm: what computes it.
        time_ms: how long that takes in milliseconds.
        share: which part of the mini-batch it is.
    """

    text: str
    algorithm: str
    time_ms: float
    share: float


def pieces_of(configuration: Configuration) -> list[Piece]:
    """Return the calls of a configuration in order."""
    found = []
    for part in configuration.parts:
        share = part.size / configuration.size
        if not part.slabs:
            found.append(Piece(str(part.size), part.algorithm, part.time_ms, share))
        rows = sum(each.slab.rows for each in part.slabs)
        for each in part.slabs:
            own = each.slab.rows
            found.append(Piece(f"{own} rows", each.algorithm, each.time_ms, share * own / rows))
    return found


def add_legend(figure: "Figure", looks: Iterable[Look], place: Any, columns: int = 1) -> None:
    """Add a legend outside the axes."""
    from matplotlib.patches import Patch

    # matplotlib leaves out what begins with an underscore.
    labels = [(f" {look.label}" if look.label.startswith("_") else look.label, look) for look in looks]
    figure.legend(handles=[Patch(label=label, **look.of()) for label, look in labels], loc=place, ncols=columns)


def shaded(names: Sequence[str]) -> list[Look]:
    """Return looks from dark to light, none so light that white hatching is lost."""
    from matplotlib import colormaps

    shades = [colormaps["viridis"](0.78 * index / max(1, len(names) - 1)) for index in range(len(names))]
    return [Look(_short(name, 26), shade) for name, shade in zip(names, shades, strict=True)]


def _short(name: str, most: int = 24) -> str:
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-most // 2 + 1 :]}"


def looks_of(configurations: Iterable[Configuration]) -> dict[str, Look]:
    """Return how algorithms are drawn: a color for each engine of cuDNN, hatching and letters for choices of knobs.

    Only the first two colors are apart in grey, so the others are always hatched.
    """
    engines: dict[str, list[str]] = {}
    for name in dict.fromkeys(piece.algorithm for each in configurations for piece in pieces_of(each)):
        engines.setdefault(re.sub(r"^(eng\d+)_k\d+=.*", r"\1", name), []).append(name)
    # Each color goes through the hatches from another one on.
    hatches = [cycle((*_HATCHES[start:], *_HATCHES[:start])) for start in range(len(_COLORS))]
    looks = {}
    for number, (engine, variants) in enumerate(engines.items()):
        color = number % len(_COLORS)
        for index, name in enumerate(variants):
            letter = f" {chr(ord('a') + index)}" if len(variants) > 1 else ""
            hatch = next(hatches[color]) if index or number > 1 else ""
            looks[name] = Look(_short(engine) + letter, _COLORS[color], hatch)
    return looks
