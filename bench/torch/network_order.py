"""The cells of `bench.torch.networks`: which of them come first, and how long each takes. Not a script."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from statistics import fmean, pstdev
from typing import Any, NamedTuple

MARGIN = 1.25
"""By how much longer than the last time a cell may take."""

APART_S = 1800
"""How far apart the cells of a group may end, in seconds: a machine is mostly the same for so long."""

Claim = tuple[int, str, str]
"""A rank, a network and a form."""

_RANKS = (("stock", "auto"), ("stock-off", "auto-off"))
_LIMITS = len(_RANKS)


def stock_of(setting: str) -> str:
    """Return the setting of PyTorch alone with the same `cudnn.benchmark`."""
    return "stock-off" if setting.endswith("-off") else "stock"


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
    def claim(self) -> Claim:
        """Return what the cell is a part of: a rank, and the network and form that are compared with PyTorch alone.

        Claims of a lower rank come first: PyTorch alone and `auto`, then both without `cudnn.benchmark`, and then
        stated limits and all others.
        """
        rank = next((rank for rank, settings in enumerate(_RANKS) if self.setting in settings), _LIMITS)
        return rank, self.network, self.form


def groups(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Return cells in the order in which they are measured; those of a group are measured one after the other.

    All repeats of a claim come before the next claim begins, and of claims of a rank those come first of which the
    fewest cells are left. A group is one repeat of a claim. So PyTorch alone and `auto` meet the same state of the same
    GPU. Cells of stated limits are groups of their own.
    """
    found = list(cells)
    compared = {cell.claim for cell in found if not cell.setting.startswith("stock")}
    claims = {cell: _alternating(cell, compared) for cell in found}
    left = Counter(claims.values())
    begins = {claim: number for number, claim in enumerate(left)}

    places = {cell: number for number, cell in enumerate(found)}

    def place(cell: Cell) -> tuple[int, int, int, int, int]:
        claim = claims[cell]
        return claim[0], left[claim], begins[claim], cell.repeat, places[cell] * (claim[0] == _LIMITS)

    return [list(group) for _, group in groupby(sorted(found, key=place), key=place)]


def _alternating(cell: Cell, compared: Collection[Claim]) -> Claim:
    """Return the claim of a cell; PyTorch alone goes with stated limits if nothing else is left to compare with it."""
    limits = (_LIMITS, cell.network, cell.form)
    joins = cell.setting == "stock" and cell.claim not in compared and limits in compared
    return limits if joins else cell.claim


def together(todo: Collection[Cell], every: Collection[Cell], ended: Mapping[str, float], now: float) -> list[Cell]:
    """Return what is to be measured, with all that belongs to the same groups and was measured much earlier.

    Otherwise PyTorch alone on one machine would be compared with `auto` on another one, whose host may be slower. That
    one of a group is older than the others happens also where a call was stopped between them.

    Args:
        todo: cells that are missing.
        every: the cells of a call, in their order, without those that are not to be measured at all.
        ended: when the cells that are kept ended, in seconds since 1970; 0 if nobody knows.
        now: the present, in the same way.
    """
    times = {cell: now if cell in todo else ended[str(cell)] for cell in every}
    latest = {cell: max(map(times.__getitem__, group)) for group in groups(every) for cell in group}
    return [cell for cell in every if cell in todo or latest[cell] - times[cell] > APART_S]


def progress(every: Iterable[Cell], left: Collection[Cell]) -> str:
    """Return how many claims are complete, among all cells of a call of which some are left."""
    claims, open_ = {cell.claim for cell in every}, {cell.claim for cell in left}
    return f"{len(claims - open_)} of {len(claims)} comparisons complete"


class Durations:
    """How long processes of cells take, in seconds.

    Args:
        cases: what is kept, void or not.
        otherwise: what a cell is taken to last when nothing like it is known; no cell lasts longer.
    """

    def __init__(self, cases: Mapping[str, Any], otherwise: float) -> None:
        self._otherwise = otherwise
        self._known = {
            Cell(network, form, setting, int(repeat)): float(case["process_s"])
            for (network, form, setting, repeat), case in ((name.split(), case) for name, case in cases.items())
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
