"""Agreement: what the ranks of a sharded step decide together, so that no collective meets another one.

Ranks measure other times, and have other rooms. So the largest times and the least rooms of all count, one rank plans,
and what one of them refuses all refuse. Arguments may be smaller on some ranks, as in a last mini-batch: these run the
actions of the plan of all on a step of their own, so the order of collectives is the same.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from statistics import median
from time import perf_counter
from typing import Any, TypeVar, final

import torch

from ucudnn.errors import FittedStepError, InvalidValueError, StepGraphError
from ucudnn.memory.plans.actions import COMPUTES
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.sharded import RankLink
from ucudnn.memory.torch.device.stated_budget import StatedBudget

_Found = TypeVar("_Found")
Exchange = Callable[[Any], list[Any]]
"""Returns what all ranks give it, in their order."""


@final
class Agreement:
    """Decides with other ranks, with which a function exchanges values, or alone where there are none.

    Attributes:
        link: how long collectives take; None where there are none.
        follows: the plan of all ranks while this one plans or runs smaller arguments than others: nothing is decided
            together then, and what is planned does what that plan does. None otherwise.
    """

    def __init__(self, exchange: Exchange | None = None, rank: int = 0, link: RankLink | None = None) -> None:
        self._exchange, self._rank, self.link = exchange, rank, link
        self.follows: MemoryPlan | None = None
        self._raised: BaseException | None = None  # by all ranks, in their last exchange

    @property
    def alone(self) -> bool:
        """Whether there are no other ranks."""
        return self._exchange is None

    def all(self, work: Callable[[], _Found]) -> _Found:
        """Return what a function returns, when it has ended on all ranks.

        Raises:
            Exception: what a rank has raised, on all of them; its message names the rank.
        """
        exchange = self._exchange_now
        if exchange is None:
            return work()
        found: _Found
        failed: Exception | None = None
        try:
            found = work()
        except Exception as error:  # noqa: BLE001  # the others wait
            failed = error
        exchange(None if failed is None else _sent(failed))
        if failed is not None:
            self._raised = failed
            raise failed
        return found

    def refuse(self, error: Exception) -> bool:
        """Return whether all ranks raise an error: they have decided so, or hear of it in their next exchange."""
        chain: BaseException | None = error
        raised, self._raised = self._raised, None
        while chain is not None:
            if chain is raised:
                return True
            chain = chain.__context__
        try:
            self._given(_sent(error))
        except FittedStepError:  # another rank has ended
            return False
        return True

    def every(self, value: _Found) -> list[_Found]:
        """Return what all ranks give, in their order."""
        return [value] if (exchange := self._exchange_now) is None else exchange(value)

    def costs(self, graph: StepGraph, costs: Costs) -> Costs:
        """Return the costs by which all ranks plan a step: the largest of all ranks.

        Raises:
            InvalidValueError: if a rank has another step.
        """
        costs = costs if self.link is None else self.link.costs(graph, costs)
        if (exchange := self._exchange_now) is None:
            return costs
        self.check_same(structure(graph), "step")
        every: list[Costs] = exchange(costs)
        alike = all(each.scratch_pieces == every[0].scratch_pieces for each in every)
        found: dict[str, Any] = {"scratch_pieces": every[0].scratch_pieces if alike else {}}
        for name in ("time_ms", "scratch_bytes", "issue_ms"):
            found[name] = tuple(map(max, zip(*(getattr(each, name) for each in every), strict=True)))
        for name in ("offload_bytes_per_ms", "prefetch_bytes_per_ms", "memory_bytes"):
            found[name] = min(getattr(each, name) for each in every)
        return replace(every[0], **found, contention=max(each.contention for each in every))

    def stated(self, stated: StatedBudget) -> StatedBudget:
        """Return the budget of the rank that it leaves the fewest bytes for tensors."""
        if (exchange := self._exchange_now) is None or stated.budget is None:
            return stated
        every: list[StatedBudget] = exchange(stated)
        return min(every, key=lambda each: each.tensor_bytes or 0)

    def plan(self, make: Callable[[], MemoryPlan], graph: StepGraph) -> MemoryPlan:
        """Return the plan that the first rank makes, or for smaller arguments one that does what the plan of all does.

        Raises:
            BudgetError: likewise.
            InvalidValueError: if smaller arguments make a step of other operations.
        """
        if self.follows is not None:
            if structure(graph) != structure(self.follows.graph):
                raise InvalidValueError(
                    "these arguments make a step of other operations than the sample, whose plan all ranks follow: give"
                    " all ranks mini-batches of one size, as by DataLoader(drop_last=True)"
                )
            return replace(self.follows, graph=graph, moves={})
        if (exchange := self._exchange_now) is None:
            return make()
        own = self.all(make if self._rank == 0 else lambda: None)
        told = exchange(None if own is None else _told(own))[0]
        return own if own is not None else MemoryPlan(graph=graph, **told)

    def check_same(self, value: str, what: str) -> None:
        """Check that all ranks have the same text.

        Raises:
            InvalidValueError: on all ranks, which names those that differ from the first one.
        """
        if (exchange := self._exchange_now) is None:
            return
        every = exchange(_digest(value))
        if others := [str(rank) for rank, each in enumerate(every) if each != every[0]]:
            self._raised = InvalidValueError(
                f"rank {' and '.join(others)}: another {what} than rank 0, so collectives would not meet: give all"
                " ranks the same model, and samples and optimizers of one form"
            )
            raise self._raised

    @property
    def _exchange_now(self) -> Exchange | None:
        return self._given if self._exchange is not None and self.follows is None else None

    def _given(self, value: Any) -> list[Any]:
        """Return what all ranks give; an error that one gives is raised by those that give none."""
        assert self._exchange is not None
        every, self._raised = self._exchange(value), None
        for rank, error in enumerate(every):
            if isinstance(error, Exception) and not isinstance(value, Exception):
                error.args = (f"rank {rank}: {error}", *error.args[1:])
                self._raised = error
                raise error
        return every


def structure(graph: StepGraph) -> str:
    """Return what is the same in steps whose arguments differ in sizes alone."""
    rows = [(each.kind, each.phase, each.reads, each.writes, each.repeatable) for each in graph.operations]
    return str([*rows, *(each.role for each in graph.storages)])


def collectives_of(plan: MemoryPlan, *, averages: bool = True) -> int:
    """Return a number that stands for the collectives of a plan in order, and those of averages behind it.

    It must be the same on all ranks.
    """
    found = plan.graph.collectives
    order = [target for kind, target in plan.actions if kind in COMPUTES and target in found]
    return 1 + int(_digest(str([*order, averages]))[:15], 16)


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _told(plan: MemoryPlan) -> Mapping[str, Any]:
    """Return what another rank needs of a plan: it has the graph."""
    names = ("policy", "actions", "budget", "configurations", "buffers", "scratch_buffer", "overlapped", "moves")
    return {name: getattr(plan, name) for name in names}


def _sent(error: Exception) -> Any:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  # an error of somebody else, which only this process can make
        return StepGraphError(f"{type(error).__name__}: {error}")
    return error


_SMALL, _LARGE = 1 << 10, 1 << 24  # bytes of a rank that are gathered to be timed
_REPEATS = 5


def measured_link(gather: Callable[[torch.Tensor], object], ranks: int, device: torch.device) -> RankLink:
    """Return the link as all-gathers of two sizes show it on this rank; all ranks measure together.

    Nothing is measured on a CPU, whose link is assumed.
    """
    if device.type != "cuda" or ranks == 1:
        return RankLink(ranks=ranks)
    seconds = []
    for size in (_SMALL, _LARGE):
        own, times = torch.zeros(size, dtype=torch.uint8, device=device), []
        for _ in range(_REPEATS + 1):  # the first one connects the ranks
            torch.cuda.synchronize(device)
            begin = perf_counter()
            gather(own)
            torch.cuda.synchronize(device)
            times.append(perf_counter() - begin)
        seconds.append(median(times[1:]))
    torch.cuda.empty_cache()
    others, (small, large) = ranks - 1, (1e3 * each for each in seconds)
    bandwidth = others * (_LARGE - _SMALL) / max(large - small, 1e-3)
    return RankLink(ranks=ranks, latency_ms=small / others, bytes_per_ms=bandwidth, source="measured")


def slowest(links: Sequence[RankLink]) -> RankLink:
    """Return a link that is as slow as the slowest of several in each number."""
    return replace(
        links[0],
        latency_ms=max(each.latency_ms for each in links),
        bytes_per_ms=min(each.bytes_per_ms for each in links),
    )
