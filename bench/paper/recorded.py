"""Networks recorded on an H200, for benchmarks of solvers without a GPU. Not a script."""

from collections.abc import Sequence
from typing import Any

from bench.tools.backends import measured
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.replay import ReplayBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.configuration import MicroConfiguration
from ucudnn.kernel import Kernel
from ucudnn.networks.tables import load_network
from ucudnn.profiles.format import load_profile
from ucudnn.solvers.desirable import desirable_set
from ucudnn.solvers.division import Choice

NETWORKS = ("alexnet", "resnet18", "resnet50")

Recorded = list[tuple[Kernel, list[MicroConfiguration]]]
"""The kernels of a network with their micro-configurations at powers of two."""


def recorded(source: str, network: str) -> Recorded:
    """Return the recording of a network in a profile."""
    benchmark = Benchmark(ReplayBackend(load_profile(source), candidates=Candidates.GRAPH, network=network))
    return [(kernel, measured(benchmark, kernel.problem)) for kernel in load_network(network).kernels()]


def choices_of(kernels: Recorded) -> list[Choice[Any]]:
    """Return the desirable sets of kernels with their counts."""
    return [
        Choice(desirable=desirable_set(found, kernel.problem.batch), count=kernel.count) for kernel, found in kernels
    ]


def variables_of(choices: Sequence[Choice[Any]]) -> dict[str, int]:
    """Return the number of integer variables, with identical kernels merged and with every kernel apart."""
    return {
        "variables": sum(len(choice.desirable) for choice in choices),
        "variables_unmerged": sum(len(choice.desirable) * choice.count for choice in choices),
    }
