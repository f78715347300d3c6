"""Engines that are not worth compiling, because they were far behind in other problems of the same kind.

cuDNN 9.19 offers engines 16 and 19 for filter gradients of float16, in 6 configurations that take 7 s to compile. On an
H200, in all of 120 problems, they took 3 to 190 times as long as the best engine within 8 MiB and more.
"""

from collections.abc import Iterable
from functools import partial
from typing import final

from ucudnn.backends.bench import PrefetchRequest
from ucudnn.backends.fork_locks import LockLevel, new_lock
from ucudnn.benchmarking.request import Request
from ucudnn.problem import ConvolutionProblem

FAR = 3.0
"""An engine is far behind a problem's best time if it takes so many times as long at every measured size."""

_ENOUGH_PROBLEMS = 2  # an engine is left out if it was far behind in so many problems, and near in none

_ProblemKind = tuple[object, ...]


@final
class CompileFilter:
    """Learns from measurements which engines are not worth compiling for other problems. Several threads may use it.

    It counts for requests of the fastest configuration (WR) only. An engine with little workspace may be part of a
    desirable set however slow it is, and it may be chosen within a smaller limit. So what is left out depends on which
    problems came first. The plans that come of it are kept all the same, because finding out takes a compiler's time.
    """

    def __init__(self) -> None:
        self._ratios: dict[_ProblemKind, dict[tuple[ConvolutionProblem, int], float]] = {}
        self._lock = new_lock(LockLevel.INNERMOST)

    def add(self, request: Request, name: str, ratio: float) -> None:
        """Take into account the time of a compiled algorithm, divided by the time from which on it does not matter."""
        if request.whole or request.apart:
            return
        key = request.problem.with_batch(1), request.limit_bytes
        with self._lock:
            ratios = self._ratios.setdefault(_kind_of(request.problem, name), {})
            ratios[key] = min(ratio, ratios.get(key, ratio))

    def ahead(self, requests: Iterable[Request]) -> list[PrefetchRequest]:
        """Return what measuring requests will ask for. The filter decides when a backend is about to compile."""
        return [
            PrefetchRequest(each.problem, each.sizes, each.limit_bytes, partial(self.admits, each)) for each in requests
        ]

    def admits(self, request: Request, name: str) -> bool:
        """Whether an algorithm is worth compiling for a request, as far as is known."""
        if request.whole or request.apart or not self._ratios:
            return True
        limit = request.limit_bytes
        with self._lock:
            known = [(*key, ratio) for key, ratio in self._ratios.get(_kind_of(request.problem, name), {}).items()]
        if any(ratio < FAR and within >= limit for _, within, ratio in known):
            return True
        behind = {shape for shape, within, ratio in known if ratio >= FAR and within <= limit}
        return len(behind) < _ENOUGH_PROBLEMS


def _kind_of(problem: ConvolutionProblem, name: str) -> _ProblemKind:
    """Return the properties of a problem on which the rank of an engine depends, and the engine without its knobs."""
    return (
        problem.operation,
        problem.dtype,
        problem.math,
        problem.deterministic,
        problem.layout.channels_last,
        problem.alignment,
        len(problem.spatial),
        problem.groups > 1,
        1 < problem.groups == problem.channels,
        any(each > 1 for each in problem.dilation),
        bool(problem.post_padding),
        problem.float32_sum,
        problem.biased,
        bool(problem.x_channel_stride),
        bool(problem.y_channel_stride),
        name.partition("+")[0].partition("_")[0],
    )
