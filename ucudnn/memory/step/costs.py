"""Costs: what a device takes for the operations of one step, and for moving bytes to the host and back."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf
from typing import NamedTuple

from ucudnn.configuration import Configuration
from ucudnn.errors import InvalidValueError
from ucudnn.memory.step.graph import StepGraph

_SIZES = "_rounded_sizes"  # of a step, beside its fields


class ScratchPieces(NamedTuple):
    """What an operation allocates that is there at the same time, in the order of allocation.

    Attributes:
        order: bytes of a piece of scratch, such as a contiguous copy of an operand or a workspace, or `returned(n)`.
        later: bytes of what the operation returns, but allocates only when less of its scratch is left, such as a
            bias's gradient. The scratch is smaller by them than its pieces are, because it is what an operation takes
            beyond all that it returns.
    """

    order: tuple[int, ...]
    later: tuple[int, ...] = ()

    @property
    def scratch(self) -> tuple[int, ...]:
        """Bytes of the pieces of scratch."""
        return tuple(each for each in self.order if each >= 0)


def returned(number: int) -> int:
    """Return what stands in an order of pieces for one of the storages that an operation allocates and returns."""
    return -1 - number


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times and sizes of a device for one step graph at its mini-batch; entry i belongs to operation i.

    Attributes:
        time_ms: milliseconds of each operation without copies beside it; 0 for one that only makes views.
        scratch_bytes: bytes that each operation allocates for itself and frees before it ends, a convolution's
            workspace among them.
        offload_bytes_per_ms: bandwidth to the host (D2H).
        prefetch_bytes_per_ms: bandwidth from the host (H2D).
        contention: how many times as long an operation takes while a copy runs beside it; 1 or more.
        duplex: share of its bandwidth that each direction keeps while both copy; above 0, at most 1.
        granularity: bytes of which the device's allocator hands out multiples (512 in PyTorch on CUDA).
        issue_ms: milliseconds that the host needs to issue each operation to the device; empty where that is not known.
        configurations: what the convolutions can choose from, by the index of their operation: desirable sets in the
            order of workspace, so the first one is the papers' (m) and the last one (p). Empty where nothing is known;
            then `time_ms` and `scratch_bytes` stand.
        scratch_pieces: the pieces of scratch of some operations, which say where PyTorch's allocator puts what they
            return. An operation that is not among them allocates its scratch in one piece after what it returns.
        modelled: whether times are those of a device profile, and were not measured.

    Raises:
        InvalidValueError: if a value makes no sense; the message names it.
    """

    device: str
    time_ms: tuple[float, ...]
    scratch_bytes: tuple[int, ...]
    offload_bytes_per_ms: float
    prefetch_bytes_per_ms: float
    memory_bytes: int
    contention: float = 1.0
    duplex: float = 1.0
    granularity: int = 1
    issue_ms: tuple[float, ...] = ()
    configurations: Mapping[int, tuple[Configuration, ...]] = field(default_factory=dict, compare=False)
    scratch_pieces: Mapping[int, ScratchPieces] = field(default_factory=dict, compare=False)
    modelled: bool = False

    def __post_init__(self) -> None:
        for name, least in (("contention", 1), ("granularity", 1)):
            if not getattr(self, name) >= least:
                raise InvalidValueError(f"costs of {self.device}: {name} {getattr(self, name)} is below {least}")
        if not 0 < self.duplex <= 1:
            raise InvalidValueError(f"costs of {self.device}: duplex {self.duplex} is not above 0 and at most 1")
        for name in ("offload_bytes_per_ms", "prefetch_bytes_per_ms"):
            if not getattr(self, name) > 0:
                raise InvalidValueError(f"costs of {self.device}: {name} {getattr(self, name)} is not above 0")
        for name in ("time_ms", "scratch_bytes", "issue_ms"):
            wrong = [each for each in getattr(self, name) if not 0 <= each < inf]
            if wrong:
                raise InvalidValueError(
                    f"costs of {self.device}: {name} {wrong[0]} of an operation is below 0 or infinite"
                )

    def check(self, operations: int) -> None:
        """Check that the costs belong to a step with this many operations.

        Raises:
            InvalidValueError: if they do not.
        """
        for name in ("time_ms", "scratch_bytes", *(("issue_ms",) if self.issue_ms else ())):
            if len(getattr(self, name)) != operations:
                raise InvalidValueError(
                    f"costs of {self.device} have {name} of {len(getattr(self, name))} operations, and the step has"
                    f" {operations}: they were made for another step"
                )

    def with_configurations(self, chosen: Mapping[int, Configuration]) -> "Costs":
        """Return the costs of the same step where operations take the time and the workspace of configurations."""
        if not chosen:
            return self
        times, scratch = list(self.time_ms), list(self.scratch_bytes)
        for operation, configuration in chosen.items():
            times[operation] = configuration.time_ms
            scratch[operation] = configuration.workspace_bytes
        return replace(self, time_ms=tuple(times), scratch_bytes=tuple(scratch))

    @property
    def where(self) -> str:
        """Where the step takes these times, in words that tell a prediction from a measurement."""
        return f"predicted for {self.device}, not measured" if self.modelled else f"on {self.device}"

    @property
    def fastest(self) -> dict[int, Configuration]:
        """The fastest configuration of each convolution: the papers' (p)."""
        return {operation: front[-1] for operation, front in self.configurations.items()}

    @property
    def smallest(self) -> dict[int, Configuration]:
        """The configuration with least workspace of each convolution: the papers' (m)."""
        return {operation: front[0] for operation, front in self.configurations.items()}

    def rounded(self, size: int) -> int:
        """Return the bytes that the device's allocator takes for a storage of a size in bytes."""
        return -(-size // self.granularity) * self.granularity

    @cached_property
    def rounded_scratch(self) -> tuple[int, ...]:
        """The bytes that the device's allocator takes for each operation's scratch."""
        return tuple(map(self.rounded, self.scratch_bytes))

    def sizes_of(self, graph: StepGraph) -> tuple[int, ...]:
        """Return the bytes that the device's allocator takes for each storage of a step, which keeps them."""
        known: dict[int, tuple[int, ...]] = vars(graph).setdefault(_SIZES, {})
        if self.granularity not in known:
            known[self.granularity] = tuple(map(self.rounded, graph.sizes))
        return known[self.granularity]

    def pieces(self, operation: int, scratch_bytes: int) -> ScratchPieces:
        """Return the pieces of an operation's scratch as the device's allocator takes them.

        Args:
            operation: the operation.
            scratch_bytes: its scratch. Where that is not what its known pieces are together, less those that are
                returned later, such as the workspace of a configuration that was chosen, it is one piece.
        """
        known = self.scratch_pieces.get(operation, ScratchPieces(()))
        size = self.rounded(scratch_bytes)
        order = tuple(self.rounded(each) if each >= 0 else each for each in known.order)
        found = ScratchPieces(order, tuple(map(self.rounded, known.later)))
        if sum(found.scratch) == size + sum(found.later):
            return found
        return ScratchPieces((*(each for each in order if each < 0), size))

    def scaled(self, share: float) -> "Costs":
        """Return the costs of the same step at another mini-batch, of which times and scratch are taken in proportion.

        What convolutions can choose from, and the pieces of scratch, are known only at this mini-batch, and left out.
        """
        return replace(
            self,
            time_ms=tuple(time * share for time in self.time_ms),
            scratch_bytes=tuple(ceil(size * share) for size in self.scratch_bytes),
            configurations={},
            scratch_pieces={},
        )
