"""Heuristic mode: plans without a measured time, by the order of heuristics, by workspaces and by assumed times.

Problems that must repeat to the bit get such plans, because a measured time differs from run to run, so a plan that
depends on it does, too. Others get them where nothing is measured before the first run. A plan depends on nothing but
the problem, the limit and the policy, and on what the backend lists. It assumes a time for each algorithm
(`assumed_ms`). For each micro-batch size it takes the algorithm with the least, of those whose workspace fits. Of the
sizes it takes the one whose micro-batches take the least in sum; of equals the larger size. Where no sample fits, it
takes slabs. On the recorded H200 such plans take 1.09 times the time of measured ones at 64 MiB, in the geometric mean
of 117 kernels, and 1.15 times at 8 MiB. The first algorithm that fits undivided takes 1.43 and 1.32 times
(`tests/benchmarking/unmeasured/test_heuristic_mode.py`).

What it chooses for a problem that must repeat is run once, and its output is checked as in a benchmark. An algorithm
that fails is left out. Other problems wait for no check, as in PyTorch, which runs what the heuristics name. Nor do
they wait for all heuristics: they take the plan of the same convolution at a nearby size of its images, and else what
can be had of the first algorithms. All are looked at where these promise little: where none of them fits, where a whole
mini-batch without tensor cores is assumed to take less, or where it is what fits, but takes much longer than with them.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from math import fsum, inf, log, prod
from operator import attrgetter
from typing import NamedTuple, final

from ucudnn.backends.base import Backend
from ucudnn.benchmarking.findings import with_slab_names
from ucudnn.benchmarking.request import Request
from ucudnn.benchmarking.unmeasured.untimed_division import (
    assumed,
    computed_pieces,
    in_slabs,
    least_ms,
    plain_ms,
    ranked,
)
from ucudnn.bounded import BoundedDict
from ucudnn.configuration import Configuration, MicroConfiguration, SlabConfiguration
from ucudnn.errors import BackendError, MeasurementError
from ucudnn.policy import powers_of_two
from ucudnn.problem import ConvolutionProblem
from ucudnn.slabs import Slab, piece_of
from ucudnn.solvers.sums import MOST_PARTS

MOST_APART = 2.0
"""The most by which the points of two images may differ, as a multiple."""

_LEAST_SHARE = 0.8  # of the limit for each point, because spare memory is rounded down to an eighth of it
_MOST_TRIED = 3
_MOST_SIZES = 64
_MOST_KINDS = 1 << 12
_OF_SIZE = {"spatial", *(f"{tensor}_{of}_stride" for tensor in "xy" for of in ("batch", "channel"))}
_OTHERWISE = attrgetter(*(f.name for f in fields(ConvolutionProblem) if f.compare and f.name not in _OF_SIZE))


class _Known(NamedTuple):
    """What a size took: the limit within which it did, the points of its images, and its configuration."""

    limit_bytes: int
    points: int
    configuration: Configuration

    def may_serve(self, points: int, limit_bytes: int) -> bool:
        """Return whether it had about as much workspace as another size has, for each of its points or in all."""
        share = _LEAST_SHARE * limit_bytes * self.points
        return self.limit_bytes >= limit_bytes or self.limit_bytes * points >= share


@final
class NearbyPlans:
    """Configurations by problem, all in whole micro-batches: one may serve a problem whose images have another size.

    A program whose images change their size would wait for cuDNN's heuristics at each new size, for each kernel.
    Engines with knobs compute other sizes too, and what is fast at one size is mostly fast at one nearby.

    Memory that a call brings as workspace, such as room for a later gradient, grows with the images, and so does the
    limit where that is more than the stated one. A plan that was made while memory was short had a smaller limit, and
    serves for no size that has more for each point.
    """

    def __init__(self) -> None:
        self._kinds: BoundedDict[object, BoundedDict[tuple[tuple[int, ...], int], _Known]] = BoundedDict(_MOST_KINDS)

    def learn(self, problem: ConvolutionProblem, limit_bytes: int, configuration: Configuration) -> None:
        """Note what a problem takes within a limit; slabs and float32 sums serve for no other problem."""
        if configuration.float32_sum is None and not any(part.slabs for part in configuration.parts):
            kind = _OTHERWISE(problem)
            sizes = self._kinds.get(kind)
            if sizes is None:
                sizes = self._kinds[kind] = BoundedDict(_MOST_SIZES)
            sizes[problem.spatial, limit_bytes] = _Known(limit_bytes, prod(problem.spatial), configuration)

    def nearest(self, problem: ConvolutionProblem, limit_bytes: int) -> list[Configuration]:
        """Return configurations of nearby sizes within limits like this one, nearest first; a few, each of them once.

        They may need more than the limit.
        """
        points, most = prod(problem.spatial), log(MOST_APART)
        known = list(self._kinds.get(_OTHERWISE(problem), {}).values())
        apart = sorted((abs(log(each.points / points)), number) for number, each in enumerate(known))
        found: dict[object, Configuration] = {}
        for distance, number in apart:
            if distance > most or len(found) == _MOST_TRIED:
                break
            if known[number].may_serve(points, limit_bytes):
                one = known[number].configuration
                found.setdefault(tuple((part.size, part.algorithm) for part in one.parts), one)
        return list(found.values())


_QUICK = 8  # ranks among which an algorithm mostly fits that is divided into few parts
_PROMISING = 1.5  # of the least time
_UNBEATEN = 2  # ranks at which an algorithm that fits undivided costs less than any division


@final
class HeuristicPlanner:
    """Chooses by the rule, and checks what it chose.

    Args:
        backend: lists the algorithms, and runs them to check them.
        discarded: returns the algorithms that count as failed for a problem.
        checks: whether plans of problems that need not repeat wait for a check as well.
    """

    def __init__(
        self, backend: Backend, discarded: Callable[[ConvolutionProblem], Collection[str]], *, checks: bool = True
    ) -> None:
        self._backend = backend
        self._discarded = discarded
        self._checks = checks
        self._checked: dict[tuple[ConvolutionProblem, str], bool] = {}
        self._nearby = NearbyPlans()

    def configuration(self, request: Request, *, start: int = 0, failed: Collection[str] = ()) -> Configuration | None:
        """Return the configuration of a problem, or None if nothing fits.

        Args:
            request: the problem with its limit, sizes and slabs. Of the sizes only the mini-batch and powers of two
                count.
            start: the first sample to compute, because the earlier ones are computed already.
            failed: algorithms not to choose.

        Raises:
            UnsupportedProblemError: if the backend cannot compute the problem at all.
            MeasurementError: if there is too little memory to check an algorithm. Another one is not taken in its
                place, because then the plan would depend on what memory is free.
        """
        if not self._checks_plans_of(request.problem) and not start:
            found = self._near(request, failed) or self._chosen(request, start, failed)
            if found is not None:
                self.learn(request.problem, request.limit_bytes, found)
            return found
        while True:
            found = self._chosen(request, start, failed)
            if found is None or self._passes(request.problem, found):
                return found

    def learn(self, problem: ConvolutionProblem, limit_bytes: int, configuration: Configuration) -> None:
        """Let other sizes of the same convolution take a configuration within a limit, if they need not repeat."""
        self._nearby.learn(problem, limit_bytes, configuration)

    def slab(
        self, problem: ConvolutionProblem, size: int, slab: Slab, limit_bytes: int, failed: Collection[str] = ()
    ) -> SlabConfiguration | None:
        """Return the first algorithm of one slab that fits and passes its check, or None.

        The arguments are those of `Findings.slab_configuration`; raises what `configuration` does.
        """
        piece = piece_of(problem.part(size), slab).problem
        names = self._names(problem, [size], failed)
        while True:
            found = self._fastest(piece, with_slab_names(self._backend, names), limit_bytes)
            if found is None:
                return None
            one = found.on(slab)
            if self._passes(problem, Configuration(parts=(MicroConfiguration.of_slabs(size, [one]),))):
                return one

    def _leading(self, problem: ConvolutionProblem, failed: Collection[str], most: int) -> list[str]:
        """Return the first algorithms of a mini-batch in the order of the heuristics, without those that failed."""
        left_out = {*self._discarded(problem), *failed}
        first = self._backend.leading(problem, most + len(left_out))
        return [each.name for each in first if each.name not in left_out][:most]

    def _near(self, request: Request, failed: Collection[str]) -> Configuration | None:
        """Return the configuration of a nearby size that computes this one within the limit; None if there is none."""
        near = self._nearby.nearest(request.problem, request.limit_bytes)
        left_out = {*self._discarded(request.problem), *failed} if near else set()
        return next((own for each in near if (own := self._as_there(request, each, left_out)) is not None), None)

    def _as_there(self, request: Request, found: Configuration, left_out: Collection[str]) -> Configuration | None:
        """Return the configuration of another size for a request; None if it does not compute it within the limit."""
        problem = request.problem
        parts: dict[MicroConfiguration, MicroConfiguration] = {}
        for part in dict.fromkeys(found.parts):
            usable = part.algorithm not in left_out and part.size in request.sizes
            own = self._fastest(problem.part(part.size), [part.algorithm], request.limit_bytes) if usable else None
            if own is None:
                return None
            parts[part] = own
        return Configuration(parts=tuple(parts[part] for part in found.parts))

    def _names(self, problem: ConvolutionProblem, sizes: Sequence[int], failed: Collection[str]) -> list[str]:
        left_out = {*self._discarded(problem), *failed}
        return [name for name in self._backend.names(problem, sizes) if name not in left_out]

    def _chosen(self, request: Request, start: int, failed: Collection[str]) -> Configuration | None:
        problem = request.problem
        sizes = self._sizes(request)
        if not sizes:
            return None
        left = problem.batch - start
        if not start and sizes[-1] == left:  # enough for most problems, and quick
            first = self._fastest(problem, self._leading(problem, failed, _UNBEATEN), request.limit_bytes)
            if first is not None and _is_promising(problem, first.time_ms):
                return Configuration(parts=(first,))
            if not self._checks_plans_of(problem):
                found = self._divided(request, start, sizes, self._leading(problem, failed, _QUICK))
                if found is not None and _is_promising(problem, found.time_ms):
                    return found
        names = self._names(problem, sizes, failed)
        found = self._divided(request, start, sizes, names)
        return self._divided_into_slabs(request, left, inf if found is None else found.time_ms, names) or found

    def _divided(
        self, request: Request, start: int, sizes: Sequence[int], names: Sequence[str]
    ) -> Configuration | None:
        """Return what the rule takes of some algorithms in whole micro-batches; None if none of them fits."""
        problem, left = request.problem, request.problem.batch - start
        unit = start & -start  # the size of a part decides where it may begin: see ConvolutionProblem.part
        fitting = {
            size: found
            for size in reversed(sizes)
            if size <= left and (not start or problem.begins_anywhere or size & -size <= unit)
            if (found := self._fastest(problem.part(size), names, request.limit_bytes)) is not None
        }
        divisions = [(lead, parts) for lead in fitting if (parts := _filled(left, lead, fitting))]
        if divisions:
            _, parts = min(divisions, key=lambda each: (fsum(fitting[size].time_ms for size in each[1]), -each[0]))
            return Configuration(parts=tuple(fitting[size] for size in parts))
        return None

    def _sizes(self, request: Request) -> list[int]:
        batch = request.problem.batch
        offered = self._backend.sizes(request.problem)
        wanted = {*request.sizes} & {*powers_of_two(batch)}
        return sorted(size for size in wanted if offered is None or size in offered)

    def _fastest(self, part: ConvolutionProblem, names: Iterable[str], limit_bytes: int) -> MicroConfiguration | None:
        """Return the algorithm of a micro-batch or a slab that is assumed to be the fastest one that fits a limit."""
        best: MicroConfiguration | None = None
        least = least_ms(part)
        for rank, name in enumerate(names):
            if best is not None and best.time_ms <= ranked(least, rank):
                break
            algorithm = self._backend.algorithm(part, name) if self._checked.get((part, name), True) else None
            if algorithm is None or algorithm.workspace_bytes > limit_bytes:
                continue
            found = assumed(part, algorithm, rank)
            if best is None or found.time_ms < best.time_ms:
                best = found
        return best

    def _divided_into_slabs(
        self, request: Request, left: int, worth_ms: float, names: Sequence[str]
    ) -> Configuration | None:
        """Return the smallest micro-batches, each in the fewest slabs that are worth it; None if there are none."""
        size = self._sizes(request)[0]
        part, parts = request.problem.part(size), left // size
        if left % size or parts > MOST_PARTS or parts * least_ms(part) >= worth_ms:
            return None
        own = with_slab_names(self._backend, names if worth_ms == inf else names[:_QUICK])
        for rows in request.rows:
            # With more rows, only algorithms without tensor cores may fit, which are no better in slabs.
            one = in_slabs(self._backend, part, [rows], lambda each: self._fastest(each, own, request.limit_bytes))
            if one is not None and parts * one.time_ms < worth_ms:
                return Configuration(parts=(one,) * parts)
        return None

    def _checks_plans_of(self, problem: ConvolutionProblem) -> bool:
        return self._checks or problem.deterministic

    def _passes(self, problem: ConvolutionProblem, configuration: Configuration) -> bool:
        """Check what was not checked before, if it is to be checked, and return whether all of it is right."""
        if not self._checks_plans_of(problem):
            return True
        pieces = {
            piece: slabs for piece, slabs in computed_pieces(problem, configuration) if piece not in self._checked
        }
        if pieces:
            self._check(problem, pieces)
        return all(self._checked[piece] for piece, _ in computed_pieces(problem, configuration))

    def _check(
        self, problem: ConvolutionProblem, pieces: Mapping[tuple[ConvolutionProblem, str], Sequence[Slab]]
    ) -> None:
        try:
            with self._backend.bench(problem) as bench:
                for (part, name), slabs in pieces.items():
                    algorithm = self._backend.algorithm(part, name)
                    assert algorithm is not None
                    try:
                        bench.verify(part.batch, algorithm, slabs)
                    except BackendError:
                        self._checked[part, name] = False
                    else:
                        self._checked[part, name] = True
        except MemoryError as error:
            raise MeasurementError(
                f"{problem}: there is too little memory to check the plan that repeats its results, and no other one"
                f" takes its place: free memory, or load plans ({error})"
            ) from error


def _is_promising(problem: ConvolutionProblem, time_ms: float) -> bool:
    """Return whether a plan by the first algorithms is assumed to be about as fast as any other one."""
    plain = plain_ms(problem)
    return time_ms < plain or (plain <= _PROMISING * least_ms(problem) and time_ms <= _PROMISING * plain)


def _filled(left: int, lead: int, fitting: Collection[int]) -> list[int]:
    """Return sizes that add up to what is left, the largest first and none above the lead; [] if none do."""
    parts: list[int] = []
    for size in sorted((each for each in fitting if each <= lead), reverse=True):
        count, left = divmod(left, size)
        if len(parts) + count > MOST_PARTS:
            return []
        parts += [size] * count
    return parts if not left else []
