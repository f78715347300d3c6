"""StepGraph: the operations of one training step in order, with the storages that each reads and writes.

A storage is the bytes behind tensors. All views share one storage; it is what is kept, moved or dropped. Storages and
operations are known by their index in `StepGraph.storages` and `StepGraph.operations`.

Versions. Every write makes a new version of its storage. Version 0 is what the storage holds when the step begins;
version k is what its k-th writer leaves, in the order of the operations. A writer that needs the version before (an
in-place ReLU, an accumulation, a write into a part of the storage) names the storage in its reads too. A writer that
does not name it there overwrites the whole storage. So to make version k again means: run its writers again from the
last one that overwrites the storage whole, up to the k-th.

Sizes are affine in the mini-batch: see `Affine`. A step that was recorded at two batches stands for every batch.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from operator import attrgetter, lt

from ucudnn.errors import StepGraphError
from ucudnn.problem import MOST_SIZE, ConvolutionProblem
from ucudnn.units import shortened

RANKS = "ucudnn_ranks"
"""Namespace of the operators in which all ranks take part, which begins the kinds of their operations."""


class Phase(Enum):
    """The part of a step that an operation belongs to; the loss belongs to forward."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Role(Enum):
    """What a storage holds, which says when it exists.

    Parameters, buffers, optimizer state and inputs exist before the step and after it. A gradient is the gradient of a
    parameter: it exists from its first write (from the start where `StepGraph.gradients_kept`) and after the step. An
    output is what the step hands back, as the loss: it exists from its first write and after the step. All other
    storages are activations: they exist from their first write to their last access.
    """

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    OUTPUT = "output"
    ACTIVATION = "activation"

    __hash__ = object.__hash__  # that of an enumeration is Python code, and each storage's role is looked up

    @property
    def exists_before(self) -> bool:
        """Whether such a storage always exists when the step begins."""
        return self in (Role.PARAMETER, Role.BUFFER, Role.INPUT, Role.OPTIMIZER_STATE)

    @property
    def exists_after(self) -> bool:
        """Whether such a storage still exists when the step has ended."""
        return self is not Role.ACTIVATION


@dataclass(frozen=True, slots=True)
class Affine:
    """A quantity of a step that is affine in the mini-batch: fixed + per_sample * batch, in whole numbers.

    Attributes:
        fixed: what does not depend on the mini-batch.
        per_sample: what each sample adds.
    """

    fixed: int
    per_sample: int = 0

    def at(self, batch: int) -> int:
        """Return the quantity at a mini-batch."""
        return self.fixed + self.per_sample * batch

    @classmethod
    def through(cls, batch: int, value: int, other_batch: int, other_value: int) -> "Affine":
        """Return the quantity that has these values at two different batches.

        Raises:
            StepGraphError: if no whole number for each sample leads from one to the other.
        """
        per_sample, remainder = divmod(other_value - value, other_batch - batch)
        if remainder:
            raise StepGraphError(
                f"{value} at a mini-batch of {batch} and {other_value} at {other_batch} do not differ by a whole number"
                " for each sample"
            )
        return cls(value - per_sample * batch, per_sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The bytes behind one or more tensors.

    Attributes:
        name: a name that is unique in the step, as a rule that of the tensor that it was made for.
        aliases: names of the tensors that are views of it, in the order of their making; () where nobody needs them.
    """

    name: str
    role: Role
    size: Affine
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOperation:
    """One operation of a step: as a rule, one kernel launch of the framework.

    An operation that only makes views reads and writes nothing. One that only allocates writes the whole storage.

    Attributes:
        name: a name that is unique in the step: 'convolution_12'.
        kind: the framework's operator: 'aten.convolution'.
        dtype: type of the elements that it writes: 'float32'; '' where none is known.
        reads: storages whose bytes it reads, in ascending order without repetition.
        writes: storages whose bytes it writes; one that is among `reads` too is updated in place.
        traffic: bytes that its kernels read and write in device memory; at most all of `reads` and `writes`, less where
            it touches only a part of a storage.
        problem: the convolution that it computes, kept at a batch of 1; None if it computes none.
        problem_batch: the batch of that convolution, which differs from the mini-batch where a model folds time steps
            or windows into the batch.
        module: the module of the model that called it: 'layer1.0.conv2'; '' where none is known.
        source: file and line that called it: 'model.py:61'; '' where none is known.
        repeatable: whether running it again on the same bytes gives the same bytes, so that it can be recomputed; not
            so for an operation that draws random numbers anew. An operation that updates a parameter, a buffer or
            optimizer state beside its other results (batch normalization and its running statistics) is repeatable:
            a recomputation leaves such storages alone, and its other results must not depend on them.
    """

    name: str
    kind: str
    phase: Phase
    dtype: str = ""
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    flops: Affine = Affine(0)
    traffic: Affine = Affine(0)
    problem: ConvolutionProblem | None = None
    problem_batch: Affine = Affine(0, 1)
    module: str = ""
    source: str = ""
    repeatable: bool = True

    def __post_init__(self) -> None:
        if self.problem is not None:  # one form, so that steps compare equal whatever batch they were recorded at
            object.__setattr__(self, "problem", self.problem.with_batch(1))


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """A training step: what `ucudnn.memory` plans for. Immutable.

    Attributes:
        name: the model: 'torchvision:resnet50'.
        batch: the mini-batch of which `sizes` and `problems` speak; `with_batch` changes it.
        operations: in the order in which the program runs them: forward, backward, optimizer.
        recorded: mini-batches at which the step was recorded.
        gradients_kept: whether the gradients of parameters exist before the step begins, because the program adds to
            them or sets them to zero; PyTorch's `zero_grad` frees them, unless `set_to_none=False`.
        conditions: what the record depends on: versions of the framework, device, data type.

    Raises:
        StepGraphError: if an operation accesses a storage that is not there, or reads what nobody has written, or comes
            after one of a later phase, or a name occurs twice, or a size is negative. The message names the operation
            and the storage.
    """

    name: str
    batch: int
    operations: tuple[StepOperation, ...]
    storages: tuple[Storage, ...]
    recorded: tuple[int, ...] = ()
    gradients_kept: bool = False
    conditions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or not 1 <= self.batch <= MOST_SIZE:
            raise StepGraphError(f"{self.name}: a mini-batch of {shortened(self.batch)} is not 1 to {MOST_SIZE}")
        _check_phases(self)
        _check_names(self)
        _check_accesses(self)

    def with_batch(self, batch: int) -> "StepGraph":
        """Return the same step at another mini-batch.

        Raises:
            StepGraphError: if the step was recorded at one mini-batch only, or makes no sense at this one.
        """
        if len(self.recorded) == 1 and batch != self.batch:
            raise StepGraphError(
                f"{self.name} was recorded at a mini-batch of {self.batch} only, so nothing is known of {batch}"
            )
        return self if batch == self.batch else replace(self, batch=batch)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each storage at the mini-batch."""
        return tuple(storage.size.at(self.batch) for storage in self.storages)

    @cached_property
    def problems(self) -> Mapping[int, ConvolutionProblem]:
        """The convolutions at the mini-batch, by the index of their operation."""
        return {
            index: operation.problem.with_batch(operation.problem_batch.at(self.batch))
            for index, operation in enumerate(self.operations)
            if operation.problem is not None
        }

    @cached_property
    def exists_before(self) -> tuple[bool, ...]:
        """Whether each storage exists when the step begins."""
        kept = self.gradients_kept
        return self._by_role({role: role.exists_before or (kept and role is Role.GRADIENT) for role in Role})

    @cached_property
    def exists_after(self) -> tuple[bool, ...]:
        """Whether each storage still exists when the step has ended."""
        return self._by_role({role: role.exists_after for role in Role})

    @cached_property
    def left_alone(self) -> tuple[bool, ...]:
        """Whether a recomputation leaves each storage alone: parameters, buffers, inputs and optimizer state."""
        return self._by_role({role: role.exists_before for role in Role})

    @cached_property
    def writers(self) -> tuple[tuple[int, ...], ...]:
        """The operations that write each storage, in order: `writers[s][k - 1]` makes version k of storage s."""
        return self._accesses(attrgetter("writes"))

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """The operations that read each storage, in order."""
        return self._accesses(attrgetter("reads"))

    @cached_property
    def accesses(self) -> tuple[tuple[int, ...], ...]:
        """The operations that read or write each storage, in order."""
        return self._accesses(lambda operation: {*operation.reads, *operation.writes})

    @cached_property
    def waits_for_optimizer(self) -> tuple[bool, ...]:
        """Whether an operation of the optimizer accesses each storage last.

        PyTorch's optimizer runs by itself, so no plan can copy such a storage between its operations. It may be absent
        before the first of them.
        """
        return tuple(bool(each) and each[-1] >= self.optimizer_begins for each in self.accesses)

    @cached_property
    def read_versions(self) -> tuple[tuple[int, ...], ...]:
        """For each operation, the version of each storage in its `reads` that it reads."""
        current = [0] * len(self.storages)
        versions = []
        for operation in self.operations:
            versions.append(tuple(current[storage] for storage in operation.reads))
            for storage in operation.writes:
                current[storage] += 1
        return tuple(versions)

    @cached_property
    def recompute_reads(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each operation, each (storage, version) that a recomputation of it reads.

        These are its reads without the persistent storages that it would update beside its other results.
        """
        return tuple(
            tuple(
                (storage, version)
                for storage, version in zip(operation.reads, versions, strict=True)
                if not (self.left_alone[storage] and storage in operation.writes)
            )
            for operation, versions in zip(self.operations, self.read_versions, strict=True)
        )

    @cached_property
    def makes(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each operation, the storages in its `writes`, each with the version that the operation makes."""
        made: list[list[tuple[int, int]]] = [[] for _ in self.operations]
        for storage, writers in enumerate(self.writers):
            for version, operation in enumerate(writers, start=1):
                made[operation].append((storage, version))
        return tuple(map(tuple, made))

    @cached_property
    def saved(self) -> tuple[int, ...]:
        """Activations with bytes that forward writes and backward reads: what is offloaded or recomputed."""
        return tuple(
            index
            for index, storage in enumerate(self.storages)
            if storage.role is Role.ACTIVATION
            and self.sizes[index] > 0
            and any(self.operations[writer].phase is Phase.FORWARD for writer in self.writers[index])
            and any(self.operations[reader].phase is Phase.BACKWARD for reader in self.readers[index])
        )

    @cached_property
    def collectives(self) -> frozenset[int]:
        """The operations in which all ranks take part."""
        return frozenset(index for index, each in enumerate(self.operations) if each.kind.startswith(f"{RANKS}."))

    @cached_property
    def backward_begins(self) -> int:
        """Index of the first operation that does not belong to forward; the number of operations if there is none."""
        return sum(each.phase is Phase.FORWARD for each in self.operations)

    @cached_property
    def optimizer_begins(self) -> int:
        """Index of the first operation of the optimizer; the number of operations if there is none."""
        return sum(each.phase is not Phase.OPTIMIZER for each in self.operations)

    def version_before(self, operation: int, storage: int) -> int:
        """Return the version of a storage that the program has before an operation."""
        return bisect_left(self.writers[storage], operation)

    def operation_name(self, index: int) -> str:
        """Return an operation as messages name it: 'operation 12 (relu_3, layer1.0.relu)'."""
        operation = self.operations[index]
        return f"operation {index} ({operation.name}{', ' if operation.module else ''}{operation.module})"

    def storage_name(self, index: int) -> str:
        """Return a storage as messages name it: 'storage 7 (relu_3)'."""
        return f"storage {index} ({self.storages[index].name})"

    def _by_role(self, answers: Mapping[Role, bool]) -> tuple[bool, ...]:
        return tuple(map(answers.__getitem__, map(attrgetter("role"), self.storages)))

    def _accesses(self, accessed: Callable[[StepOperation], Iterable[int]]) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.storages]
        for index, operation in enumerate(self.operations):
            for storage in accessed(operation):
                found[storage].append(index)
        return tuple(map(tuple, found))


def _check_phases(graph: StepGraph) -> None:
    ranks = {phase: rank for rank, phase in enumerate(Phase)}
    latest = Phase.FORWARD
    for index, operation in enumerate(graph.operations):
        if operation.phase is not latest and ranks[operation.phase] < ranks[latest]:
            raise StepGraphError(
                f"{graph.name}: {graph.operation_name(index)} belongs to {operation.phase.value}, and an operation"
                f" before it to {latest.value}"
            )
        latest = operation.phase


def _check_names(graph: StepGraph) -> None:
    for noun, values in (("operation", graph.operations), ("storage", graph.storages)):
        names = [value.name for value in values]
        if len({*names}) < len(names):
            twice = next(name for name, number in Counter(names).items() if number > 1)
            raise StepGraphError(f"{graph.name}: {noun} name {twice!r} occurs twice")
    for index, size in enumerate(graph.sizes):
        if size < 0:
            raise StepGraphError(
                f"{graph.name}: {graph.storage_name(index)} has {size} bytes at a mini-batch of {graph.batch}"
            )


def _check_accesses(graph: StepGraph) -> None:
    written, count = list(graph.exists_before), len(graph.storages)
    for index, operation in enumerate(graph.operations):
        for accessed in (operation.reads, operation.writes):
            ascends = len(accessed) < 2 or all(map(lt, accessed, accessed[1:]))
            if accessed and not (ascends and 0 <= accessed[0] <= accessed[-1] < count):
                wrong = f"accesses storages {accessed}, of which some are not among 0 to {count - 1}"
                if all(0 <= storage < count for storage in accessed):
                    wrong = f"lists storages {accessed}, which must ascend"
                raise StepGraphError(f"{graph.name}: {graph.operation_name(index)} {wrong}")
        for storage in operation.reads:
            if not written[storage]:
                raise StepGraphError(
                    f"{graph.name}: {graph.operation_name(index)} reads {graph.storage_name(storage)}, which nothing"
                    " has written before"
                )
        for storage in operation.writes:
            written[storage] = True
