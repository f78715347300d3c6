"""The fixed rule: plans without a measured time, by the order of heuristics and by workspaces alone.

Problems that must repeat to the bit get such plans, because a measured time differs from run to run, so a plan that
depends on it does, too. Others get them where nothing is measured before the first run. The rule depends on nothing but
the problem, the limit and the policy, and on what the backend lists. For each micro-batch size it takes the first
algorithm in the order of the heuristics whose workspace fits. Of the sizes it takes the one with the least
(100 + rank) * (64 + parts): an algorithm that comes later in the order costs a hundredth, and a further micro-batch a
sixty-fourth. Of equals the larger size is taken. On the recorded H200 such plans take 1.09 times the time of measured
ones at 64 MiB, in the geometric mean of 117 kernels. The first algorithm that fits undivided takes 1.43 times
(`tests/benchmarking/test_fixed_rule.py`).

What it chooses for a problem that must repeat is run once, and its output is checked as in a benchmark. An algorithm
that fails is left out. Other problems wait for no check, as in PyTorch, which runs what the heuristics name. Nor do
they wait for all heuristics: they take the plan of the same convolution at a nearby size of its images, and else what
can be had of the first algorithms, and only then of all.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, final

from ucudnn.backends.base import Backend
from ucudnn.benchmarking.nearby_plans import NearbyPlans
from ucudnn.benchmarking.request import Request
from ucudnn.configuration import Configuration, MicroConfiguration, SlabConfiguration
from ucudnn.errors import BackendError, MeasurementError
from ucudnn.policy import powers_of_two
from ucudnn.problem import ConvolutionProblem
from ucudnn.slabs import Slab, piece_of, slabs_by_problem
from ucudnn.solvers.sums import MOST_PARTS

_RANKS = 100
_PARTS = 64
_QUICK = 8  # ranks among which an algorithm mostly fits that is divided into few parts
_UNBEATEN = 2  # ranks at which an algorithm that fits undivided costs less than any division


@final
class _Fitting(NamedTuple):
    """The first algorithm that fits at a size.

    Attributes:
        rank: its place in the order of the heuristics.
        name: its name.
        workspace_bytes: its workspace.
    """

    rank: int
    name: str
    workspace_bytes: int


@final
class FixedRule:
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
        """Return the first algorithm of one slab of a micro-batch that fits and passes its check, or None.

        Args:
            problem: the problem at mini-batch size.
            size: the micro-batch size.
            slab: the slab.
            limit_bytes: workspace limit.
            failed: algorithms not to choose.

        Raises:
            UcudnnError: as `configuration`.
        """
        piece = piece_of(problem.part(size), slab).problem
        names = self._names(problem, [size], failed)
        while True:
            found = self._first(piece, self._slab_names(names), limit_bytes)
            if found is None:
                return None
            one = _slab_configuration(slab, found)
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
            own = self._first(problem.part(part.size), [part.algorithm], request.limit_bytes) if usable else None
            if own is None:
                return None
            parts[part] = _micro(part.size, own)
        return Configuration(parts=tuple(parts[part] for part in found.parts))

    def _names(self, problem: ConvolutionProblem, sizes: Sequence[int], failed: Collection[str]) -> list[str]:
        """Return the algorithms of a problem in the order of the heuristics, without those that failed."""
        left_out = {*self._discarded(problem), *failed}
        return [name for name in self._backend.names(problem, sizes) if name not in left_out]

    def _slab_names(self, names: Sequence[str]) -> list[str]:
        return list(dict.fromkeys(own for name in names for own in (name, *self._backend.slab_names(name))))

    def _chosen(self, request: Request, start: int, failed: Collection[str]) -> Configuration | None:
        """Return what the rule takes of the algorithms that have not failed their check."""
        problem = request.problem
        sizes = self._sizes(request)
        if not sizes:
            return None
        left = problem.batch - start
        if not start and sizes[-1] == left:  # enough for most problems, and quick
            first = self._first(problem, self._leading(problem, failed, _UNBEATEN), request.limit_bytes)
            if first is not None:
                return Configuration(parts=(_micro(left, first),))
            if not self._checks_plans_of(problem):
                found = self._divided(request, start, sizes, self._leading(problem, failed, _QUICK))
                if found is not None:
                    return found
        names = self._names(problem, sizes, failed)
        found = self._divided(request, start, sizes, names)
        if found is not None:
            return found
        one = self._in_slabs(request, sizes[0], names) if left % sizes[0] == 0 else None
        many = left // sizes[0] > MOST_PARTS
        return None if one is None or many else Configuration(parts=(one,) * (left // sizes[0]))

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
            if (found := self._first(problem.part(size), names, request.limit_bytes)) is not None
        }
        divisions = [(lead, parts) for lead in fitting if (parts := _filled(left, lead, fitting))]
        if divisions:
            _, parts = min(
                divisions, key=lambda each: ((_RANKS + fitting[each[0]].rank) * (_PARTS + len(each[1])), -each[0])
            )
            return Configuration(parts=tuple(_micro(size, fitting[size]) for size in parts))
        return None

    def _sizes(self, request: Request) -> list[int]:
        """Return the micro-batch sizes of the rule, in ascending order."""
        batch = request.problem.batch
        offered = self._backend.sizes(request.problem)
        wanted = {*request.sizes} & {*powers_of_two(batch)}
        return sorted(size for size in wanted if offered is None or size in offered)

    def _first(self, part: ConvolutionProblem, names: Sequence[str], limit_bytes: int) -> _Fitting | None:
        """Return the first algorithm of a micro-batch or a slab that fits a limit."""
        for rank, name in enumerate(names):
            if not self._checked.get((part, name), True):
                continue
            algorithm = self._backend.algorithm(part, name)
            if algorithm is not None and algorithm.workspace_bytes <= limit_bytes:
                return _Fitting(rank, name, algorithm.workspace_bytes)
        return None

    def _in_slabs(self, request: Request, size: int, names: Sequence[str]) -> MicroConfiguration | None:
        """Return a micro-batch in the fewest slabs of which each has an algorithm that fits."""
        part = request.problem.part(size)
        own = self._slab_names(names)
        for rows in request.rows:
            groups = slabs_by_problem(part, rows)
            found = [(slabs, self._first(piece, own, request.limit_bytes)) for piece, slabs in groups]
            known = [piece for piece, _ in groups if self._backend.knows_slab(piece, part)]
            chosen = [_slab_configuration(slab, one) for slabs, one in found if one is not None for slab in slabs]
            if len(known) == len(groups) and all(one is not None for _, one in found):
                return MicroConfiguration.of_slabs(size, sorted(chosen, key=lambda each: each.slab))
        return None

    def _checks_plans_of(self, problem: ConvolutionProblem) -> bool:
        return self._checks or problem.deterministic

    def _passes(self, problem: ConvolutionProblem, configuration: Configuration) -> bool:
        """Check what was not checked before, if it is to be checked, and return whether all of it is right."""
        if not self._checks_plans_of(problem):
            return True
        pieces = {piece: slabs for piece, slabs in _pieces(problem, configuration) if piece not in self._checked}
        if pieces:
            self._check(problem, pieces)
        return all(self._checked[piece] for piece, _ in _pieces(problem, configuration))

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


def _pieces(
    problem: ConvolutionProblem, configuration: Configuration
) -> Iterator[tuple[tuple[ConvolutionProblem, str], Sequence[Slab]]]:
    """Yield what a configuration computes, with the algorithm, and the slab where it is one."""
    for part in dict.fromkeys(configuration.parts):
        whole = problem.part(part.size)
        if not part.slabs:
            yield (whole, part.algorithm), ()
        for each in part.slabs:
            yield (piece_of(whole, each.slab).problem, each.algorithm), [each.slab]


def _filled(left: int, lead: int, fitting: Collection[int]) -> list[int]:
    """Return sizes that add up to what is left, the largest first and none above the lead; [] if none do."""
    parts: list[int] = []
    for size in sorted((each for each in fitting if each <= lead), reverse=True):
        count, left = divmod(left, size)
        if len(parts) + count > MOST_PARTS:
            return []
        parts += [size] * count
    return parts if not left else []


def _micro(size: int, found: _Fitting) -> MicroConfiguration:
    return MicroConfiguration(
        size=size, algorithm=found.name, time_ms=_stand_in(size), workspace_bytes=found.workspace_bytes
    )


def _slab_configuration(slab: Slab, found: _Fitting) -> SlabConfiguration:
    return SlabConfiguration(
        slab=slab, algorithm=found.name, time_ms=_stand_in(slab.rows), workspace_bytes=found.workspace_bytes
    )


def _stand_in(size: int) -> float:
    """Return what stands where a measured configuration has its time; nothing reads it."""
    return float(size)
