"""The partition of requests into shares: no process begins with what another one will measure."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import final

from ucudnn.backends.fork_locks import LockLevel, new_lock
from ucudnn.benchmarking.request import Request
from ucudnn.problem import ConvolutionProblem, Operation

_EACH_SIZE = 10**10
"""The cost of a micro-batch size beside its multiplications, in multiplications: each kernel of AlexNet takes an H200
0.01 s for each size, and as long for 10 to the 10 multiplications."""

_FEWEST = 16
"""The least number of channels, and of filters, of a group that is counted. Fewer take a GPU's matrix units as long,
and many algorithms are slow with them: the input gradient of AlexNet's first layer takes longest to measure."""

_OPERATIONS = list(Operation)

Choose = Callable[[Sequence[ConvolutionProblem]], int | None]
"""A function that returns the index of the problem to take next, or None if the process takes no more problems."""


@dataclass(frozen=True, slots=True)
class Group:
    """Requests of one problem, and about how long they take. They stay together, because they share measurements."""

    requests: tuple[Request, ...]
    cost: int

    @property
    def problem(self) -> ConvolutionProblem:
        """The problem of all requests."""
        return self.requests[0].problem


@final
class Partition:
    """The shares of several processes, without the groups that were taken. Several threads may use it.

    A process takes its own groups first. Then it takes the cheapest group of the process that has most left.
    """

    def __init__(self, shares: Sequence[Sequence[Group]]) -> None:
        self._shares = [list(share) for share in shares]
        self._lock = new_lock(LockLevel.INNERMOST)

    def __bool__(self) -> bool:
        return any(self._shares)

    def of(self, index: int) -> Sequence[Group]:
        """Return the rest of a process's share."""
        with self._lock:
            return tuple(self._shares[index])

    def take(self, index: int, choose: Choose) -> Group | None:
        """Return a group, or None if there are no more, or the process takes no more.

        `choose` chooses one of the process's own groups. Other processes may take groups in the meantime.
        """
        while own := self.of(index):
            chosen = choose([group.problem for group in own])
            if chosen is None:
                return None
            with self._lock:
                if own[chosen] in self._shares[index]:
                    self._shares[index].remove(own[chosen])
                    return own[chosen]
        with self._lock:
            other = self._fullest()
            found = _cheapest(other)
            if found is not None:
                other.remove(found)
            return found

    def groups(self, index: int, begin: Callable[[list[Request]], None], choose: Choose) -> Iterator[Group]:
        """Yield the groups that a process takes until there are no more, or it takes no more.

        `begin` hears in time what the process will measure: its own share at first, then what it takes from others.
        """
        begin(requests_in(self.of(index)))
        while (group := self.take(index, choose)) is not None:
            if (ahead := self.ahead(index)) is not None:
                begin(requests_in([group, ahead]))
            yield group

    def ahead(self, index: int) -> Group | None:
        """Return the group that a process takes next from others, or None as long as it has groups of its own."""
        with self._lock:
            return None if self._shares[index] else _cheapest(self._fullest())

    def give_back(self, index: int, group: Group) -> None:
        """Return a group to a process's share, so that another process can take it."""
        with self._lock:
            self._shares[index].append(group)

    def clear(self) -> None:
        """Drop all groups that are left."""
        with self._lock:
            for share in self._shares:
                share.clear()

    def _fullest(self) -> list[Group]:
        return max(self._shares, key=lambda share: sum(group.cost for group in share))


def balanced(requests: Sequence[Request], count: int) -> list[list[Group]]:
    """Return `count` shares of about the same cost, each with its costliest group first."""
    shares: list[list[Group]] = [[] for _ in range(count)]
    totals = [0] * count
    for group in sorted(_grouped(requests), key=attrgetter("cost"), reverse=True):
        least = totals.index(min(totals))
        shares[least].append(group)
        totals[least] += group.cost
    return shares


def by_operation(requests: Sequence[Request], count: int) -> list[list[Group]]:
    """Return `count` shares with as few operations in each as possible, each with its costliest group first.

    Operations have kernels of their own, and each process loads the kernels that it measures. The costs of these shares
    differ by more than those of `balanced` shares, so processes should take groups from each other.
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
        return balanced(requests, count)
    return [sorted(share, key=attrgetter("cost"), reverse=True) for share in shares]


def requests_in(groups: Iterable[Group]) -> list[Request]:
    """Return the requests of several groups in order."""
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
    """Return the cheapest group; among equal ones the last, which its owner would take last."""
    return min(reversed(share), key=attrgetter("cost"), default=None)
