"""Training steps for the tests of `ucudnn.memory`: built by hand in a few lines."""

from ucudnn.memory.costs import Costs
from ucudnn.memory.graph import Affine, Phase, Role, StepGraph, StepOperation, Storage


class StepBuilder:
    """Builds a step operation by operation; storages are known by their names.

    `storage` declares one and `run` adds an operation, whose reads and writes are texts of names with spaces between.
    A storage that is written and was not declared is an activation of `default` bytes.
    """

    def __init__(self, default=10):
        self.default = default
        self.storages = {}
        self.operations = []
        self.times = []
        self.scratch = []

    def storage(self, name, size, role=Role.ACTIVATION, fixed=0):
        self.storages[name] = Storage(name=name, role=role, size=Affine(fixed, size))
        return self

    def run(self, name, reads="", writes="", phase=Phase.FORWARD, time=1.0, scratch=0, **fields):
        for written in writes.split():
            if written not in self.storages:
                self.storage(written, self.default)
        rows = list(self.storages)
        operation = StepOperation(
            name=name,
            kind=fields.pop("kind", "test"),
            phase=phase,
            reads=tuple(sorted(rows.index(each) for each in reads.split())),
            writes=tuple(sorted(rows.index(each) for each in writes.split())),
            **fields,
        )
        self.operations.append(operation)
        self.times.append(time)
        self.scratch.append(scratch)
        return self

    def backward(self, name, reads="", writes="", **fields):
        return self.run(name, reads, writes, phase=Phase.BACKWARD, **fields)

    def graph(self, batch=1, **fields):
        return StepGraph(
            name=fields.pop("name", "hand"),
            batch=batch,
            operations=tuple(self.operations),
            storages=tuple(self.storages.values()),
            **fields,
        )

    def costs(self, **fields):
        """Return costs with the builder's times and scratch, and a link of 1 byte per ms each way."""
        given = {"offload_bytes_per_ms": 1.0, "prefetch_bytes_per_ms": 1.0, "memory_bytes": 10**9, **fields}
        return Costs(device="test", time_ms=tuple(self.times), scratch_bytes=tuple(self.scratch), **given)
