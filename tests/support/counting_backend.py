"""A backend whose times are known, and whose measurements are counted."""

from contextlib import contextmanager

from ucudnn.backends.base import Backend
from ucudnn.backends.bench import Bench
from ucudnn.profiles.measurement import Algorithm, Measurement


class CountingBackend(Backend, Bench):
    """Remembers what is measured. BROKEN fails.

    Args:
        workspaces: bytes of a sample for each algorithm.
        times: milliseconds of a call, and of each sample beside that; one and one for others.
    """

    name = "counting"

    def __init__(self, workspaces, times=()):
        self.workspaces = workspaces
        self.times = dict(times)
        self.measured = []
        self.problem = None

    def conditions(self):
        return {"device": "none"}

    def algorithms(self, problem):
        return tuple(
            Algorithm(name=name, workspace_bytes=size * problem.batch, api="counting")
            for name, size in self.workspaces.items()
        )

    @contextmanager
    def bench(self, problem):
        self.problem = problem
        yield self

    def measure(self, size, algorithm, effort, worth_ms=float("inf"), slabs=()):
        self.measured.append((self.problem.with_batch(size), algorithm.name))
        if algorithm.name == "BROKEN":
            return Measurement.failed(algorithm, "it is broken")
        if algorithm.name not in self.times:
            return Measurement.of(algorithm, (1.0, size + 1.0, 1e9))
        call, each = self.times[algorithm.name]
        return Measurement.of(algorithm, (call + each * size,) * 6)
