"""Pictures of one plan of a training step: its queues over time with the memory below, and its pool's address map."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucudnn.plots.style import GIB, Look, add_legend, draw_marks, draw_phases, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    """Where a pool puts each piece of memory, and when.

    Attributes:
        pieces: (kind, first byte, bytes, begin and end in milliseconds).
        extent_bytes: bytes of the pool.
        live_bytes: most bytes that are alive at a time.
        end_ms: end of the step.
    """

    pieces: Sequence[tuple[str, int, int, float, float]]
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
    kinds: dict[str, None] = {}
    for row, work in enumerate(picture.lanes.values()):
        for kind in dict.fromkeys(kind for kind, *_ in work):
            kinds[kind] = None
            spans = [(start, end - start) for found, start, end in work if found == kind]
            lanes.broken_barh(spans, (row - 0.38, 0.76), facecolor=COLORS[kind], linewidth=0)
    lanes.set(ylim=(len(picture.lanes) - 0.5, -0.5), yticks=range(len(picture.lanes)))
    lanes.set_yticklabels(picture.lanes)
    lanes.tick_params(left=False)
    times = [time for time, _ in picture.memory] + [picture.end_ms]
    sizes = [size / GIB for _, size in picture.memory]
    memory.fill_between(times, [*sizes, sizes[-1]], step="post", color="#c6dbef", linewidth=0)
    memory.step(times, [*sizes, sizes[-1]], where="post", color="#08306b", linewidth=0.7)
    looks = [Look(kind, COLORS[kind]) for kind in kinds]
    if picture.measured:
        times = [time for time, _ in picture.measured] + [picture.end_ms]
        found = [size / GIB for _, size in picture.measured]
        memory.step(times, [*found, found[-1]], where="post", color=COLORS["measured memory"], linewidth=0.9)
        sizes += found
        looks += [
            Look("predicted memory", COLORS["predicted memory"]),
            Look("measured memory", COLORS["measured memory"]),
        ]
    height = 1.12 * max([*sizes, *(size / GIB for _, size in picture.marks)])
    memory.set(xlim=(0, picture.end_ms), ylim=(0, height), xlabel="time in ms", ylabel="memory in GiB")
    draw_marks(memory, picture.marks)
    draw_phases([lanes, memory], picture.phases, picture.end_ms, -0.5, 2)
    add_legend(figure, looks, "outside lower center", 6)
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
