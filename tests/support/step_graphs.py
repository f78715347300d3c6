"""Training steps for the tests of `ucudnn.memory`: built by hand in a few lines, or at random."""

from dataclasses import replace

from hypothesis import strategies as st

from tests.support.strategies import BOOLEANS, one_of, several_of, whole
from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import Affine, Phase, Role, StepGraph, StepOperation, Storage
from ucudnn.memory.step.liveness import measure_liveness


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

    def modules(self):
        """Give each operation the module that its name says: 'dconv1' is the gradient in module 'conv1'."""
        names = {each.name for each in self.operations}
        self.operations = [
            replace(each, module=each.name[1:] if each.name.startswith("d") and each.name[1:] in names else each.name)
            for each in self.operations
        ]
        return self

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


@st.composite
def random_steps(draw, most_operations=12):
    """Draw a step and its costs: branches, joins, long skips, views, updates in place and whole overwrites.

    Backward goes through the operations of forward in reverse and reads some of what each accessed, so most of forward
    is saved. Bytes and times are small whole numbers, so sums of them are exact.
    """
    program = _RandomProgram(draw)
    for _ in range(draw(whole(1, most_operations))):
        program.forward()
    program.end_forward()
    for accessed in reversed(program.forward_accesses):
        program.backward(accessed)
    program.optimize()
    builder = program.builder
    rates = {name: float(draw(whole(1, 4))) for name in ("offload_bytes_per_ms", "prefetch_bytes_per_ms")}
    costs = builder.costs(
        contention=draw(one_of(1.0, 1.25)), duplex=draw(one_of(1.0, 0.75)), granularity=draw(one_of(1, 4)), **rates
    )
    return builder.graph(batch=2, gradients_kept=draw(BOOLEANS)), costs


class _RandomProgram:
    """Writes a random step with a StepBuilder."""

    def __init__(self, draw):
        self.draw = draw
        self.builder = StepBuilder()
        self.builder.storage("x", 2, Role.INPUT)
        self.forward_accesses = []
        self.alive = ["x"]  # what forward may read
        self.gradients = []
        self.count = 0

    def forward(self):
        style = self.draw(one_of(*["make"] * 5, "pair", "update", "overwrite", "view", "normalize", "layer"))
        reads = set(self.some(self.alive, 1, 3))
        writes = [self.fresh("a")] if style != "pair" else [self.fresh("a"), self.fresh("a")]
        if style in ("update", "overwrite") and self.alive[1:]:
            writes = self.some(self.alive[1:], 1, 1)
            reads = reads | set(writes) if style == "update" else reads - set(writes)
        if style == "view":
            reads, writes = set(), []
        if style in ("normalize", "layer"):
            role = Role.BUFFER if style == "normalize" else Role.PARAMETER
            extra = self.fresh("p", role)
            reads.add(extra)
            writes += [extra] if style == "normalize" else []
        self.add(Phase.FORWARD, reads, writes, repeatable=self.draw(whole(0, 9)) > 0)
        self.alive += [each for each in writes if each not in self.alive and each.startswith("a")]
        self.forward_accesses.append(sorted({*reads, *writes}))

    def end_forward(self):
        self.add(Phase.FORWARD, self.some(self.alive, 1, 2), [self.fresh("loss", Role.OUTPUT)])
        self.gradients = [self.fresh("d")]
        self.add(Phase.BACKWARD, [], self.gradients)

    def backward(self, accessed):
        saved = [each for each in accessed if self.draw(BOOLEANS)]
        reads = {*saved, *self.some(self.gradients[-3:], 1, 2)}
        writes = [self.fresh("d")]
        style = self.draw(one_of(*["make"] * 4, "accumulate", "parameter", "spoil"))
        if style == "accumulate":
            writes = self.gradients[-1:]
            reads |= set(writes)
        if style == "parameter":
            writes.append(self.fresh("g", Role.GRADIENT))
        activations = [each for each in accessed if each.startswith("a")]
        if style == "spoil" and activations:
            writes = self.some(activations, 1, 1)
            reads = reads | set(writes) if self.draw(BOOLEANS) else reads - set(writes)
        self.add(Phase.BACKWARD, reads, writes)
        self.gradients += [each for each in writes if each.startswith("d") and each not in self.gradients]

    def optimize(self):
        for name, storage in list(self.builder.storages.items()):
            if storage.role is Role.PARAMETER and self.draw(BOOLEANS):
                self.add(Phase.OPTIMIZER, [name], [name])

    def fresh(self, prefix, role=Role.ACTIVATION):
        self.count += 1
        name = f"{prefix}{self.count}"
        self.builder.storage(name, self.draw(whole(0, 9)), role, fixed=self.draw(whole(0, 3)))
        return name

    def some(self, names, least, most):
        """Draw some names, the newest ones most often, but old ones too: these are the long skips."""
        return self.draw(several_of(*names[-2:], *names, least=least, most=most))

    def add(self, phase, reads, writes, **fields):
        name = f"op{len(self.builder.operations)}"
        time, scratch = self.draw(whole(0, 4)), self.draw(one_of(0, 0, 0, 5, 20))
        reads, writes = " ".join(sorted(reads)), " ".join(writes)
        self.builder.run(name, reads, writes, phase=phase, time=float(time), scratch=scratch, **fields)


def small_line():
    """Return a builder of convolution with ReLU, pooling, convolution, fully connected layer, loss, and backward.

    Each storage has 10 bytes and each copy takes 10 ms; the first convolution and its gradient take 10 ms, the second
    one and its gradient 20 ms, all else 1 ms.
    """
    builder = StepBuilder(default=10).storage("x", 10, Role.INPUT).storage("loss", 10, Role.OUTPUT)
    builder.storage("w", 10, Role.GRADIENT)
    builder.run("conv1", "x", "a", kind="aten.convolution", time=10.0).run("relu1", "a", "a")
    builder.run("pool", "a", "b").run("conv2", "b", "c", kind="aten.convolution", time=20.0)
    builder.run("fc", "c", "y", kind="aten.addmm").run("loss", "y", "loss")
    builder.backward("dloss", "y loss", "dy").backward("dfc", "c dy", "dc")
    builder.backward("dconv2", "b dc", "db", time=20.0).backward("dpool", "a b db", "da")
    builder.backward("dconv1", "x da", "w", time=10.0)
    return builder.modules()


def chain(layers, times=None):
    """Return a builder of a line of layers of 10 bytes; backward of each reads its input and its output.

    Layer k takes k ms if no other times are given.
    """
    builder = StepBuilder(default=10).storage("a0", 10, Role.INPUT)
    for layer, time in enumerate(times or range(1, layers + 1), start=1):
        builder.run(f"f{layer}", f"a{layer - 1}", f"a{layer}", time=float(time))
    builder.backward("turn", f"a{layers}", f"d{layers}")
    for layer in range(layers, 0, -1):
        builder.backward(f"b{layer}", f"a{layer - 1} a{layer} d{layer}", f"d{layer - 1}")
    return builder


def small_branches():
    """Return a builder of a convolution that a convolution and a pooling read, whose results are added; and backward.

    Sizes and times are those of `small_line`.
    """
    builder = StepBuilder(default=10).storage("x", 10, Role.INPUT).storage("loss", 10, Role.OUTPUT)
    builder.storage("w", 10, Role.GRADIENT)
    builder.run("conv1", "x", "a", kind="aten.convolution", time=10.0)
    builder.run("conv2", "a", "b", kind="aten.convolution", time=20.0).run("pool", "a", "c")
    builder.run("join", "b c", "d").run("loss", "d", "loss")
    builder.backward("dloss", "d loss", "dd").backward("dpool", "a c dd", "e")
    builder.backward("dconv2", "a dd", "f", time=20.0).backward("sum", "e f", "da")
    builder.backward("dconv1", "x da", "w", time=10.0)
    return builder.modules()


def small_unet(levels=5):
    """Return a builder of a U-Net with backward; the sizes of its levels leave holes between tensors.

    On the way down each level has a convolution, a normalization and a pooling; on the way up, what comes from below is
    joined with the normalization's result, and a convolution follows. Backward reads what forward read.
    """
    mebibyte, forward, last = 2**20, [], "x"
    sizes = [(64 * mebibyte >> level) + 3 * mebibyte * (level % 2) for level in range(levels)]
    for level, size in enumerate(sizes):
        forward += [("conv", level, last, f"c{level}", size, 8.0), ("norm", level, f"c{level}", f"n{level}", size, 2.0)]
        forward.append(("pool", level, f"n{level}", f"p{level}", size // 4, 1.0))
        last = f"p{level}"
    for level, size in reversed([*enumerate(sizes)]):
        forward += [("up", level, last, f"u{level}", size, 4.0)]
        forward += [("join", level, f"u{level} n{level}", f"j{level}", 2 * size, 2.0)]
        forward += [("merge", level, f"j{level}", f"m{level}", size, 10.0)]
        last = f"m{level}"
    builder = StepBuilder().storage("x", 8 * mebibyte, Role.INPUT)
    for name, level, reads, written, size, time in forward:
        builder.storage(written, size).storage(f"d{written}", size)
        builder.run(f"{name}{level}", reads, written, time=time)
    builder.storage("loss", 512, Role.OUTPUT).run("loss", last, "loss").backward("dloss", f"{last} loss", f"d{last}")
    made = {last}
    for name, level, reads, written, _, time in reversed(forward):
        again = [each for each in reads.split() if each in made]
        for each in again:
            builder.storage(f"e{each}", builder.storages[each].size.per_sample)
        sums = [f"e{each}" if each in again else f"d{each}" for each in reads.split() if each != "x"]
        builder.backward(f"d{name}{level}", f"{reads} d{written}", " ".join(sums), time=2 * time)
        for each in again:
            builder.backward(f"sum{level}", f"d{each} e{each}", f"d{each}")
        made.update(reads.split())
    return builder.modules()


def within_most_of_its_peak():
    """Return a U-Net's step of some 70 operations, its costs, and 90 % of its peak."""
    builder = small_unet()
    graph = builder.graph()
    costs = builder.costs(offload_bytes_per_ms=4e6, prefetch_bytes_per_ms=4e6, memory_bytes=2**40, granularity=512)
    return graph, costs, int(0.9 * measure_liveness(graph, costs).peak_bytes)


def alternatives(*pairs, batch=1):
    """Return a desirable set of undivided configurations, from (milliseconds, bytes) in the order of workspace."""
    return tuple(
        Configuration(
            parts=(MicroConfiguration(size=batch, algorithm=f"a{number}", time_ms=time, workspace_bytes=workspace),)
        )
        for number, (time, workspace) in enumerate(pairs)
    )


@st.composite
def random_convolution_steps(draw):
    """Draw a step and its costs in which some operations are convolutions with two or three algorithms each."""
    graph, costs = draw(random_steps())
    chosen = draw(st.sets(st.integers(0, len(graph.operations) - 1)))
    operations = tuple(
        replace(each, kind="aten.convolution") if index in chosen else each
        for index, each in enumerate(graph.operations)
    )
    steps = st.lists(st.integers(0, 9), min_size=1, max_size=2)
    configurations = {
        index: alternatives((9.0, 0), *((9.0 - 3 * n, 6 * n + size) for n, size in enumerate(draw(steps), start=1)))
        for index in chosen
    }
    return replace(graph, operations=operations), replace(costs, configurations=configurations)
