"""Shares: which problems each of several sharers has, so that none begins with what another will measure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from threading import Lock
from typing import final

from ucudnn.benchmarking.request import Request
from ucudnn.problem import ConvolutionProblem, Operation

_EACH_SIZE = 10**10
"""Multiplications in whose time an H200 is through with what measuring a micro-batch size takes besides: of AlexNet's
kernels, each takes 0.01 s for each size, and as long for 10 to the 10."""

_FEWEST = 16
"""Channels, and filters, of a group that count at least: fewer take a GPU's matrix units as long, and many an algorithm
is slow with them. Of AlexNet's kernels, none takes as long to measure as the first one's input gradient."""

_OPERATIONS = list(Operation)

Choose = Callable[[Sequence[ConvolutionProblem]], int | None]
"""Returns the index of the problem to take next, or None where whoever asks takes none any more."""


@dataclass(frozen=True, slots=True)
class Group:
    """Requests of one problem, which stay together: what is measured for one is not measured for the others.

    Attributes:
        requests: at least one.
        cost: about how long they take, beside others.
    """

    requests: tuple[Request, ...]
    cost: int

    @property
    def problem(self) -> ConvolutionProblem:
        """What they are requests of."""
        return self.requests[0].problem


@final
class Shares:
    """Groups that nobody has taken so far. Several threads may ask.

    A sharer takes its own. Once it has none, it takes the cheapest of the sharer that has most left.

    Args:
        shares: the groups of each sharer.
    """

    def __init__(self, shares: Sequence[Sequence[Group]]) -> None:
        self._shares = [list(share) for share in shares]
        self._lock = Lock()

    def __bool__(self) -> bool:
        return any(self._shares)

    def of(self, sharer: int) -> Sequence[Group]:
        """Return what is left of a share."""
        with self._lock:
            return tuple(self._shares[sharer])

    def take(self, sharer: int, choose: Choose) -> Group | None:
        """Return a group, or None where there are none, or the sharer takes none.

        Args:
            sharer: index of the share.
            choose: says which of its own; others may take it meanwhile.
        """
        while own := self.of(sharer):
            index = choose([group.problem for group in own])
            if index is None:
                return None
            with self._lock:
                if own[index] in self._shares[sharer]:
                    self._shares[sharer].remove(own[index])
                    return own[index]
        with self._lock:
            other = self._fullest()
            found = _cheapest(other)
            if found is not None:
                other.remove(found)
            return found

    def ahead(self, sharer: int) -> Group | None:
        """Return what a sharer whose own share is taken would take next; None as long as there is some of its own."""
        with self._lock:
            return None if self._shares[sharer] else _cheapest(self._fullest())

    def give_back(self, sharer: int, group: Group) -> None:
        """Leave a group to somebody else."""
        with self._lock:
            self._shares[sharer].append(group)

    def clear(self) -> None:
        """Leave what is left to nobody."""
        with self._lock:
            for share in self._shares:
                share.clear()

    def _fullest(self) -> list[Group]:
        return max(self._shares, key=lambda share: sum(group.cost for group in share))


def dealt(requests: Sequence[Request], count: int) -> list[list[Group]]:
    """Return `count` shares that cost about the same, each with the costliest first."""
    shares: list[list[Group]] = [[] for _ in range(count)]
    totals = [0] * count
    for group in sorted(_grouped(requests), key=attrgetter("cost"), reverse=True):
        least = totals.index(min(totals))
        shares[least].append(group)
        totals[least] += group.cost
    return shares


def gathered(requests: Sequence[Request], count: int) -> list[list[Group]]:
    """Return `count` shares, each with the costliest first, in which those of an operation are together as they can be.

    Operations have kernels of their own, and whoever measures some loads each first. Costs differ by more than where
    they are `dealt`: sharers should take from each other.
    """
    groups = sorted(_grouped(requests), key=lambda group: _OPERATIONS.index(group.problem.operation))
    total = sum(group.cost for group in groups)
    shares: list[list[Group]] = [[] for _ in range(count)]
    before = 0
    for group in groups:
        middle = (2 * before + group.cost) * count // max(1, 2 * total)
        shares[min(middle, count - 1)].append(group)
        before += group.cost
    if len(groups) >= count and not all(shares):
        return dealt(requests, count)
    return [sorted(share, key=attrgetter("cost"), reverse=True) for share in shares]


def divided(requests: Sequence[Request], count: int) -> list[list[Group]]:
    """Return `count` shares with a part of each request; the first has the smallest size, of which there may be slabs.

    Each part has every count-th size; a share may have none.
    """
    return [
        _grouped(
            [
                replace(request, sizes=sizes, adaptive=False, rows=() if index else request.rows)
                for request in requests
                if (sizes := request.sizes[index::count])
            ]
        )
        for index in range(count)
    ]


def requests_in(groups: Iterable[Group]) -> list[Request]:
    """Return the requests of several groups, in order."""
    return [request for group in groups for request in group.requests]


def _grouped(requests: Sequence[Request]) -> list[Group]:
    groups: dict[ConvolutionProblem, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.problem, []).append(request)
    return [Group(tuple(group), sum(map(_cost, group))) for group in groups.values()]


def _cost(request: Request) -> int:
    problem = request.problem
    channels, filters = problem.channels // problem.groups, problem.filters // problem.groups
    padded = max(channels, _FEWEST) * max(filters, _FEWEST)
    each = problem.multiplications // (problem.batch * channels * filters) * padded
    return each * sum(request.sizes) + _EACH_SIZE * len(request.sizes)


def _cheapest(share: Sequence[Group]) -> Group | None:
    return min(share, key=attrgetter("cost"), default=None)
