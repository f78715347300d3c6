"""Random micro-configurations, and the fronts of the recorded networks."""

from functools import cache

import pytest

from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import Request
from ucudnn.networks.tables import load_network
from ucudnn.policy import BatchSizePolicy
from ucudnn.solvers.desirable import desirable_set
from ucudnn.solvers.division import Choice

UNLIMITED = 2**50


@pytest.fixture(scope="session")
def recorded(replay):
    """Return, for a network, each kernel with all its recorded graph engines at power-of-two sizes."""

    @cache
    def load(name):
        benchmark = Benchmark(replay(name))

        def measured(problem):
            sizes = BatchSizePolicy.POWER_OF_TWO.sizes(problem.batch)
            return benchmark.micro_configurations(Request(problem=problem, sizes=sizes, limit_bytes=UNLIMITED))

        return [(kernel, measured(kernel.problem)) for kernel in load_network(name).kernels()]

    return load


@pytest.fixture(scope="session")
def recorded_choices(recorded):
    """Return the desirable sets of a recorded network with their counts."""

    def load(name):
        return [
            Choice(desirable=desirable_set(measured, kernel.problem.batch), count=kernel.count)
            for kernel, measured in recorded(name)
        ]

    return load
