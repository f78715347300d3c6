"""Prospects: engines that take a compiler's time for each problem, and were far behind in others of its kind.

cuDNN 9.19 offers engines 16 and 19 for filter gradients of float16, in 6 configurations that take 7 s to compile. On an
H200 they took 3 to 190 times as long as the best engine within 8 MiB and more, in all of 120 problems.
"""

from collections.abc import Iterable
from functools import partial
from threading import Lock
from typing import final

from ucudnn.backends.prefetch import PrefetchRequest
from ucudnn.benchmarking.request import Request
from ucudnn.problem import ConvolutionProblem

FAR = 3.0
"""Times as long as what mattered, at every size at which an engine was measured."""

_TRIED = 2  # problems in which an engine was that far behind, where it was nearer in none

_Kind = tuple[object, ...]


@final
class Prospects:
    """What measurements of some problems say of engines for others of their kind. Several threads may ask.

    It counts where the fastest configuration is wanted (WR): of a whole desirable set, an engine may be part that needs
    little workspace, however slow it is. So it may be chosen within a smaller limit. What is left out depends on which
    problems came first, and what is found is kept all the same: to find out again takes a compiler's time.
    """

    def __init__(self) -> None:
        self._ratios: dict[_Kind, dict[tuple[ConvolutionProblem, int], float]] = {}
        self._lock = Lock()

    def add(self, request: Request, name: str, ratio: float) -> None:
        """Take into account what an algorithm that is compiled took, relative to what would have mattered."""
        if request.whole or request.apart:
            return
        key = request.problem.with_batch(1), request.limit_bytes
        with self._lock:
            ratios = self._ratios.setdefault(_kind_of(request.problem, name), {})
            ratios[key] = min(ratio, ratios.get(key, ratio))

    def ahead(self, requests: Iterable[Request]) -> list[PrefetchRequest]:
        """Return what measuring requests will ask for, with what is promised by then."""
        return [
            PrefetchRequest(each.problem, each.sizes, each.limit_bytes, partial(self.promises, each))
            for each in requests
        ]

    def promises(self, request: Request, name: str) -> bool:
        """Whether an algorithm is worth compiling for a request, as far as is known."""
        if request.whole or request.apart or not self._ratios:
            return True
        limit = request.limit_bytes
        with self._lock:
            known = [(*key, ratio) for key, ratio in self._ratios.get(_kind_of(request.problem, name), {}).items()]
        if any(ratio < FAR and within >= limit for _, within, ratio in known):
            return True
        return len({shape for shape, within, ratio in known if ratio >= FAR and within <= limit}) < _TRIED


def _kind_of(problem: ConvolutionProblem, name: str) -> _Kind:
    """Return what tells where an engine and its rivals do alike, whatever their knobs."""
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
        bool(problem.x_channel_stride),
        bool(problem.y_channel_stride),
        name.partition("+")[0].partition("_")[0],
    )
