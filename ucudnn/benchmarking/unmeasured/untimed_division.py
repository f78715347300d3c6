"""Divisions whose times nobody has measured: they are chosen by workspaces alone, in as few calls as possible.

What is left of the mini-batch begins with the largest micro-batch that fits, within the limit or in the tail of the
output behind it (`workspace.spare`). Where none fits, the smallest one is computed slab by slab, in the fewest slabs
that fit.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import prod, sqrt
from typing import final

from ucudnn.backends.base import Backend
from ucudnn.benchmarking.request import Request
from ucudnn.configuration import Configuration, MicroConfiguration, SlabConfiguration
from ucudnn.problem import ConvolutionProblem, DataType, MathMode, Operation
from ucudnn.profiles.measurement import Algorithm
from ucudnn.slabs import Slab, pieces_of, row_count, slabs_by_problem
from ucudnn.workspace.spare import tail_bytes

_CALL_MS = 0.03
_TENSOR_CORE_PER_MS = 50e9  # multiplications
_OTHERS_PER_MS = 20e9
_DIRECT_PER_MS = 1.2e9  # by cuDNN's engine 0, at most: 1.1e9 is recorded, and 0.3e9 in half of the cases
_CHANNELS = 8  # of which tensor cores compute a multiple
_BUSY_OUTPUTS = 1e6
_REDUCED = 512  # multiplications of a filter gradient that are summed to one of the outputs that keep a GPU busy
_DIRECT = "eng0"
_RANK = 0.01  # of the time, for each algorithm that heuristics name before


def assumed_ms(part: ConvolutionProblem, algorithm: Algorithm, rank: int) -> float:
    """Return the assumed milliseconds of a call. The rank of its algorithm is its place in the heuristics, from 0.

    The numbers of the model were fitted to the plans that heuristic mode makes of 117 kernels within 4 to 128 MiB on a
    recorded H200. A call takes at least some time. Tensor cores compute faster than other units, but fill up groups of
    channels. Few outputs do not keep a GPU busy. And of two algorithms of a kind, the one that heuristics name first is
    assumed to be the faster one.
    """
    return ranked(_first_ms(part, tensor_cores=uses_tensor_cores(algorithm)), rank)


def uses_tensor_cores(algorithm: Algorithm) -> bool:
    """Return whether an algorithm computes on tensor cores, by cuDNN's notes."""
    return "TENSOR_CORE" in algorithm.notes


def direct_ms(part: ConvolutionProblem, algorithm: Algorithm) -> float:
    """Return the least time that cuDNN's engine 0 takes, which no other time that is assumed tells; 0 for others.

    It is fast enough for depth-wise convolutions. Of others it may take a second.
    """
    return part.multiplications / _DIRECT_PER_MS if is_direct(algorithm.name) else 0.0


def is_direct(name: str) -> bool:
    """Return whether this is the name of cuDNN's engine 0, which launches a kernel for each group."""
    return name == _DIRECT or name.startswith((f"{_DIRECT}_", f"{_DIRECT}+"))


def least_ms(part: ConvolutionProblem) -> float:
    """Return the least time that is assumed of any algorithm of a problem; float64 and FMA have no tensor cores."""
    if part.dtype is DataType.FLOAT64 or (part.dtype is DataType.FLOAT32 and part.math is MathMode.FMA):
        return plain_ms(part)
    return min(plain_ms(part), _first_ms(part, tensor_cores=True))


def plain_ms(part: ConvolutionProblem) -> float:
    """Return the time that is assumed of the first algorithm without tensor cores; some of these need no workspace."""
    return _first_ms(part, tensor_cores=False)


def ranked(first_ms: float, rank: int) -> float:
    """Return the assumed time of an algorithm of a rank, given that of the first one of its kind."""
    return (1 + _RANK * rank) * first_ms


def _first_ms(part: ConvolutionProblem, *, tensor_cores: bool) -> float:
    rate = _OTHERS_PER_MS
    if tensor_cores:
        rate = _TENSOR_CORE_PER_MS / (_filled(part.channels // part.groups) * _filled(part.filters // part.groups))
    busy = min(1.0, sqrt(_outputs(part) / _BUSY_OUTPUTS))
    return _CALL_MS + part.multiplications / (rate * busy)


def _filled(channels: int) -> float:
    """Return how many times as many channels tensor cores compute."""
    return -(-channels // _CHANNELS) * _CHANNELS / channels


def _outputs(part: ConvolutionProblem) -> float:
    """Return how many outputs can be computed at the same time."""
    if part.operation is Operation.FORWARD:
        return part.batch * part.filters * prod(part.output)
    if part.operation is Operation.BACKWARD_DATA:
        return part.batch * part.channels * prod(part.spatial)
    return part.multiplications / _REDUCED


MOST_CALLS = 64
"""The largest number of calls of a division by one algorithm."""


def assumed(part: ConvolutionProblem, algorithm: Algorithm, rank: int = 0) -> MicroConfiguration:
    """Return a micro-batch by an algorithm of a rank in the order of heuristics; its time is the assumed one."""
    return MicroConfiguration(
        size=part.batch,
        algorithm=algorithm.name,
        time_ms=assumed_ms(part, algorithm, rank),
        workspace_bytes=algorithm.workspace_bytes,
    )


def equal_parts(problem: ConvolutionProblem, size: int, algorithm: Algorithm) -> Configuration:
    """Return equal micro-batches by one algorithm."""
    return Configuration(parts=(assumed(problem.part(size), algorithm),) * (problem.batch // size))


def in_slabs(
    backend: Backend,
    part: ConvolutionProblem,
    rows: Sequence[int],
    first: Callable[[ConvolutionProblem], MicroConfiguration | None],
) -> MicroConfiguration | None:
    """Return a micro-batch in the fewest slabs of which each has an algorithm; None if there are none.

    `rows` are the numbers of rows that slabs may have, in descending order; `first` gives the algorithm of a slab.
    """
    for each in rows:
        groups = slabs_by_problem(part, each)
        if not all(backend.knows_slab(piece, part) for piece, _ in groups):
            continue
        found: list[SlabConfiguration] = []
        for piece, slabs in groups:
            chosen = first(piece)
            if chosen is None:
                break
            found += [chosen.on(slab) for slab in slabs]
        else:
            return MicroConfiguration.of_slabs(part.batch, sorted(found, key=lambda one: one.slab))
    return None


def divided_by(backend: Backend, request: Request, name: str) -> Configuration | None:
    """Return a division of a mini-batch in which one algorithm computes all parts; None if it takes too many calls.

    The request says its limit, and which sizes and slabs are allowed.
    """
    division = _Division(backend, request, name)
    parts: list[MicroConfiguration] = []
    calls, left = 0, request.problem.batch
    while left:
        part = division.next_part(left)
        if part is None:
            return None
        parts.append(part)
        left -= part.size
        calls += len(part.slabs) or 1
        if calls > MOST_CALLS:
            return None
    return Configuration(parts=tuple(parts))


@final
class _Division:
    """Divides a mini-batch by one algorithm, and asks for each of its workspaces once."""

    def __init__(self, backend: Backend, request: Request, name: str) -> None:
        self._backend = backend
        self._request = request
        self._name = name
        self._sizes = [size for size in reversed(request.sizes) if size < request.problem.batch]
        self._offered = tail_bytes(request.problem)
        self._known: dict[int, Algorithm | None] = {}

    def next_part(self, left: int) -> MicroConfiguration | None:
        """Return the part with which the samples that are left begin; None if nothing fits."""
        for size in (each for each in self._sizes if each <= left):
            found = self._algorithm(size)
            most_bytes = max(self._request.limit_bytes, self._offered[left - size])
            if found is not None and found.workspace_bytes <= most_bytes:
                return assumed(self._request.problem.part(size), found)
        return self._smallest_in_slabs if self._request.sizes[0] <= left else None

    def _algorithm(self, size: int) -> Algorithm | None:
        if size not in self._known:
            self._known[size] = self._backend.algorithm(self._request.problem.part(size), self._name)
        return self._known[size]

    @cached_property
    def _smallest_in_slabs(self) -> MicroConfiguration | None:
        """The smallest micro-batch in slabs; None if none fit.

        The workspace of a slab is about its share of that of all rows, so larger slabs would be asked about in vain.
        """
        size = self._request.sizes[0]
        whole = self._algorithm(size) if self._request.rows else None
        if whole is None:
            return None
        part, limit = self._request.problem.part(size), self._request.limit_bytes
        most = row_count(part) * limit / max(1, whole.workspace_bytes)
        names = self._backend.slab_names(self._name)

        def first(piece: ConvolutionProblem) -> MicroConfiguration | None:
            found = (self._backend.algorithm(piece, name) for name in names)
            fitting = (each for each in found if each is not None and each.workspace_bytes <= limit)
            return next((assumed(piece, each) for each in fitting), None)

        return in_slabs(self._backend, part, [each for each in self._request.rows if each <= most], first)


def computed_pieces(
    problem: ConvolutionProblem, configuration: Configuration
) -> Iterator[tuple[tuple[ConvolutionProblem, str], Sequence[Slab]]]:
    """Yield what a configuration computes, with the algorithm, and the slab where it is one."""
    for part in dict.fromkeys(configuration.parts):
        slabs = [each.slab for each in part.slabs]
        for index, piece in enumerate(pieces_of(problem, part.size, slabs)):
            call = part.slabs[index] if slabs else part
            yield (piece.problem, call.algorithm), slabs[index : index + 1]
