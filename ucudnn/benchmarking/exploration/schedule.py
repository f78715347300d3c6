"""The schedule of an exploration: which sizes and algorithms are measured together, one round after another."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple, final

from ucudnn.benchmarking.exploration.pruning import BETWEEN, is_chain
from ucudnn.benchmarking.exploration.state import State
from ucudnn.policy import divisions_within, equal_divisions, fitting_size, powers_of_two, varied_sizes
from ucudnn.solvers.desirable import fastest

_PROMISING = 1.05  # algorithms that are slower than the best by less are tried near the best sizes
_MOST_PROMISING = 6
_MOST_FITTED = 4
_HOPEFUL = 1.6  # algorithms that are slower than the best by less are tried between known sizes
_MOST_HOPEFUL = 10
_MOST_STEPS = 12  # measurements that look for the largest size before a step
_MOST_MISSES = 2
_FLAT = 0.25  # a time this far from the middle of a gap, in parts of its height, is near one of the gap's ends
_WORTH_A_STEP = 0.99  # a step must promise a time of a sample below so much of the best configuration's
_MOST_ROUNDS = 3  # rounds of varied sizes
_BETTER = 0.998  # a round that leaves more than this of the time before is the last one
_DIVISIONS = 12  # up to so many equal micro-batches are tried in any case


class Round(NamedTuple):
    """Sizes and algorithms that are measured together.

    In a chain, two micro-batches of a size can always be replaced by one of the next larger size.
    """

    sizes: Sequence[int]
    names: Sequence[str]
    chain: bool


class _Gap(NamedTuple):
    """The sizes between two known sizes of an algorithm, and the time of a sample that may be hoped for in the middle.

    The time at the larger end is infinite if it is not known.
    """

    hope: float
    size: int
    name: str
    small_ms: float
    large_ms: float


@final
class Schedule:
    """Decides what to measure next by what was measured before. It only reads the state."""

    def __init__(self, known: State) -> None:
        self._request = known.request
        self._batch = known.request.problem.batch
        self._names = known.names
        self._known = known
        self._largest: dict[str, int] = {}

    def __iter__(self) -> Iterator[Round]:
        """Return the rounds. Each has to be measured before the next one is asked for."""
        batch, asked, adaptive = self._batch, self._request.sizes, self._request.adaptive
        if not adaptive and is_chain(asked, batch):
            yield Round(asked, self._names, True)
            return
        ladder = [size for size in powers_of_two(batch) if size in asked]
        coarse = is_chain(ladder, batch)
        if coarse or adaptive:
            yield Round(ladder, self._names, coarse)
        if not adaptive:
            yield Round(asked, self._names, False)
        elif self._request.whole:
            yield Round(equal_divisions(batch), self._names, True)
        else:
            yield Round(self._chosen(), self._promising(_HOPEFUL, _MOST_HOPEFUL), True)
            yield from self._before_steps()
            yield from self._near_the_best()

    def _near_the_best(self) -> Iterator[Round]:
        """Return rounds of sizes near those of the fastest configuration, as long as they make it faster."""
        best_ms = inf
        for _ in range(_MOST_ROUNDS):
            best = fastest(self._known.micros.values(), self._batch)
            if best is None or best.time_ms > best_ms * _BETTER:
                return
            best_ms = best.time_ms
            near = varied_sizes(self._batch, [part.size for part in best.parts])
            new = [size for size in near if size not in self._known.tried]
            yield Round(new, self._promising(_PROMISING, _MOST_PROMISING), True)

    def _chosen(self) -> list[int]:
        """Return sizes of equal divisions, and the largest sizes at which promising algorithms fit the limit."""
        batch = self._batch
        best = fastest(self._known.micros.values(), batch)
        least = min([batch // _DIVISIONS, *(part.size for part in best.parts)] if best is not None else [1])
        found = {size for size in equal_divisions(batch) if size >= least}
        for name in self._promising(_PROMISING, _MOST_FITTED):
            if most := self._most(name):
                found.update(divisions_within(batch, most))
        return sorted(found)

    def _before_steps(self) -> Iterator[Round]:
        """Return rounds of one size and one algorithm each, which look for the largest sizes before a step.

        A kernel's time grows in steps, because a wave of its tiles takes a GPU the same time whether or not it fills
        the GPU. The sizes before a step depend on the algorithm. A gap between two known sizes of an algorithm is
        halved as long as it would be good if the time did not grow up to its larger end.
        """
        tried: set[tuple[int, str]] = set()
        misses: Counter[str] = Counter()  # in sequence; the algorithm may have no steps
        for _ in range(_MOST_STEPS):
            best = fastest(self._known.micros.values(), self._batch)
            if best is None:
                return
            worth_ms = best.time_ms / self._batch * _WORTH_A_STEP
            gaps = [
                gap
                for gap in self._gaps(worth_ms)
                if (gap.size, gap.name) not in tried and misses[gap.name] < _MOST_MISSES
            ]
            if not gaps:
                return
            gap = min(gaps)
            tried.add((gap.size, gap.name))
            yield Round([gap.size], [gap.name], True)
            misses[gap.name] = 0 if self._is_stepped(gap) else misses[gap.name] + 1

    def _is_stepped(self, gap: "_Gap") -> bool:
        """Whether the size that was measured in a gap takes about as long as one of the gap's ends."""
        found = self._known.micros.get((gap.size, gap.name))
        height_ms = gap.large_ms - gap.small_ms
        if found is None or height_ms <= 0:
            return False
        return abs((found.time_ms - gap.small_ms) / height_ms - 0.5) > _FLAT

    def _gaps(self, worth_ms: float) -> Iterator["_Gap"]:
        """Return the gaps between known sizes of an algorithm, and the gap up to the largest size that fits.

        At best, all sizes below the larger end take as long as the smaller end. Gaps are left out in which a sample
        takes more than `worth_ms` even so.
        """
        # Compiling takes longer than a step can gain.
        names = [name for name in self._promising(_HOPEFUL, _MOST_HOPEFUL) if name not in self._known.compiled]
        known: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
        for (size, name), micro in self._known.micros.items():
            if name in known and size * _DIVISIONS >= self._batch:
                known[name].append((size, micro.time_ms))
        for name, times in known.items():
            for (small, small_ms), (large, large_ms) in pairwise(sorted(times)):
                hope = max(small_ms / (large - 1), BETWEEN * min(small_ms / small, large_ms / large))
                if large - small > 1 and hope <= worth_ms:
                    yield _Gap(hope, (small + large) // 2, name, small_ms, large_ms)
            size, time_ms = max(times, default=(self._batch, inf))
            least = BETWEEN * time_ms / size
            most = self._most(name) if size < self._batch and least <= worth_ms else 0
            if most > size and (hope := max(time_ms / most, least)) <= worth_ms:
                yield _Gap(hope, most, name, time_ms, inf)

    def _most(self, name: str) -> int:
        if name not in self._largest:
            self._largest[name] = fitting_size(self._batch, lambda size: self._known.fits(size, name)) or 0
        return self._largest[name]

    def _promising(self, factor: float, most: int) -> list[str]:
        """Return at most so many algorithms with the least times of a sample at any size, the fastest first.

        They are up to `factor` times as slow as the best, and those that have to be compiled up to _PROMISING times. An
        algorithm that does not fit at twice its largest size gets the benefit of the doubt: it is taken to gain as much
        from twice the size as the best algorithms do.
        """
        rates: dict[str, float] = {}
        largest: dict[str, tuple[int, float]] = {}
        best: dict[int, float] = {}
        for (size, name), micro in self._known.micros.items():
            rate = micro.time_ms / size
            rates[name] = min(rates.get(name, rate), rate)
            largest[name] = max(largest.get(name, (0, inf)), (size, rate))
            best[size] = min(best.get(size, rate), rate)
        for name, (size, rate) in largest.items():
            if 2 * size in best and not self._known.fits(2 * size, name):
                rates[name] = min(rates[name], rate * best[2 * size] / best[size])
        least = min(rates.values(), default=0.0)
        most_ms = {name: least * (_PROMISING if name in self._known.compiled else factor) for name in rates}
        return sorted((name for name in rates if rates[name] <= most_ms[name]), key=lambda name: rates[name])[:most]
