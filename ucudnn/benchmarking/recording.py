"""Recording: measures a network's convolutions on this machine, and makes a profile of them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ucudnn.backends.base import Backend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.exploration.pruning import traits_of
from ucudnn.benchmarking.request import Request, slab_rows
from ucudnn.networks.tables import Network
from ucudnn.networks.variants import Variant
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import MOST_ALIGNMENT, ConvolutionProblem
from ucudnn.profiles.format import Profile, recorded
from ucudnn.profiles.measurement import Measurement

NO_LIMIT = 1 << 50
"""A workspace limit that leaves nothing out. A profile is recorded once for all limits."""


def record_requests(
    network: Network,
    wanted: Iterable[Variant],
    policy: BatchSizePolicy,
    *,
    slabs: bool = True,
    backend: Backend | None = None,
) -> list[Request]:
    """Return the requests of a network's profile, which ask for each size of each kernel by itself.

    Where the backend keeps float32 sums of filter gradients, their parts are recorded, too.
    """
    problems = [variant.of(kernel.problem) for variant in wanted for kernel in network.kernels()]
    if backend is not None:
        summed = [each for each in problems if each.is_rounded_gradient and backend.float32_sum(each) is not None]
        problems += [replace(each, float32_sum=True) for each in summed]
    return [
        Request(
            problem=problem,
            sizes=policy.sizes(problem.batch),
            limit_bytes=NO_LIMIT,
            apart=True,
            adaptive=policy is BatchSizePolicy.ADAPTIVE,
            rows=slab_rows(problem, policy) if slabs else (),
        )
        for problem in dict.fromkeys(problems)
    ]


def record(name: str, requests: Sequence[Request], benchmark: Benchmark, *, every: bool = False) -> Profile:
    """Measure, and return a profile with one recording of this name.

    Unless `every` algorithm is kept, those are left out that another one of the same API beats in both time and
    workspace at the same size.

    Raises:
        UnsupportedProblemError: if the backend cannot compute a problem at all.
    """
    benchmark.explore(requests)
    recording: dict[ConvolutionProblem, tuple[Measurement, ...]] = {}
    for request in requests:
        found: dict[ConvolutionProblem, list[Measurement]] = {}
        for part, each in benchmark.results(request):
            if each.measured and (each.complete or every):
                found.setdefault(replace(part, alignment=MOST_ALIGNMENT), []).append(recorded(each))
        recording.update({part: tuple(kept if every else unbeaten(kept)) for part, kept in found.items()})
    return Profile(name=name, conditions=dict(benchmark.backend.machine()), recordings={name: recording})


def unbeaten(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return the measurements that no other one of the same API beats in both time and workspace.

    A problem may ask for algorithms that repeat their results to the bit, or for some without tensor cores. So such an
    algorithm is compared with its like only.
    """
    kept: list[Measurement] = []
    for each in sorted(measurements, key=lambda one: (one.time_ms, one.algorithm.workspace_bytes, one.algorithm.name)):
        traits = traits_of(each.algorithm)
        faster = (other.algorithm for other in kept if traits_of(other.algorithm) <= traits)
        if all(other.workspace_bytes > each.algorithm.workspace_bytes for other in faster):
            kept.append(each)
    return kept
