"""Pictures: reports and configurations drawn into files by matplotlib. Nothing is measured here.

Figures are those of the paper.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from ucudnn.configuration import Configuration
from ucudnn.errors import BackendUnavailableError, InvalidValueError
from ucudnn.plots.bars import Bar, configurations_figure, division_figure, groups_figure, layers_figure
from ucudnn.plots.points import desirable_figure
from ucudnn.plots.style import STYLE
from ucudnn.reporting.output_file import check_output, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Bar",
    "check_picture",
    "draw_configurations",
    "draw_desirable",
    "draw_division",
    "draw_groups",
    "draw_layers",
]

_FORMATS = ("pdf", "png", "svg")


def draw_layers(bars: Sequence[Bar], path: Path, *, title: str = "") -> None:
    """Draw where the milliseconds go: a stack for each report, a piece for each layer and operation.

    Times are those that were executed, or else the predicted ones, each kernel as often as it occurs.

    Args:
        bars: labels and reports; bars whose labels begin with the same line stand together.
        path: file to write; its suffix says in which format: .pdf, .png or .svg.
        title: above the picture.

    Raises:
        BackendUnavailableError: if matplotlib is not installed.
        InvalidValueError: if there is nothing to draw.
        OutputError: if the file cannot be written.
    """
    _write(path, bars, lambda: layers_figure(bars, title))


def draw_division(bars: Sequence[Bar], path: Path, *, title: str = "") -> None:
    """Draw where the workspace goes, in MiB (figure 13); else as `draw_layers`."""
    _write(path, bars, lambda: division_figure(bars, title))


def draw_desirable(front: Sequence[Configuration], path: Path, *, title: str = "", kind: str = "predicted") -> None:
    """Draw workspace against time of a desirable set, in its order, and how it divides the mini-batch (figure 8).

    Times are called what `kind` says.
    """
    _write(path, front, lambda: desirable_figure(front, title, kind))


def draw_configurations(
    rows: Sequence[tuple[str, Configuration]], path: Path, *, title: str = "", kind: str = "predicted"
) -> None:
    """Draw milliseconds of labelled configurations, from the top, a piece for each micro-batch (figure 9).

    Times are called what `kind` says.
    """
    _write(path, rows, lambda: configurations_figure(rows, title, kind))


def draw_groups(
    labels: Sequence[str], series: Mapping[str, Sequence[float | None]], path: Path, *, ylabel: str, title: str = ""
) -> None:
    """Draw groups of bars side by side (figure 1): of each series, by its name, one for each label, or none."""
    _write(path, labels, lambda: groups_figure(labels, series, ylabel, title))


def check_picture(path: Path) -> None:
    """Raise what drawing into a file would raise, before anything is measured for it.

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
