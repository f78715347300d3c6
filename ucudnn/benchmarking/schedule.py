"""Rounds: which sizes and algorithms are measured together, one set after another."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple, final

from ucudnn.benchmarking.pruning import BETWEEN, is_chain
from ucudnn.configuration import MicroConfiguration
from ucudnn.policy import divisions_within, equal_divisions, fitting_size, powers_of_two, varied_sizes
from ucudnn.solvers.desirable import fastest

_PROMISING = 1.05  # algorithms up to so much slower than the best are tried at sizes near the best ones
_MOST_PROMISING = 6
_MOST_FITTED = 4
_HOPEFUL = 1.6  # the same at sizes that lie between those that are known
_MOST_HOPEFUL = 10
_MOST_STEPS = 12  # measurements in search of the largest sizes before a step
_MOST_MISSES = 2
_FLAT = 0.25  # of a gap's height: what lies further from its middle is near one of its ends
_WORTH_A_STEP = 0.99  # of the best configuration's time for each sample
_MOST_ROUNDS = 3  # of varied sizes
_BETTER = 0.998  # of the time before: where a round gains less, it was the last
_DIVISIONS = 12  # equal micro-batches, up to so many, are tried in any case

Round = tuple[Iterable[int], Sequence[str], bool]
"""Sizes, algorithms, and whether a size can be replaced by a larger one that it divides."""


class _Gap(NamedTuple):
    """Sizes between two at which an algorithm is known.

    Attributes:
        hope: time for each sample that may be hoped for.
        size: the one to measure.
        name: the algorithm.
        small_ms: time at the smaller end.
        large_ms: time at the larger end; infinity where it is not known.
    """

    hope: float
    size: int
    name: str
    small_ms: float
    large_ms: float


@final
class Rounds:
    """Says what to measure next by what was measured before.

    Args:
        batch: mini-batch size.
        sizes: micro-batch sizes that are asked for, ascending.
        names: algorithms, most promising first.
        adaptive: whether more sizes are chosen; `sizes` are then what it begins with.
        whole: whether the whole desirable set is wanted, or its fastest configuration.
        micros: what was measured within the limit so far, by size and algorithm.
        tried: sizes that were tried so far.
        fits: whether an algorithm computes a size within the limit.
        compiled: algorithms that take a compiler's time at each size, as far as that is known.
    """

    def __init__(
        self,
        batch: int,
        sizes: Sequence[int],
        names: Sequence[str],
        *,
        adaptive: bool,
        whole: bool,
        micros: Mapping[tuple[int, str], MicroConfiguration],
        tried: Collection[int],
        fits: Callable[[int, str], bool],
        compiled: Collection[str],
    ) -> None:
        self._batch = batch
        self._asked = sizes
        self._names = names
        self._adaptive = adaptive
        self._whole = whole
        self._micros = micros
        self._tried = tried
        self._fits = fits
        self._compiled = compiled
        self._largest: dict[str, int] = {}

    def __iter__(self) -> Iterator[Round]:
        """Return the rounds, each of which is to be measured before the next is asked for."""
        batch = self._batch
        if not self._adaptive and is_chain(self._asked, batch):
            yield self._asked, self._names, True
            return
        ladder = [size for size in powers_of_two(batch) if size in self._asked]
        coarse = is_chain(ladder, batch)
        if coarse or self._adaptive:
            yield ladder, self._names, coarse
        if not self._adaptive:
            yield self._asked, self._names, False
        elif self._whole:
            yield equal_divisions(batch), self._names, True
        else:
            yield self._chosen(), self._promising(_HOPEFUL, _MOST_HOPEFUL), True
            yield from self._before_steps()
            best_ms = inf
            for _ in range(_MOST_ROUNDS):
                best = fastest(self._micros.values(), batch)
                if best is None or best.time_ms > best_ms * _BETTER:
                    return
                best_ms = best.time_ms
                near = varied_sizes(batch, [part.size for part in best.parts])
                new = [size for size in near if size not in self._tried]
                yield new, self._promising(_PROMISING, _MOST_PROMISING), True

    def _chosen(self) -> Iterable[int]:
        """Return equal divisions, and the largest sizes of promising algorithms that fit the limit."""
        batch = self._batch
        best = fastest(self._micros.values(), batch)
        least = min([batch // _DIVISIONS, *(part.size for part in best.parts)] if best is not None else [1])
        found = {size for size in equal_divisions(batch) if size >= least}
        for name in self._promising(_PROMISING, _MOST_FITTED):
            if most := self._most(name):
                found.update(divisions_within(batch, most))
        return sorted(found)

    def _before_steps(self) -> Iterator[Round]:
        """Return rounds of one size and one algorithm each, which close in on the largest sizes before a step.

        A kernel's time grows in steps: a wave of its tiles takes a GPU as long whether or not it fills it. Which sizes
        come right before a step depends on the algorithm. Where one takes no longer at some size than at a smaller one
        that it is known at, and that would be good, what lies between them is halved.
        """
        tried: set[tuple[int, str]] = set()
        misses: Counter[str] = Counter()  # one after another, of an algorithm that may have no steps
        for _ in range(_MOST_STEPS):
            best = fastest(self._micros.values(), self._batch)
            if best is None:
                return
            worth = best.time_ms / self._batch * _WORTH_A_STEP
            gaps = [
                gap
                for gap in self._gaps(worth)
                if (gap.size, gap.name) not in tried and misses[gap.name] < _MOST_MISSES
            ]
            if not gaps:
                return
            gap = min(gaps)
            tried.add((gap.size, gap.name))
            yield [gap.size], [gap.name], True
            misses[gap.name] = 0 if self._is_stepped(gap) else misses[gap.name] + 1

    def _is_stepped(self, gap: "_Gap") -> bool:
        """Whether what was measured inside a gap takes about as long as one of its ends, as between steps."""
        found = self._micros.get((gap.size, gap.name))
        height_ms = gap.large_ms - gap.small_ms
        if found is None or height_ms <= 0:
            return False
        return abs((found.time_ms - gap.small_ms) / height_ms - 0.5) > _FLAT

    def _gaps(self, worth: float) -> Iterator["_Gap"]:
        """Return gaps between sizes at which an algorithm is known, and that up to the largest size that fits.

        At best, all sizes below the larger one take as long as the smaller one.

        Args:
            worth: time for each sample above which nothing is worth while.
        """
        # A compiler takes longer than what there is to gain.
        names = [name for name in self._promising(_HOPEFUL, _MOST_HOPEFUL) if name not in self._compiled]
        known: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
        for (size, name), micro in self._micros.items():
            if name in known and size * _DIVISIONS >= self._batch:
                known[name].append((size, micro.time_ms))
        for name, times in known.items():
            for (small, small_ms), (large, large_ms) in pairwise(sorted(times)):
                hope = max(small_ms / (large - 1), BETWEEN * min(small_ms / small, large_ms / large))
                if large - small > 1 and hope <= worth:
                    yield _Gap(hope, (small + large) // 2, name, small_ms, large_ms)
            size, time_ms = max(times, default=(self._batch, inf))
            least = BETWEEN * time_ms / size
            most = self._most(name) if size < self._batch and least <= worth else 0
            if most > size and (hope := max(time_ms / most, least)) <= worth:
                yield _Gap(hope, most, name, time_ms, inf)

    def _most(self, name: str) -> int:
        """Return the largest size of an algorithm that fits the limit."""
        if name not in self._largest:
            self._largest[name] = fitting_size(self._batch, lambda size: self._fits(size, name)) or 0
        return self._largest[name]

    def _promising(self, factor: float, most: int) -> list[str]:
        """Return the algorithms whose time for each sample comes nearest to the best one's at some size.

        One that does not fit at twice its largest size gets the benefit of the doubt: between these sizes, it may gain
        as much as the best ones do.

        Args:
            factor: how much slower they may be; less, where that takes a compiler.
            most: how many there may be.
        """
        rates: dict[str, float] = {}
        largest: dict[str, tuple[int, float]] = {}
        best: dict[int, float] = {}
        for (size, name), micro in self._micros.items():
            rate = micro.time_ms / size
            rates[name] = min(rates.get(name, rate), rate)
            largest[name] = max(largest.get(name, (0, inf)), (size, rate))
            best[size] = min(best.get(size, rate), rate)
        for name, (size, rate) in largest.items():
            if 2 * size in best and not self._fits(2 * size, name):
                rates[name] = min(rates[name], rate * best[2 * size] / best[size])
        least = min(rates.values(), default=0.0)
        most_ms = {name: least * (_PROMISING if name in self._compiled else factor) for name in rates}
        return sorted((name for name in rates if rates[name] <= most_ms[name]), key=lambda name: rates[name])[:most]
