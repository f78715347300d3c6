"""What is known of requests: their explorations and measurements, from this process and from the database."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, final

from ucudnn.backends.base import Backend
from ucudnn.benchmarking.request import Exploration, MeasuredProblem, Request, Results, SlabDivision
from ucudnn.configuration import MicroConfiguration, SlabConfiguration
from ucudnn.problem import MOST_ALIGNMENT, ConvolutionProblem
from ucudnn.profiles.measurement import Measurement
from ucudnn.slabs import Slab, piece_of, slabs_by_problem
from ucudnn.solvers.desirable import divided, fastest

if TYPE_CHECKING:
    from ucudnn.benchmarking.storage.store import MachineStore


@final
class Finding(NamedTuple):
    """What was found for a request: what was tried, and all measurements of it, failed ones included."""

    request: Request
    exploration: Exploration
    items: Sequence[MeasuredProblem]


@final
class Findings:
    """Answers from what was measured. Nothing is measured here.

    The key of a measurement is the whole problem at micro-batch size and the algorithm. So layers of the same shape,
    and mini-batches that share micro-batch sizes, share their measurements.

    Args:
        backend: the backend that measured.
        storage: keeps measurements beyond the process; None keeps none.
        reuses: whether requests that are finished in the storage count as finished here.

    Attributes:
        results: the measurements of all requests.
        explored: what this process has tried for the requests that it has finished.
    """

    def __init__(self, backend: Backend, storage: "MachineStore | None" = None, *, reuses: bool = True) -> None:
        self.backend = backend
        self.storage = storage
        self.results = Results()
        self._reuses = reuses
        self.explored: dict[Request, Exploration] = {}
        self._divisions: dict[ConvolutionProblem, set[SlabDivision]] = {}
        self._discarded: dict[ConvolutionProblem, set[str]] = {}

    def load(self, request: Request) -> Exploration | None:
        """Take a finished request from the storage, and return what was tried.

        Return None if it is not finished, or if its measurements cannot all be read or make no configuration.
        """
        if self.storage is None or not self._reuses or self.discarded(request.problem):
            return None
        exploration = self.storage.load_exploration(request)
        items = None if exploration is None else self.storage.load(exploration.parts(request.problem))
        if exploration is None or items is None:
            return None
        self.results.update(items)
        if not self._is_enough(request, exploration):
            return None
        self.finish(request, exploration, save=False)
        return exploration

    def _is_enough(self, request: Request, exploration: Exploration) -> bool:
        """Whether what is known of a request makes a configuration; each size of one that asks for sizes apart."""
        parts = exploration.parts(request.problem)
        if request.apart:
            return all(self.results.of(part) for part in parts)
        batch = request.problem.batch
        if any(batch % each.size == 0 for each in self._micros(request, exploration.names, exploration.sizes)):
            return True
        return fastest(self.micro_configurations(request, exploration), batch) is not None

    def finish(self, request: Request, exploration: Exploration, *, save: bool) -> None:
        """Keep what was tried for a request, whose measurements are in `results`; in the storage too, if `save`."""
        self.explored[request] = exploration
        if exploration.divisions:
            self._divisions.setdefault(_shape(request.problem), set()).update(exploration.divisions)
        if save and self.storage is not None:
            self.storage.save_exploration(request, exploration)

    def add(self, finding: Finding) -> None:
        """Keep what others found, here and in the storage."""
        self.results.update(finding.items)
        if self.storage is not None:
            self.storage.save(finding.items)
        self.finish(finding.request, finding.exploration, save=True)

    def of(self, request: Request, exploration: Exploration) -> Finding:
        """Return what was found for a request."""
        names, parts = with_slab_names(self.backend, exploration.names), exploration.parts(request.problem)
        known = ((part, each) for part in parts for each in self.results.of(part).values())
        return Finding(request, exploration, [item for item in known if item[1].algorithm.name in names])

    def forget(self, problems: Sequence[ConvolutionProblem]) -> None:
        """Forget what was measured of problems at any size, here and in the storage. Discarded algorithms stay so."""
        shapes = {_shape(problem) for problem in problems}
        for request in [each for each in self.explored if _shape(each.problem) in shapes]:
            self.results.forget(self.explored.pop(request).parts(request.problem))
        for shape in shapes:
            self._divisions.pop(shape, None)
        sizeless = {_without_size(problem) for problem in problems}
        self.results.forget([part for part in self.results.parts() if _without_size(part) in sizeless])
        if self.storage is not None:
            self.storage.forget(problems)

    def discard(self, problem: ConvolutionProblem, algorithm: str) -> None:
        """Count an algorithm as failed at every size of a problem, because it failed when it was executed."""
        shape = _shape(problem)
        self._discarded.setdefault(shape, set()).add(algorithm)
        for request in [each for each in self.explored if _shape(each.problem) == shape]:
            del self.explored[request]  # an algorithm that this one outdid may matter now

    def discarded(self, problem: ConvolutionProblem) -> Collection[str]:
        """Return the algorithms that count as failed for a problem."""
        return self._discarded.get(_shape(problem), ())

    def micro_configurations(self, request: Request, exploration: Exploration) -> list[MicroConfiguration]:
        """Return what was measured for a request within its limit, slab by slab included."""
        names = exploration.names
        found = list(self._micros(request, names, exploration.sizes))
        return [*found, *self._in_slabs(request, with_slab_names(self.backend, names), exploration.divisions)]

    def known_micro_configurations(self, request: Request) -> list[MicroConfiguration]:
        """Return what was measured for any request of the same problem, within this request's limit.

        Incomplete measurements count only if there is no configuration without them.
        """
        most = request.problem.batch
        sizes = [size for size in self.results.batches() if max(1, request.least_size) <= size <= most]
        found = list(self._micros(request, None, sizes, complete=True))
        if fastest(found, request.problem.batch) is None:
            found = list(self._micros(request, None, sizes))
        return [*found, *self._in_slabs(request, None, sorted(self._divisions.get(_shape(request.problem), ())))]

    def slab_configuration(
        self, problem: ConvolutionProblem, size: int, slab: Slab, limit_bytes: int, failed: Collection[str] = ()
    ) -> SlabConfiguration | None:
        """Return the fastest algorithm that was measured on a slab of a micro-batch within a limit, or None.

        The problem is at mini-batch size, and `size` that of the micro-batch. Algorithms that `failed` are not wanted.
        """
        found = self._measured(problem, piece_of(problem.part(size), slab).problem, limit_bytes)
        wanted = [each.micro(size) for each in found if each.algorithm.name not in failed]
        return min(wanted, key=lambda each: each.time_ms).on(slab) if wanted else None

    def _micros(
        self, request: Request, names: Sequence[str] | None, sizes: Iterable[int], *, complete: bool = False
    ) -> Iterator[MicroConfiguration]:
        """Return undivided micro-batches of some sizes and algorithms; None for all algorithms."""
        wanted = None if names is None else set(names)
        for size in sizes:
            for each in self._measured(request.problem, request.problem.part(size), request.limit_bytes):
                if (each.complete or not complete) and (wanted is None or each.algorithm.name in wanted):
                    yield each.micro(size)

    def _in_slabs(
        self, request: Request, names: Collection[str] | None, divisions: Iterable[SlabDivision]
    ) -> Iterator[MicroConfiguration]:
        """Return micro-batches that are computed slab by slab with some algorithms; None for all algorithms."""

        def measured(part: ConvolutionProblem) -> list[MicroConfiguration]:
            found = self._measured(request.problem, part, request.limit_bytes)
            return [each.micro(part.batch) for each in found if names is None or each.algorithm.name in names]

        for size, rows in divisions:
            if request.least_size <= size <= request.problem.batch:
                yield from in_slabs(request.problem.part(size), rows, measured)

    def _measured(
        self, problem: ConvolutionProblem, part: ConvolutionProblem, limit_bytes: int
    ) -> Iterator[Measurement]:
        """Return the measurements of a micro-batch or a slab within a limit, without those of discarded algorithms."""
        discarded = self.discarded(problem)
        for name, each in self.results.of(part).items():
            if each.measured and name not in discarded and each.algorithm.workspace_bytes <= limit_bytes:
                yield each


def in_slabs(
    part: ConvolutionProblem, rows: int, measured: Callable[[ConvolutionProblem], Iterable[MicroConfiguration]]
) -> list[MicroConfiguration]:
    """Return the desirable ways to compute a micro-batch in slabs of so many rows; `measured` gives those of a slab."""
    return divided(part.batch, [(slabs, measured(slab)) for slab, slabs in slabs_by_problem(part, rows)])


def with_slab_names(backend: Backend, names: Iterable[str]) -> Collection[str]:
    """Return the names of algorithms in order, each with those under which it computes slabs."""
    return dict.fromkeys(own for name in names for own in (name, *backend.slab_names(name)))


def _without_size(problem: ConvolutionProblem) -> ConvolutionProblem:
    """Return what a problem has in common with its micro-batches, which may be less aligned."""
    return replace(problem.with_batch(1), alignment=MOST_ALIGNMENT)


def _shape(problem: ConvolutionProblem) -> ConvolutionProblem:
    return problem.with_batch(1)
