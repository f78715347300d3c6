"""A backend whose times are known, and whose measurements are counted."""

from contextlib import contextmanager

from ucudnn.backends.base import Backend
from ucudnn.backends.bench import Bench
from ucudnn.profiles.measurement import Algorithm, Measurement


class CountingBackend(Backend, Bench):
    """Remembers what is measured. BROKEN fails; the other algorithms take size + 1 milliseconds."""

    name = "counting"

    def __init__(self, workspaces):
        self.workspaces = workspaces
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
        return Measurement.of(algorithm, (1.0, size + 1.0, 1e9))
