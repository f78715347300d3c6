"""When a plan is valid: its actions are walked once, with the version of each storage on the device and on the host."""

from collections.abc import Sequence
from typing import NoReturn

from ucudnn.errors import MemoryPlanError
from ucudnn.memory.plans.actions import COMPUTES, Action, ActionKind, follow
from ucudnn.memory.step.graph import StepGraph

_ABSENT = -1


def check_actions(graph: StepGraph, actions: Sequence[Action]) -> None:
    """Check that a plan's actions compute the step.

    Every operation runs once and reads each storage in the version that the program reads; so operations may only be
    reordered as far as their storages allow. Nothing is freed or copied that is absent, no bytes are accessed while a
    prefetch of them runs or written while an offload of them runs, and all that exists after the step is there in its
    last version.

    Raises:
        MemoryPlanError: at the first action that breaks a rule; the message names the operation and the storage.
    """
    walk = _Walk(graph)
    follow(actions, walk)
    walk.at = len(actions)
    walk.end()


def check_buffers(graph: StepGraph, actions: Sequence[Action], buffers: Sequence[Sequence[int]]) -> None:
    """Check that storages that share a buffer are never present together.

    Raises:
        MemoryPlanError: if two are, or a storage is in two buffers, or exists before or after the step, or is copied.
    """
    owner: dict[int, int] = {}
    for number, buffer in enumerate(buffers):
        for storage in buffer:
            if storage in owner or graph.exists_after[storage]:
                why = "in two buffers" if storage in owner else "in a buffer, but exists after the step"
                raise MemoryPlanError(f"{graph.storage_name(storage)} is {why}", action=0, storage=storage)
            owner[storage] = number
    present: dict[int, int] = {}  # the storage in each buffer
    for index, (kind, target) in enumerate(actions if owner else ()):
        if kind in COMPUTES:
            for storage in graph.operations[target].writes:
                if storage in owner and present.setdefault(owner[storage], storage) != storage:
                    raise MemoryPlanError(
                        f"action {index}: {graph.operation_name(target)} writes {graph.storage_name(storage)} into the"
                        f" buffer that {graph.storage_name(present[owner[storage]])} occupies",
                        action=index,
                        operation=target,
                        storage=storage,
                    )
        elif kind is ActionKind.FREE:
            present.pop(owner.get(target, -1), None)
        elif target in owner:
            raise MemoryPlanError(
                f"action {index}: {graph.storage_name(target)} is copied, but it has its place in a buffer",
                action=index,
                storage=target,
            )


class _Walk:
    """The state of device and host between two actions."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.at = 0
        self.device = [0 if exists else _ABSENT for exists in graph.exists_before]  # version of each storage
        self.host = [_ABSENT] * len(graph.storages)
        self.ran = [False] * len(graph.operations)
        self.leaving: set[int] = set()  # offloads and prefetches that nothing has waited for
        self.arriving: set[int] = set()

    def run(self, operation: int) -> None:
        self._operation(operation)
        if self.ran[operation]:
            self._fail("{operation} runs twice: use recompute", operation)
        reads = self.graph.operations[operation].reads
        for storage, version in zip(reads, self.graph.read_versions[operation], strict=True):
            self._read(operation, storage, version)
        for storage, version in self.graph.makes[operation]:
            if self.device[storage] >= version:
                self._fail(
                    f"{{operation}} makes version {version} of {{storage}}, which has version {self.device[storage]}",
                    operation,
                    storage,
                )
            self._write(operation, storage, version)
        self.ran[operation] = True

    def recompute(self, operation: int) -> None:
        self._operation(operation)
        if not self.ran[operation]:
            self._fail("{operation} is recomputed before it has run", operation)
        if not self.graph.operations[operation].repeatable:
            self._fail("{operation} is recomputed, but it is not repeatable", operation)
        for storage, version in self.graph.recompute_reads[operation]:
            self._read(operation, storage, version)
        for storage, version in self.graph.makes[operation]:
            if self.device[storage] < version:
                self._write(operation, storage, version)

    def offload(self, storage: int) -> None:
        self._present(storage, "offloaded")
        if storage in self.leaving:
            self._fail("{storage} is offloaded while an offload of it may still run: wait first", storage=storage)
        self.host[storage] = self.device[storage]
        self.leaving.add(storage)

    def prefetch(self, storage: int) -> None:
        self._storage(storage)
        if self.device[storage] != _ABSENT:
            self._fail("{storage} is prefetched, but it is on the device", storage=storage)
        if self.host[storage] == _ABSENT:
            self._fail("{storage} is prefetched, but it was never offloaded", storage=storage)
        self.device[storage] = self.host[storage]
        self.arriving.add(storage)

    def free(self, storage: int) -> None:
        self._present(storage, "freed")
        if self.graph.exists_after[storage]:
            role = self.graph.storages[storage].role.value
            self._fail(f"{{storage}} is freed, but it has the role {role!r}", storage=storage)
        self.device[storage] = _ABSENT
        self.leaving.discard(storage)  # its copy may still run, but nothing can change the bytes that it reads

    def wait(self, storage: int) -> None:
        self._storage(storage)
        self.leaving.discard(storage)
        self.arriving.discard(storage)

    def synchronize(self, _: int) -> None:
        self.leaving.clear()
        self.arriving.clear()

    def end(self) -> None:
        for operation, ran in enumerate(self.ran):
            if not ran:
                self._fail("{operation} never runs", operation)
        for storage, stays in enumerate(self.graph.exists_after):
            last = len(self.graph.writers[storage])
            exists = last > 0 or self.graph.exists_before[storage]
            if stays and exists and self.device[storage] != last:
                self._fail(
                    f"{{storage}} ends with version {self.device[storage]}, its last one is {last}", storage=storage
                )

    def _read(self, operation: int, storage: int, version: int) -> None:
        current = self.device[storage]
        if current == _ABSENT:
            self._fail("{operation} reads {storage}, which is absent", operation, storage)
        if storage in self.arriving:
            self._fail("{operation} reads {storage}, whose prefetch may still run: wait first", operation, storage)
        if current != version:
            self._fail(
                f"{{operation}} reads version {version} of {{storage}}, which has version {current}",
                operation,
                storage,
            )

    def _write(self, operation: int, storage: int, version: int) -> None:
        for copies, noun in ((self.leaving, "offload"), (self.arriving, "prefetch")):
            if storage in copies:
                self._fail(
                    f"{{operation}} writes {{storage}}, whose {noun} may still run: wait first", operation, storage
                )
        self.device[storage] = version

    def _operation(self, operation: int) -> None:
        if not 0 <= operation < len(self.ran):
            self._fail(f"operation {operation} is not among the {len(self.ran)} of the step")

    def _storage(self, storage: int) -> None:
        if not 0 <= storage < len(self.device):
            self._fail(f"storage {storage} is not among the {len(self.device)} of the step")

    def _present(self, storage: int, verb: str) -> None:
        self._storage(storage)
        if self.device[storage] == _ABSENT:
            self._fail(f"{{storage}} is {verb}, but it is not on the device", storage=storage)
        if storage in self.arriving:
            self._fail(f"{{storage}} is {verb} while a prefetch of it may still run: wait first", storage=storage)

    def _fail(self, text: str, operation: int | None = None, storage: int | None = None) -> NoReturn:
        """Raise with a text in which {operation} and {storage} stand for what is broken."""
        named = {
            "operation": "" if operation is None else self.graph.operation_name(operation),
            "storage": "" if storage is None else self.graph.storage_name(storage),
        }
        raise MemoryPlanError(
            f"action {self.at}: {text.format(**named)}", action=self.at, operation=operation, storage=storage
        )
