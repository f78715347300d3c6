"""Recording: a network's convolutions, measured on this machine, as a profile."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.pruning import kind_of
from ucudnn.benchmarking.request import Request
from ucudnn.benchmarking.slab_explorer import rows_tried
from ucudnn.networks.tables import Network
from ucudnn.networks.variants import Variant
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import MOST_ALIGNMENT, ConvolutionProblem
from ucudnn.profiles.format import Profile, recorded
from ucudnn.profiles.measurement import Measurement

NO_LIMIT = 1 << 50
"""Bytes of workspace: limits filter when plans are made."""


def record_requests(
    network: Network, wanted: Iterable[Variant], policy: BatchSizePolicy, *, slabs: bool = True
) -> list[Request]:
    """Return what to measure for a network's profile: what each size of every kernel has to offer.

    Args:
        network: what is recorded.
        wanted: in which types and layouts.
        policy: which micro-batch sizes, and which slabs.
        slabs: whether slabs are, of single samples that need much workspace.
    """
    problems = (variant.of(kernel.problem) for variant in wanted for kernel in network.kernels())
    return [
        Request(
            problem=problem,
            sizes=policy.sizes(problem.batch),
            limit_bytes=NO_LIMIT,
            apart=True,
            adaptive=policy is BatchSizePolicy.ADAPTIVE,
            rows=rows_tried(problem, policy) if slabs else (),
        )
        for problem in dict.fromkeys(problems)
    ]


def record(name: str, requests: Sequence[Request], benchmark: Benchmark, *, every: bool = False) -> Profile:
    """Measure, and return a profile with one recording.

    Args:
        name: of the recording, and of the profile.
        requests: what to measure.
        benchmark: measures.
        every: keep also what another algorithm of the same API beats in both time and workspace at the same size.

    Raises:
        UnsupportedProblemError: if the backend cannot compute a problem at all.
    """
    benchmark.explore(requests)
    recording: dict[ConvolutionProblem, tuple[Measurement, ...]] = {}
    for request in requests:
        found: dict[ConvolutionProblem, list[Measurement]] = {}
        for part, result in benchmark.results(request):
            if result.measured and (result.complete or every):
                found.setdefault(replace(part, alignment=MOST_ALIGNMENT), []).append(recorded(result))
        recording.update({part: tuple(records if every else unbeaten(records)) for part, records in found.items()})
    return Profile(name=name, conditions=dict(benchmark.backend.machine()), recordings={name: recording})


def unbeaten(records: Sequence[Measurement]) -> list[Measurement]:
    """Return what no other record of the same API beats in both time and workspace.

    What repeats its results to the bit is compared with its like only, and so is what uses no tensor cores, for
    problems may ask for either.
    """
    kept: list[Measurement] = []
    for each in sorted(
        records, key=lambda record: (record.time_ms, record.algorithm.workspace_bytes, record.algorithm.name)
    ):
        kind = kind_of(each.algorithm.api, each.algorithm.notes)
        faster = (other for other in kept if kind_of(other.algorithm.api, other.algorithm.notes) <= kind)
        if all(other.algorithm.workspace_bytes > each.algorithm.workspace_bytes for other in faster):
            kept.append(each)
    return kept
