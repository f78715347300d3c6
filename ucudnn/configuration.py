"""Micro-configurations and configurations: solvers choose among them, and plans are made of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import fsum, isfinite

from ucudnn.errors import MeasurementError
from ucudnn.slabs import Slab


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabConfiguration:
    """A slab of a micro-batch, computed by one algorithm in one call.

    Attributes:
        slab: the rows that it computes.
        algorithm: name of the algorithm.
        time_ms: measured time of the call in milliseconds.
        workspace_bytes: workspace of the call in bytes.
    """

    slab: Slab
    algorithm: str
    time_ms: float
    workspace_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroConfiguration:
    """A micro-batch of a kernel, computed by one algorithm in one call (paper, section 3.1), or slab by slab.

    Attributes:
        size: the micro-batch size.
        algorithm: name of the algorithm, unique within its backend; for slabs, a text that describes them.
        time_ms: measured time of the call in milliseconds, above zero; for slabs, the sum of their times.
        workspace_bytes: workspace of the call in bytes; for slabs, the largest of their workspaces.
        slabs: the calls that compute the micro-batch slab by slab, in order; () for one call.

    Raises:
        MeasurementError: if the time is not positive and finite, the size is below 1, or the workspace is negative.
    """

    size: int
    algorithm: str
    time_ms: float
    workspace_bytes: int
    slabs: tuple[SlabConfiguration, ...] = ()

    def __post_init__(self) -> None:
        if not (isfinite(self.time_ms) and self.time_ms > 0):
            raise MeasurementError(f"{self.algorithm} at size {self.size}: {self.time_ms} ms is no time")
        if self.size < 1:
            raise MeasurementError(f"{self.algorithm}: size {self.size} is below 1")
        if self.workspace_bytes < 0:
            raise MeasurementError(f"{self.algorithm} at size {self.size}: workspace of {self.workspace_bytes} bytes")

    @classmethod
    def of_slabs(cls, size: int, slabs: Sequence[SlabConfiguration]) -> "MicroConfiguration":
        """Return a micro-batch that is computed slab by slab, named '[2x32 rows FFT + 1x30 rows GEMM]'."""
        groups = groupby(slabs, key=lambda each: (each.slab.rows, each.algorithm))
        text = " + ".join(f"{len(list(group))}x{rows} rows {algorithm}" for (rows, algorithm), group in groups)
        return cls(
            size=size,
            algorithm=f"[{text}]",
            time_ms=fsum(each.time_ms for each in slabs),
            workspace_bytes=max(each.workspace_bytes for each in slabs),
            slabs=tuple(slabs),
        )

    def on(self, slab: Slab) -> SlabConfiguration:
        """Return this call as the one that computes a slab."""
        return SlabConfiguration(
            slab=slab, algorithm=self.algorithm, time_ms=self.time_ms, workspace_bytes=self.workspace_bytes
        )

    @property
    def algorithms(self) -> set[str]:
        """The names of its algorithms."""
        return {each.algorithm for each in self.slabs} or {self.algorithm}


@dataclass(frozen=True, slots=True, kw_only=True)
class Float32Sum:
    """The sum of a filter gradient of 16 bits in float32, to which all parts are added, and which is rounded once.

    Attributes:
        size_bytes: bytes of the sum. It lies in the workspace, before the workspace of the parts.
        time_ms: predicted milliseconds in which it is rounded; above zero.

    Raises:
        MeasurementError: if the time is not positive and finite, or the size is below 1.
    """

    size_bytes: int
    time_ms: float

    def __post_init__(self) -> None:
        if self.size_bytes < 1 or not (isfinite(self.time_ms) and self.time_ms > 0):
            raise MeasurementError(f"no float32 sum has {self.size_bytes} bytes and takes {self.time_ms} ms")


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Micro-configurations whose sizes add up to a whole mini-batch (paper, section 3.1).

    Attributes:
        parts: the micro-configurations in the order of their execution, largest first.
        float32_sum: for a filter gradient of 16 bits, the float32 sum of its parts; None if each part is added to the
            output itself, which rounds each time.
    """

    parts: tuple[MicroConfiguration, ...]
    float32_sum: Float32Sum | None = None

    @cached_property
    def size(self) -> int:
        """The mini-batch size: the sum of the parts' sizes."""
        return sum(part.size for part in self.parts)

    @cached_property
    def time_ms(self) -> float:
        """Milliseconds of all parts one after another, and of rounding their sum."""
        rounding_ms = 0.0 if self.float32_sum is None else self.float32_sum.time_ms
        return fsum((*(part.time_ms for part in self.parts), rounding_ms))

    @cached_property
    def workspace_bytes(self) -> int:
        """Workspace in bytes: the maximum over the parts, which use it one after another, and their sum's bytes."""
        return max((part.workspace_bytes for part in self.parts), default=0) + self.sum_bytes

    @property
    def sum_bytes(self) -> int:
        """Bytes of the float32 sum; 0 if there is none."""
        return 0 if self.float32_sum is None else self.float32_sum.size_bytes

    @cached_property
    def calls(self) -> int:
        """The number of calls, each of which computes a micro-batch or a slab of one."""
        return sum(len(part.slabs) or 1 for part in self.parts)

    @property
    def adds(self) -> bool:
        """Whether BackwardFilter adds the output of one call to that of another, which needs a beta of 1."""
        return self.calls > 1

    def __str__(self) -> str:
        """Return for example '4x64 FFT_TILING', '3x64 GEMM + 1x8 FFT', or '4x1 [2x32 rows FFT]' for slabs."""
        groups = groupby(self.parts, key=lambda part: (part.size, part.algorithm))
        text = " + ".join(f"{len(list(group))}x{size} {algorithm}" for (size, algorithm), group in groups)
        return text if self.float32_sum is None else f"{text}, summed in float32"


def configuration_of(parts: list[MicroConfiguration]) -> Configuration:
    """Return the configuration of these parts in a fixed order: the largest first, then by algorithm."""
    return Configuration(parts=tuple(sorted(parts, key=lambda part: (-part.size, part.algorithm))))
