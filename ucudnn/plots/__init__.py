"""Pictures of reports and configurations, drawn by matplotlib into files, as the paper has them.

Nothing is measured here.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from ucudnn.configuration import Configuration
from ucudnn.errors import BackendUnavailableError, InvalidValueError
from ucudnn.plots.bands import MemoryPicture, PolicyPoint, front_figure, memory_figure
from ucudnn.plots.bars import Bar, configurations_figure, division_figure, groups_figure, layers_figure
from ucudnn.plots.plan_pictures import AddressPicture, QueuePicture, addresses_figure, queues_figure
from ucudnn.plots.points import desirable_figure
from ucudnn.plots.style import STYLE
from ucudnn.reporting.output_file import check_output, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "AddressPicture",
    "Bar",
    "MemoryPicture",
    "PolicyPoint",
    "QueuePicture",
    "check_picture",
    "draw_addresses",
    "draw_configurations",
    "draw_desirable",
    "draw_division",
    "draw_front",
    "draw_groups",
    "draw_layers",
    "draw_memory",
    "draw_queues",
]

_FORMATS = ("pdf", "png", "svg")


def draw_layers(bars: Sequence[Bar], path: Path, *, title: str = "") -> None:
    """Draw the milliseconds of each layer and operation as a piece of a stack, with a stack for each report.

    Times are executed ones if a report has them, and else predicted ones. A kernel counts as often as it occurs.

    Args:
        bars: labels and reports; bars whose labels begin with the same line stand together.
        path: file to write, in the format of its suffix: .pdf, .png or .svg.
        title: stands above the picture.

    Raises:
        BackendUnavailableError: if matplotlib is not installed.
        InvalidValueError: if there is nothing to draw, or the suffix is not known.
        OutputError: if the file cannot be written.
    """
    _write(path, bars, lambda: layers_figure(bars, title))


def draw_division(bars: Sequence[Bar], path: Path, *, title: str = "", times: bool = True) -> None:
    """Draw the workspace of each layer and operation in MiB (paper, figure 13), and what it buys; see `draw_layers`.

    Args:
        bars: as for `draw_layers`.
        path: as for `draw_layers`, as are the errors.
        title: as for `draw_layers`.
        times: whether the milliseconds are drawn above the workspace, so that layers without workspace are seen, too.
    """
    _write(path, bars, lambda: division_figure(bars, title, times=times))


def draw_desirable(front: Sequence[Configuration], path: Path, *, title: str = "", kind: str = "predicted") -> None:
    """Draw the workspace against the time of a desirable set, with the micro-batches of each point (paper, figure 8).

    Args:
        front: the desirable set, in order of workspace; it may not be empty.
        path: as for `draw_layers`, as are the errors.
        title: as for `draw_layers`.
        kind: a word for the times: 'predicted', or 'executed'.
    """
    _write(path, front, lambda: desirable_figure(front, title, kind))


def draw_configurations(
    rows: Sequence[tuple[str, Configuration]], path: Path, *, title: str = "", kind: str = "predicted"
) -> None:
    """Draw the milliseconds of configurations as rows, with a piece for each micro-batch (paper, figure 9).

    Args:
        rows: labels and configurations, from the top.
        path: as for `draw_layers`, as are the errors.
        title: as for `draw_layers`.
        kind: a word for the times: 'predicted', or 'executed'.
    """
    _write(path, rows, lambda: configurations_figure(rows, title, kind))


def draw_groups(
    labels: Sequence[str], series: Mapping[str, Sequence[float | None]], path: Path, *, ylabel: str, title: str = ""
) -> None:
    """Draw groups of bars side by side (paper, figure 1).

    Args:
        labels: a label for each group.
        series: heights by the name of a series, one for each label; None for no bar.
        path: as for `draw_layers`, as are the errors.
        ylabel: names the heights and their unit.
        title: as for `draw_layers`.
    """
    _write(path, labels, lambda: groups_figure(labels, series, ylabel, title))


def draw_memory(picture: MemoryPicture, path: Path, *, title: str = "") -> None:
    """Draw the memory of a training step over time, with a band for each owner.

    Args:
        picture: owners and their bytes.
        path: as for `draw_layers`, as are the errors.
        title: as for `draw_layers`.
    """
    bands = (*picture.staying.values(), *picture.saved.values(), *picture.rest.values())
    drawn = [band for band in bands if any(band)] if picture.times_ms[-1] > 0 else []
    _write(path, drawn, lambda: memory_figure(picture, title))


def draw_front(
    fronts: Mapping[str, Sequence[PolicyPoint]],
    path: Path,
    *,
    marks: Sequence[tuple[str, int]] = (),
    title: str = "",
) -> None:
    """Draw the time of a training step against its peak, with a line for each policy.

    Args:
        fronts: plans by the name of their policy.
        path: as for `draw_layers`, as are the errors.
        marks: lines across the picture: text and bytes.
        title: as for `draw_layers`.
    """
    _write(path, [point for points in fronts.values() for point in points], lambda: front_figure(fronts, marks, title))


def draw_queues(picture: QueuePicture, path: Path, *, title: str = "") -> None:
    """Draw what the queues of a device do during a step, with the memory below.

    Args:
        picture: work and memory.
        path: as for `draw_layers`, as are the errors.
        title: as for `draw_layers`.
    """
    _write(path, picture.memory, lambda: queues_figure(picture, title))


def draw_addresses(picture: AddressPicture, path: Path, *, title: str = "") -> None:
    """Draw where a pool puts each piece of memory, and from when to when.

    Args:
        picture: the pieces.
        path: as for `draw_layers`, as are the errors.
        title: as for `draw_layers`.
    """
    _write(path, picture.pieces, lambda: addresses_figure(picture, title))


def check_picture(path: Path) -> None:
    """Raise the error that drawing into a file would raise, before anything is measured for the picture.

    Raises:
        BackendUnavailableError: if matplotlib is not installed.
        InvalidValueError: if its name does not end in a known format.
        OutputError: if it cannot be written.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BackendUnavailableError("pictures need matplotlib: pip install 'ucudnn[plot]'") from error
    if path.suffix.lower().removeprefix(".") not in _FORMATS:
        raise InvalidValueError(f"{path} is no name of a picture: it must end in .{', .'.join(_FORMATS)}")
    check_output(path)


def _write(path: Path, drawn: Collection[object], draw: Callable[[], "Figure"]) -> None:
    check_picture(path)
    if not drawn:
        raise InvalidValueError(f"{path}: there is nothing to draw")
    from matplotlib import rc_context

    picture = BytesIO()
    with rc_context(STYLE):
        draw().savefig(picture, format=path.suffix.lower().removeprefix("."))
    write_whole(path, picture.getvalue())
