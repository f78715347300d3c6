"""The cells of `bench.torch.networks`: which of them come first, and how long each takes. Not a script."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from statistics import fmean, pstdev
from typing import Any, NamedTuple

MARGIN = 1.25
"""By how much longer than the last time a cell may take."""


class Cell(NamedTuple):
    """One process: a network in a form under a setting, for the n-th time."""

    network: str
    form: str
    setting: str
    repeat: int

    def __str__(self) -> str:
        """Return the name under which the cell is kept."""
        return f"{self.network} {self.form} {self.setting} {self.repeat}"

    @property
    def wave(self) -> tuple[int, int]:
        """Return a rank: cells are measured in its order, over all networks and forms.

        A repeat comes after the one before it. In each, PyTorch alone and `auto` come first, then both without
        `cudnn.benchmark`, and then stated limits and all others.
        """
        order = (("stock", "auto"), ("stock-off", "auto-off"))
        return self.repeat, next((rank for rank, settings in enumerate(order) if self.setting in settings), len(order))


def groups(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Return cells in the order in which they are measured; those of a group are measured one after the other.

    A group is a network in a form in a wave. So PyTorch alone and `auto` meet the same state of the same GPU.
    """
    ranked = sorted(cells, key=lambda cell: cell.wave)
    return [list(group) for _, group in groupby(ranked, key=lambda cell: (cell.wave, cell.network, cell.form))]


class Durations:
    """How long processes of cells take, in seconds.

    Args:
        cases: what is kept, void or not.
        otherwise: what a cell is taken to last when nothing like it is known; no cell lasts longer.
    """

    def __init__(self, cases: Mapping[str, Any], otherwise: float) -> None:
        self._otherwise = otherwise
        self._known = {
            Cell(*parts[:3], int(parts[3])): float(case["process_s"])
            for parts, case in ((name.split(), case) for name, case in cases.items())
            if "error" not in case and "process_s" in case
        }

    def learn(self, cell: Cell, seconds: float) -> None:
        """Take note of how long a cell took; other threads may ask meanwhile."""
        self._known = {**self._known, cell: seconds}

    def of(self, cell: Cell) -> float:
        """Return what a cell took last, else the mean of its repeats, else that of its setting, else the most."""
        return fmean(self._like(cell))

    def most(self, cell: Cell) -> float:
        """Return the most seconds that a cell may take: its expected time, its spread, and a margin."""
        like = self._like(cell)
        return min(self._otherwise, MARGIN * (fmean(like) + pstdev(like)))

    def _like(self, cell: Cell) -> list[float]:
        known = self._known
        if cell in known:
            return [known[cell]]
        repeats = [seconds for each, seconds in known.items() if each[:3] == cell[:3]]
        return repeats or [s for each, s in known.items() if each.setting == cell.setting] or [self._otherwise]
