"""The policy `adaptive` on recorded times of all sizes: nearly as fast as `all`, and faster than powers of two."""

import json
from bisect import bisect_left
from contextlib import contextmanager
from math import inf
from pathlib import Path
from random import Random

import pytest

from ucudnn.backends.base import Backend
from ucudnn.backends.bench import Bench, converged, worthless
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.networks.tables import load_network
from ucudnn.planning.decision import decide
from ucudnn.profiles.measurement import Algorithm, Measurement
from ucudnn.settings import Settings

RECORDED = Path(__file__).parents[1] / "data" / "h200_alexnet_all.json"
KERNELS = load_network("alexnet", 256).kernels()
GPU_NOISE = 0.06  # of a sample, as on a GPU at steady clocks


class Recorded(Backend, Bench):
    """AlexNet's kernels with the times of an H200, at the sizes that the policy `all` measured.

    Sizes that `all` left out get times between those of their neighbors. Noise makes samples only slower, as on a
    machine that does other things now and then.
    """

    name = "recorded"

    def __init__(self, seed):
        self.chance = Random(seed)
        self.measured = 0
        self.times, self.workspaces, self.algorithm_of, self.offered = {}, {}, {}, {}
        recorded = json.loads(RECORDED.read_text())["kernels"]
        for kernel in KERNELS:
            shape = kernel.problem.with_batch(1)
            for name, told in recorded[str(kernel)].items():
                self.algorithm_of.setdefault(shape, {})[name] = told
                self.times[shape, name] = [(size, time_ms) for size, time_ms, _ in told["rows"]]
                self.workspaces[shape, name] = [(size, workspace) for size, _, workspace in told["rows"]]

    def conditions(self):
        return {"device": "recorded"}

    def algorithms(self, problem):
        return tuple(self.by_name(problem).values())

    def algorithm(self, problem, name):
        return self.by_name(problem)[name]

    def by_name(self, problem):
        if problem not in self.offered:
            shape = problem.with_batch(1)
            self.offered[problem] = {
                name: Algorithm(
                    name=name,
                    workspace_bytes=round(between(self.workspaces[shape, name], problem.batch)),
                    api="graph",
                    notes=tuple(told["notes"]),
                    compiles=told["compiles"],
                )
                for name, told in self.algorithm_of[shape].items()
            }
        return self.offered[problem]

    def time_ms(self, problem, size, name):
        return between(self.times[problem.with_batch(1), name], size)

    @contextmanager
    def bench(self, problem):
        self.problem = problem
        yield self

    def measure(self, size, algorithm, effort, worth_ms=inf, slabs=()):
        self.measured += 1
        time_ms = self.time_ms(self.problem, size, algorithm.name) * (1 + self.chance.gauss(0, 0.004))
        samples = []
        while not samples or not converged(samples, effort, worth_ms, GPU_NOISE):
            samples.append(time_ms * (1 + abs(self.chance.gauss(0, 0.006))))
        complete = not worthless(samples, worth_ms, GPU_NOISE)
        return Measurement.of(algorithm, tuple(samples), complete=complete)


def between(rows, size):
    """Interpolate between known sizes, and scale in proportion beyond them."""
    index = bisect_left(rows, (size,))
    if index < len(rows) and rows[index][0] == size:
        return rows[index][1]
    if index in (0, len(rows)):
        known, value = rows[min(index, len(rows) - 1)]
        return value * size / known
    (low, below), (high, above) = rows[index - 1 : index + 1]
    return below + (above - below) * (size - low) / (high - low)


@pytest.fixture
def plan(monkeypatch):
    """Return a function that plans AlexNet, and returns the recorded time and the number of measurements."""
    monkeypatch.setattr("ucudnn.benchmarking.benchmark.ComputeBackend", Recorded)
    seed = Random().getrandbits(32)

    def run(policy, limit, kernels):
        backend = Recorded(seed)
        settings = Settings.load({}, policy=policy, workspace_limit_bytes=limit, slabs=False)
        decisions = decide(kernels, Benchmark(backend), settings)
        times = [
            backend.time_ms(each.kernel.problem, part.size, part.algorithm)
            for each in decisions.kernels
            for part in each.configuration.parts
        ]
        assert all(each.configuration.workspace_bytes <= settings.workspace_limit_bytes for each in decisions.kernels)
        return sum(times), backend.measured

    return run


@pytest.mark.parametrize(
    ("limit", "kernels"),
    [
        *(pytest.param(limit, KERNELS, marks=pytest.mark.slow) for limit in ("64MiB", "16MiB", "8MiB")),
        ("8MiB", KERNELS[6:9]),
    ],
    ids=lambda each: each if isinstance(each, str) else f"{len(each)} kernels",
)
def test_adaptive_is_near_all_and_ahead_of_powers_of_two(plan, limit, kernels):
    (all_ms, all_measured), (adaptive_ms, measured), (powers_ms, _) = (
        plan(policy, limit, kernels) for policy in ("all", "adaptive", "powerOfTwo")
    )
    assert adaptive_ms <= 1.01 * all_ms
    assert adaptive_ms <= 0.96 * powers_ms
    assert measured < all_measured / 2
