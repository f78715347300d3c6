"""The ways to compute a network that are compared, and how each of them chooses the algorithm of a kernel.

A user without ucudnn has what cuDNN's heuristics offer first, or PyTorch. The other ways differ in one thing each from
their neighbour, so that the table tells apart what a measured choice, more algorithms, and micro-batches gain.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ucudnn.backends.base import ComputeBackend
from ucudnn.backends.candidates import Candidates
from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.errors import InfeasibleError, UcudnnError
from ucudnn.execution.plan import make_plan
from ucudnn.kernel import Kernel
from ucudnn.units import format_bytes

GRAPH, LEGACY, PYTORCH = "cuDNN graph", "cuDNN legacy", "PyTorch"
HEURISTICS = "cuDNN heuristics"
ORIGINAL = "original μ-cuDNN"
UNDIVIDED = "ucudnn undivided"
GRAPH_ONLY = "ucudnn graph only"
WITHOUT_COPIES = "ucudnn without copies"
POWER_OF_TWO, ADAPTIVE = "ucudnn powerOfTwo", "ucudnn adaptive"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to choose the algorithms of a network.

    Attributes:
        candidates: the algorithms of cuDNN to choose from.
        policy: the batch-size policy; None for the first algorithm that heuristics offer within the limit, unmeasured.
        slabs: whether single samples may be computed in slabs.
    """

    candidates: Candidates
    policy: str | None
    slabs: bool = False


WAYS: dict[str, Way | None] = {
    LEGACY: Way(candidates=Candidates.LEGACY, policy="undivided"),
    HEURISTICS: Way(candidates=Candidates.GRAPH_PLAIN, policy=None),
    GRAPH: Way(candidates=Candidates.GRAPH_PLAIN, policy="undivided"),
    PYTORCH: None,
    ORIGINAL: Way(candidates=Candidates.LEGACY, policy="powerOfTwo"),
    UNDIVIDED: Way(candidates=Candidates.BEST, policy="undivided"),
    GRAPH_ONLY: Way(candidates=Candidates.GRAPH_PLAIN, policy="powerOfTwo", slabs=True),
    WITHOUT_COPIES: Way(candidates=Candidates.BEST_PLAIN, policy="powerOfTwo", slabs=True),
    POWER_OF_TWO: Way(candidates=Candidates.BEST, policy="powerOfTwo", slabs=True),
    ADAPTIVE: Way(candidates=Candidates.BEST, policy="adaptive", slabs=True),
}
"""All ways, in the order of the table; PyTorch chooses by itself."""

_UNTIMED_MS = 1.0  # a micro-configuration has a time, heuristics have none; nothing reads this


def offered_first(
    kernels: Iterable[Kernel], backend: ComputeBackend, limit_bytes: int
) -> list[tuple[Kernel, Configuration]]:
    """Return for each kernel the first algorithm that the backend lists within a limit and can prepare, undivided.

    The cuDNN backend lists what the heuristics offer in their order: mode A, B, then FALLBACK.

    Raises:
        InfeasibleError: if no algorithm of a kernel fits.
        UnsupportedProblemError: if the backend cannot compute a kernel at all.
    """
    return [(kernel, _first(kernel, backend, limit_bytes)) for kernel in kernels]


def _first(kernel: Kernel, backend: ComputeBackend, limit_bytes: int) -> Configuration:
    offered = backend.algorithms(kernel.problem)
    for each in offered:
        if each.workspace_bytes > limit_bytes:
            continue
        part = MicroConfiguration(
            size=kernel.problem.batch,
            algorithm=each.name,
            time_ms=_UNTIMED_MS,
            workspace_bytes=each.workspace_bytes,
        )
        configuration = Configuration(parts=(part,))
        try:
            make_plan(kernel.problem, configuration, backend)
        except UcudnnError:
            continue  # cuDNN offers engines for which it cannot build a plan
        return configuration
    least = min(each.workspace_bytes for each in offered)
    raise InfeasibleError(
        f"{kernel}: heuristics offer nothing within {format_bytes(limit_bytes)} that can be prepared",
        kernel=str(kernel),
        limit_bytes=limit_bytes,
        required_bytes=least,
    )
