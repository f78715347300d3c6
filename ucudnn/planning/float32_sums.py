"""Filter gradients of 16 bits: parts that are added in float32 and rounded once, or parts that each round the output.

Each part that is added to an output of 16 bits rounds it, so the error grows with the number of parts. A float32 sum
has the error of the undivided kernel, whatever the number of parts. It takes workspace, and time to round.
"""

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, final

from ucudnn.backends.base import Backend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import Request, request_of
from ucudnn.configuration import Configuration, Float32Sum, MicroConfiguration
from ucudnn.errors import BackendError, NotRecordedError
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem
from ucudnn.settings import Settings
from ucudnn.solvers.desirable import desirable_set, fastest

WORTH_ROUNDING = 0.9
"""A configuration that rounds several times takes less than this part of the time of all that round once."""

_LOG = logging.getLogger(__name__)


@final
class SummedRequest(NamedTuple):
    """A filter gradient with `float32_sum`, within what its float32 sum leaves of the limit, and that sum."""

    request: Request
    total: Float32Sum


@lru_cache(maxsize=1 << 12)
def summed(problem: ConvolutionProblem) -> ConvolutionProblem:
    """Return a filter gradient of 16 bits before it is rounded."""
    return replace(problem, float32_sum=True)


def summed_request(
    problem: ConvolutionProblem, settings: Settings, limit_bytes: int, backend: Backend
) -> SummedRequest | None:
    """Return the request of a problem's parts that are added in float32, within a workspace limit, sum included.

    None if nothing is divided or rounded, if the backend keeps no sum, or if the limit is too small.
    """
    if not problem.is_rounded_gradient or problem.float32_sum or settings.policy is BatchSizePolicy.UNDIVIDED:
        return None
    total = backend.float32_sum(problem)
    if total is None or total.size_bytes > limit_bytes:
        return None
    return SummedRequest(request_of(summed(problem), settings, limit_bytes - total.size_bytes), total)


def rounds_often(configuration: Configuration) -> bool:
    """Return whether a configuration of a filter gradient of 16 bits rounds its output more than once."""
    return configuration.float32_sum is None and configuration.calls > 1


def summed_configurations(
    asked: SummedRequest | None, benchmark: Benchmark, failed: Collection[str] = ()
) -> tuple[Configuration, ...]:
    """Return the desirable configurations with a float32 sum; only the fastest if the request wants no other.

    They are measured first, except by ranks that measure together and have not done so. Algorithms that `failed` are
    left out.
    """
    if asked is None:
        return ()
    batch = asked.request.problem.batch
    try:
        measured = benchmark.micro_configurations(asked.request)
    except (BackendError, NotRecordedError, MemoryError) as error:
        _LOG.info("%s: no float32 sum: %s", asked.request.problem, error)
        return ()
    wanted = [each for each in measured if each.algorithms.isdisjoint(failed) and (each.slabs or each.size < batch)]
    return tuple(replace(each, float32_sum=asked.total) for each in front_of(asked.request, wanted))


def preferred(
    known: Iterable[Configuration], sums: Iterable[Configuration], limit_bytes: int | None
) -> tuple[Configuration, ...]:
    """Return the desirable configurations without those whose repeated rounding buys too little time.

    Args:
        known: configurations without a float32 sum, undivided ones included.
        sums: configurations with one.
        limit_bytes: the workspace that is there whether or not it is used (WR); None if a configuration that rounds
            once takes the place of one that rounds often only within the same workspace (WD).

    Returns:
        Configurations with rising workspace and falling time; for WR, the fastest is the last.
    """
    every = [*known, *sums]
    once = [each for each in every if not rounds_often(each)]

    def is_worth(each: Configuration) -> bool:
        room = each.workspace_bytes if limit_bytes is None else limit_bytes
        within = (other.time_ms for other in once if other.workspace_bytes <= room)
        return each.time_ms < WORTH_ROUNDING * min(within, default=float("inf"))

    kept = [each for each in every if not rounds_often(each) or is_worth(each)]
    front: list[Configuration] = []
    for each in sorted(kept, key=lambda one: (one.workspace_bytes, one.time_ms)):
        if not front or each.time_ms < front[-1].time_ms:
            front.append(each)
    return tuple(front)


def by_rule(
    found: Configuration | None, asked: SummedRequest | None, benchmark: Benchmark, failed: Collection[str] = ()
) -> Configuration | None:
    """Return what heuristic mode takes, with a float32 sum instead of one that rounds often, or of none, if it fits.

    `found` is what it takes without a float32 sum. Algorithms that `failed` are not chosen.
    """
    if asked is None or not (found is None or rounds_often(found)):
        return found
    try:
        other = benchmark.rule.configuration(asked.request, failed=failed)
    except (BackendError, NotRecordedError):
        return found
    return found if other is None else replace(other, float32_sum=asked.total)


def front_of(request: Request, measured: Sequence[MicroConfiguration]) -> tuple[Configuration, ...]:
    """Return the desirable set of measured micro-configurations; only the fastest if the request wants no other."""
    batch = request.problem.batch
    if request.whole:
        return desirable_set(measured, batch)
    best = fastest(measured, batch)
    return () if best is None else (best,)
