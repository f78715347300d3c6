"""Pictures of reports and configurations, drawn by matplotlib into files, as the paper has them.

Nothing is measured here. Each `draw_...` takes what it draws, and the file, whose suffix says its format: .pdf, .png or
.svg. More arguments come after these, such as the `title` above the picture.

Raises:
    BackendUnavailableError: if matplotlib is not installed.
    InvalidValueError: if there is nothing to draw, or the suffix is not known.
    OutputError: if the file cannot be written.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from ucudnn.errors import BackendUnavailableError, InvalidValueError
from ucudnn.plots.bands import (
    AddressPicture,
    MemoryPicture,
    QueuePicture,
    addresses_figure,
    front_figure,
    memory_figure,
    queues_figure,
)
from ucudnn.plots.bars import Bar, configurations_figure, division_figure, groups_figure, layers_figure
from ucudnn.plots.points import desirable_figure
from ucudnn.plots.style import STYLE
from ucudnn.reporting.output_file import check_output, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "AddressPicture",
    "Bar",
    "MemoryPicture",
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
_Drawn = TypeVar("_Drawn")
_More = ParamSpec("_More")


def check_picture(path: Path) -> None:
    """Raise the error that drawing into a file would raise, before anything is measured for the picture."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BackendUnavailableError("pictures need matplotlib: pip install 'ucudnn[plot]'") from error
    if path.suffix.lower().removeprefix(".") not in _FORMATS:
        raise InvalidValueError(f"{path} is no name of a picture: it must end in .{', .'.join(_FORMATS)}")
    check_output(path)


def into_file(
    figure: "Callable[Concatenate[_Drawn, _More], Figure]",
) -> Callable[Concatenate[_Drawn, Path, _More], None]:
    """Return a function that draws a figure into a file, which is written whole or stays as it is."""

    @wraps(figure)
    def draw(drawn: _Drawn, path: Path, /, *more: _More.args, **named: _More.kwargs) -> None:
        check_picture(path)
        if not (any(drawn.values()) if isinstance(drawn, Mapping) else drawn):
            raise InvalidValueError(f"{path}: there is nothing to draw")
        from matplotlib import rc_context

        picture = BytesIO()
        with rc_context(STYLE):
            figure(drawn, *more, **named).savefig(picture, format=path.suffix.lower().removeprefix("."))
        write_whole(path, picture.getvalue())

    return draw


draw_layers = into_file(layers_figure)
draw_division = into_file(division_figure)
draw_desirable = into_file(desirable_figure)
draw_configurations = into_file(configurations_figure)
draw_groups = into_file(groups_figure)
draw_memory = into_file(memory_figure)
draw_front = into_file(front_figure)
draw_queues = into_file(queues_figure)
draw_addresses = into_file(addresses_figure)
