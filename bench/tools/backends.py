"""Backends and their measurements, as several scripts need them."""

from collections.abc import Iterable

from ucudnn.backends import open_backend
from ucudnn.backends.base import Backend, ComputeBackend
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.algorithms.gathered import skips
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.factory import open_benchmark
from ucudnn.benchmarking.recording import NO_LIMIT
from ucudnn.benchmarking.request import Request
from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.errors import BackendError
from ucudnn.networks.tables import Network
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem
from ucudnn.settings import Settings
from ucudnn.solvers.desirable import desirable_set


def open_computing(name: str, candidates: Candidates = Candidates.BEST) -> ComputeBackend:
    """Open a backend that executes.

    Raises:
        BackendError: if the backend only plans.
    """
    backend = open_backend(name, candidates=candidates, cudnn_library=Settings.load().cudnn_library)
    if not isinstance(backend, ComputeBackend):
        raise BackendError(f"backend {name} plans but cannot execute: give cudnn or cpu")
    return backend


def plain_benchmark(name: str, network: Network, benchmark: Benchmark, settings: Settings) -> Benchmark:
    """Return the benchmark of cuDNN alone, which never copies the samples that strides read.

    Args:
        name: name of the backend of `benchmark`.
        network: the network.
        benchmark: benchmark of the graph API; it is returned if no layer of the network skips samples.
        settings: settings of `benchmark`.
    """
    if not any(skips(layer.forward) for layer in network.layers):
        return benchmark
    return open_benchmark(open_graph(name, network.name, settings, Candidates.GRAPH_PLAIN), settings)


def open_graph(name: str, network: str, settings: Settings, candidates: Candidates = Candidates.GRAPH) -> Backend:
    """Open a backend of the graph API, live or recorded for a network."""
    return open_backend(name, candidates=candidates, network=network, cudnn_library=settings.cudnn_library)


def measured(
    benchmark: Benchmark, problem: ConvolutionProblem, policy: BatchSizePolicy = BatchSizePolicy.POWER_OF_TWO
) -> list[MicroConfiguration]:
    """Return the micro-configurations of all sizes of a policy, whatever workspace they need."""
    request = Request(problem=problem, sizes=policy.sizes(problem.batch), limit_bytes=NO_LIMIT)
    return benchmark.micro_configurations(request)


def undivided(found: Iterable[MicroConfiguration], problem: ConvolutionProblem) -> tuple[Configuration, ...]:
    """Return the desirable configurations that leave the mini-batch whole; the last one is the fastest."""
    return desirable_set([each for each in found if each.size == problem.batch and not each.slabs], problem.batch)
