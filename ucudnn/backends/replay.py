"""A backend that answers from a recorded profile, so that plans for a GPU can be made without it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from operator import attrgetter
from typing import final

from ucudnn.backends.base import Backend
from ucudnn.backends.bench import Bench, float32_sum_on_gpu
from ucudnn.backends.candidates import Candidates
from ucudnn.configuration import Float32Sum
from ucudnn.errors import NotRecordedError
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import MOST_ALIGNMENT, ConvolutionProblem, MathMode
from ucudnn.profiles.format import Profile, Recording
from ucudnn.profiles.measurement import Algorithm, Effort, Measurement
from ucudnn.slabs import Slab, pieces_of

_CUDNN_APIS = ("graph", "legacy")  # candidates choose among these; other backends have one kind of algorithms
_SHAPES = attrgetter(
    *("operation", "channels", "spatial", "filters", "kernel"),
    *("padding", "post_padding", "stride", "dilation", "groups"),
)


@final
class ReplayBackend(Backend):
    """Answers from a profile. A problem that was not recorded is an error; nothing is guessed.

    Args:
        profile: the recorded measurements.
        candidates: which of the recorded algorithms are offered.
        network: the recording to look in first, if several networks were recorded with the same shape.
    """

    def __init__(
        self, profile: Profile, *, candidates: Candidates = Candidates.EVERY, network: str | None = None
    ) -> None:
        super().__init__()
        self._profile = profile
        self._candidates = candidates
        self._network = network
        # If several recordings have a shape, the one with the larger mini-batches has more sizes.
        self._recordings = sorted(
            profile.recordings.items(),
            key=lambda item: (item[0] != network, -max((problem.batch for problem in item[1]), default=0)),
        )
        self._found: dict[ConvolutionProblem, dict[str, Measurement]] = {}
        self._sizes: dict[str, dict[ConvolutionProblem, list[int]]] = {}

    @property
    def name(self) -> str:
        return f"replay:{self._profile.name}"

    def conditions(self) -> Mapping[str, str]:
        return dict(self._profile.conditions)

    def algorithms(self, problem: ConvolutionProblem) -> tuple[Algorithm, ...]:
        return tuple(record.algorithm for record in self._records(problem).values())

    def algorithm(self, problem: ConvolutionProblem, name: str) -> Algorithm | None:
        try:
            return super().algorithm(problem, name)
        except NotRecordedError:
            return None

    def sizes(self, problem: ConvolutionProblem) -> frozenset[int] | None:
        return frozenset(self._first_with(_plain(problem))[1])

    def float32_sum(self, problem: ConvolutionProblem) -> Float32Sum | None:
        if not problem.is_rounded_gradient or not self.sizes(replace(problem, float32_sum=True)):
            return None
        return float32_sum_on_gpu(problem)

    def knows_slab(self, slab: ConvolutionProblem, part: ConvolutionProblem) -> bool:
        """Whether a slab was recorded together with its micro-batch; times of different recordings are never mixed."""
        plain = _plain(slab)
        return any(plain in recording for _, recording in self._recordings) and plain in self._recording_of(
            _plain(part)
        )

    @contextmanager
    def bench(self, problem: ConvolutionProblem) -> Iterator[Bench]:
        yield _ReplayBench(self, problem)

    def measurement(self, problem: ConvolutionProblem, algorithm: str) -> Measurement:
        """Return the recorded measurement of an algorithm."""
        record = self._records(problem).get(algorithm)
        if record is None:
            raise NotRecordedError(f"{self._profile.name} has no {algorithm} for {problem}")
        return record

    def _records(self, problem: ConvolutionProblem) -> dict[str, Measurement]:
        if problem not in self._found:
            self._found[problem] = {record.algorithm.name: record for record in self._search(problem)}
        return self._found[problem]

    def _search(self, problem: ConvolutionProblem) -> tuple[Measurement, ...]:
        found = self._offered(problem, self._candidates)
        if not found:
            others = [each.value for each in Candidates if self._offered(problem, each)]
            way_out = f": choose {', '.join(others)}" if others else ""
            raise NotRecordedError(
                f"{self._profile.name} has no {self._candidates.value} candidates for {problem}{way_out}"
            )
        return found

    def _offered(self, problem: ConvolutionProblem, candidates: Candidates) -> tuple[Measurement, ...]:
        plain = _plain(problem)
        recording = self._recording_of(plain)
        records = recording[plain]
        if problem.math is MathMode.FMA or candidates is Candidates.LEGACY_FMA:
            # Legacy algorithms were recorded again without TF32. Graph engines say whether they use tensor cores.
            fma = recording.get(replace(plain, math=MathMode.FMA), ())
            again = any(record.algorithm.api == "graph" for record in fma)
            engines = (each for each in records if each.algorithm.api == "graph")
            plain_engines = (each for each in engines if "TENSOR_CORE" not in each.algorithm.notes)
            records = fma if again else (*fma, *plain_engines)
        return tuple(each for each in records if _offers(candidates, problem, each.algorithm))

    def _recording_of(self, problem: ConvolutionProblem) -> Recording:
        """Return the recording for all sizes of a problem; times of different recordings are never mixed."""
        recording, sizes = self._first_with(problem)
        if not sizes:
            raise NotRecordedError(f"{self._profile.name} has no {problem}: {self._known(problem)}")
        if problem.batch not in sizes:
            raise NotRecordedError(
                f"{self._profile.name} has {problem} at mini-batches of {', '.join(map(str, sorted(sizes)))}, and"
                f" not of {problem.batch}: choose one of these, and a policy that tries no others, such as"
                f" {BatchSizePolicy.POWER_OF_TWO.value}"
            )
        return recording

    def _first_with(self, problem: ConvolutionProblem) -> tuple[Recording, Sequence[int]]:
        """Return the first recording that has a problem at any size, and the sizes; () if none has it."""
        shape = problem.with_batch(1)
        for network, recording in self._recordings:
            if sizes := self._sizes_of(network, recording).get(shape):
                return recording, sizes
        return {}, ()

    def _known(self, problem: ConvolutionProblem) -> str:
        """Return what was recorded in the place of a problem: the same shapes in other types, or other networks."""
        shapes = _SHAPES(problem)
        same = (each for _, recording in self._recordings for each in recording if _SHAPES(each) == shapes)
        if variants := dict.fromkeys(map(_variant, same)):
            return (
                f"these shapes were recorded as {', '.join(variants)}: choose one of these (--dtype, --math, --layout)"
            )
        return f"recorded were the layers of {', '.join(self._profile.recordings)}"

    def _sizes_of(self, network: str, recording: Recording) -> dict[ConvolutionProblem, list[int]]:
        if network not in self._sizes:
            sizes: dict[ConvolutionProblem, list[int]] = {}
            for problem in recording:
                sizes.setdefault(problem.with_batch(1), []).append(problem.batch)
            self._sizes[network] = sizes
        return self._sizes[network]


def _plain(problem: ConvolutionProblem) -> ConvolutionProblem:
    """Return a problem as it was recorded: with all algorithms, which are filtered when they are read."""
    return replace(problem, deterministic=False, math=MathMode.TF32, alignment=MOST_ALIGNMENT)


def _variant(problem: ConvolutionProblem) -> str:
    """Return what a problem may have in common with no other one of its shapes."""
    end = " to float32" if problem.float32_sum else " with bias" if problem.biased else ""
    end += " without TF32" if problem.math is MathMode.FMA else ""
    return f"{problem.dtype.value} {problem.layout.value}{end}"


def _offers(candidates: Candidates, problem: ConvolutionProblem, algorithm: Algorithm) -> bool:
    if problem.deterministic and "NONDETERMINISTIC" in algorithm.notes:
        return False
    return algorithm.api not in _CUDNN_APIS or candidates.offers(algorithm.api, problem, algorithm.name)


@final
class _ReplayBench(Bench):
    def __init__(self, backend: ReplayBackend, problem: ConvolutionProblem) -> None:
        self._backend = backend
        self._problem = problem

    def measure(
        self, size: int, algorithm: Algorithm, effort: Effort, worth_ms: float = inf, slabs: Sequence[Slab] = ()
    ) -> Measurement:
        piece = pieces_of(self._problem, size, slabs)[0]
        return self._backend.measurement(piece.problem, algorithm.name)
