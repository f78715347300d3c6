"""The protocol of backends: list algorithms, measure them, and, where there is hardware, run them.

A backend knows nothing of limits, policies or plans. `Backend` is what planning needs; a recorded profile
can be one. `ComputeBackend` adds what execution needs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import inf
from threading import RLock
from typing import Any, NamedTuple, final

from ucudnn.backends.prefetch import Ahead
from ucudnn.errors import BackendError, UnsupportedProblemError
from ucudnn.problem import MOST_ALIGNMENT, ConvolutionProblem
from ucudnn.profiles.measurement import Algorithm, Effort, Measurement
from ucudnn.slabs import Rows, Slab

Tensor = Any
"""Whatever a backend computes on: NumPy arrays for the CPU, device arrays or addresses for cuDNN."""

Buffer = Any
"""A workspace, as the backend's `allocate` made it."""

SLACK_BYTES = 255
"""What may be lost of memory that is lent, for workspaces begin on multiples of 256 bytes at most."""


@final
class Spare(NamedTuple):
    """Memory of a caller's that a call may overwrite, and use as its workspace.

    Attributes:
        buffer: the memory, as `ComputeBackend.spare` gives it.
        size_bytes: how much there is.
    """

    buffer: Buffer
    size_bytes: int


Following = Callable[[], tuple[int, Algorithm] | None]
"""Gives the micro-batch size and the algorithm that are likely to be measured next, if any; asked once."""


class Bench(ABC):
    """Operands of one mini-batch, made once, on which micro-batches of any size are measured."""

    @abstractmethod
    def measure(
        self, size: int, algorithm: Algorithm, effort: Effort, worth_ms: float = inf, slabs: Sequence[Slab] = ()
    ) -> Measurement:
        """Measure one algorithm at one micro-batch size, stepping through the mini-batch, and through its slabs.

        BackwardFilter is measured as it accumulates (beta = 1), the others with beta = 0. An algorithm
        that cannot run gives a FAILED measurement, no exception.

        Args:
            size: micro-batch size.
            algorithm: what to measure.
            effort: how much time to spend.
            worth_ms: time from which on it does not matter how slow it is: one sample beyond it will do.
            slabs: parts of a micro-batch that are the same problem, one of which is measured; () for all of it.
        """

    def announce(self, size: int, algorithm: Algorithm) -> None:  # noqa: B027, for most need no time for it
        """Say that an algorithm may be measured soon, which needs a compiler: it may begin."""

    def look_ahead(self, following: Following) -> None:  # noqa: B027, for most have no time for it
        """Say whom to ask, while the device is busy with the next measurement, what comes after it."""


class Backend(ABC):
    """What planning needs: which algorithms there are, and how long they take.

    Attributes:
        lock: held while a handle plans or launches. Handles that share a backend share its queue too, so they wait for
            each other.
    """

    def __init__(self) -> None:
        self.lock = RLock()

    @property
    @abstractmethod
    def name(self) -> str:
        """The name under which it was opened: 'cpu', 'replay:h200'."""

    @abstractmethod
    def conditions(self) -> Mapping[str, str]:
        """Return under which conditions it measures, for reports: device and versions."""

    def machine(self) -> Mapping[str, str]:
        """Return those conditions that a time or an algorithm's name depends on: the key of what is stored."""
        return self.conditions()

    @abstractmethod
    def algorithms(self, problem: ConvolutionProblem) -> tuple[Algorithm, ...]:
        """Return the algorithms that can compute the problem as its math mode and determinism allow.

        Raises:
            UnsupportedProblemError: if the backend cannot compute the problem at all.
        """

    def algorithm(self, problem: ConvolutionProblem, name: str) -> Algorithm | None:
        """Return one algorithm of a problem with its workspace, or None where it does not compute the problem."""
        try:
            return next((each for each in self.algorithms(problem) if each.name == name), None)
        except UnsupportedProblemError:
            return None

    def slab_names(self, name: str) -> tuple[str, ...]:
        """Return the names under which an algorithm may compute slabs: its own, and others where there are several."""
        return (name,)

    def names(self, problem: ConvolutionProblem, sizes: Sequence[int]) -> tuple[str, ...]:
        """Return the names of algorithms that may compute micro-batches of a problem, most promising first.

        Args:
            problem: the mini-batch.
            sizes: micro-batch sizes, in any order.

        Raises:
            UnsupportedProblemError: if none of the sizes can be computed.
        """
        found: dict[str, None] = {}
        error: UnsupportedProblemError | None = None
        for size in sorted(sizes, reverse=True):
            try:
                found.update((each.name, None) for each in self.algorithms(problem.part(size)))
            except UnsupportedProblemError as reason:
                error = error or reason
        if error is not None and not found:
            raise error
        return tuple(found)

    def sizes(self, problem: ConvolutionProblem) -> frozenset[int] | None:
        """Return the micro-batch sizes that can be measured, or None where any can."""
        return None

    def knows_slab(self, slab: ConvolutionProblem, part: ConvolutionProblem) -> bool:
        """Whether a slab of a micro-batch can be measured; of a recorded profile, whether it was, with that."""
        return True

    def warm_up(self) -> None:  # noqa: B027, for most have nothing to load
        """Load now what the first measurement of each operation would wait for."""

    def prefetch(self, problems: Sequence[Ahead]) -> None:  # noqa: B027, for most begin nothing
        """Begin, in the background, with what measuring problems will ask for."""

    def drop(self) -> None:  # noqa: B027, for most begin nothing
        """Drop what was begun in the background but does not run yet."""

    def is_ready(self, problem: ConvolutionProblem) -> bool:
        """Whether nothing that was begun in the background has to be waited for."""
        del problem
        return True

    @abstractmethod
    def bench(self, problem: ConvolutionProblem) -> AbstractContextManager[Bench]:
        """Return a context in which micro-batches of the problem can be measured.

        Raises:
            UnsupportedProblemError: if the backend cannot compute the problem at all.
        """


class PreparedCall(ABC):
    """One algorithm made ready for one (micro-batch) problem; may be launched any number of times."""

    def bind(
        self,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        *,
        start: int,
        alpha: float,
        beta: float,
        workspace: Buffer,
        first_rows: Rows | None = None,
    ) -> Callable[[], None]:
        """Return a launch with these arguments, with all made ready that the first one would have to make."""
        arguments = {"start": start, "alpha": alpha, "beta": beta, "workspace": workspace, "first_rows": first_rows}
        return partial(self.launch, x, w, y, **arguments)

    @abstractmethod
    def launch(
        self,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        *,
        start: int,
        alpha: float,
        beta: float,
        workspace: Buffer,
        first_rows: Rows | None = None,
    ) -> None:
        """Compute samples [start, start + batch) of the mini-batch tensors: out = alpha * conv + beta * out.

        Args:
            x: input or its gradient, the whole mini-batch in the problem's layout.
            w: filters or their gradient.
            y: output or its gradient, the whole mini-batch.
            start: first sample of the micro-batch.
            alpha: factor of the convolution.
            beta: factor of what the output holds; at 0 the output is not read.
            workspace: at least the algorithm's workspace, from the backend's `allocate` or `slice`.
            first_rows: where a slab begins: the first row of x and of y that it reads or writes; None for all rows.
        """


class ComputeBackend(Backend):
    """What execution needs besides: prepared calls and workspaces."""

    def devices(self) -> Sequence[int]:
        """Return the numbers of the devices that there are."""
        return (0,)

    def device(self) -> int:
        """Return the number of the device that it computes on."""
        return 0

    @property
    def recycles(self) -> bool:
        """Whether `allocate` is so cheap that each call may allocate its workspace, and none is held between calls.

        What is freed may then be used again by whatever is queued on the same queue later.
        """
        return False

    @abstractmethod
    def prepare(self, problem: ConvolutionProblem, algorithm: str) -> PreparedCall:
        """Make an algorithm ready for a problem, so that launching costs as little as can be.

        Raises:
            UnsupportedProblemError: if the algorithm cannot compute the problem.
        """

    @abstractmethod
    def allocate(self, size_bytes: int) -> Buffer:
        """Return a workspace of at least so many bytes.

        Raises:
            MemoryError: if there is not that much left.
        """

    @abstractmethod
    def operands(self, problem: ConvolutionProblem) -> tuple[Tensor, Tensor, Tensor]:
        """Return tensors x, w and y for a problem, filled with random numbers in [-0.5, 0.5)."""

    @abstractmethod
    def elapsed_ms(self, run: Callable[[], None], lead: Callable[[], None] | None = None) -> float:
        """Return the milliseconds that a call takes until all it launched is done, on the backend's own clock.

        Args:
            run: the call.
            lead: keeps a GPU busy while the call begins, so that its first launch is not waited for; is not timed.
        """

    def bind(self, x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return the tensors as prepared calls take them, and the alignment in bytes that their addresses share.

        Backends that do not care for alignment return the tensors as they are, and 16.

        Raises:
            InvalidProblemError: if a tensor is not where the backend computes.
        """
        return x, w, y, MOST_ALIGNMENT

    def address(self, bound: Tensor) -> int:
        """Return where a tensor that `bind` returned lies in memory."""
        return bound if isinstance(bound, int) else int(bound.__array_interface__["data"][0])

    def queue(self) -> int:
        """Return the identity of the queue that calls go to now; calls of one queue run one after another."""
        return 0

    def capturing(self, queue: int) -> bool:
        """Whether calls on a queue are recorded, to be run later any number of times (CUDA graphs)."""
        return False

    def mark(self) -> Any:
        """Return a mark of all that the current queue holds so far; None where calls have ended when they return."""
        return None

    def wait(self, mark: Any) -> None:
        """Let what is launched on the current queue from now on wait for a mark; the caller does not wait."""

    def finish(self, mark: Any) -> None:
        """Wait, in the calling thread, until what a mark marks is done."""

    def spare(self, bound: Tensor, size_bytes: int) -> Spare | None:
        """Return the memory of a dense tensor as a workspace.

        Args:
            bound: the tensor, or what `bind` returns of it.
            size_bytes: of the tensor.

        Returns:
            The memory, as much for each tensor of a size; None where the backend has no use for it.
        """
        return None

    def behind(self, bound: Tensor, *, start: int, step_bytes: int, samples: int) -> Buffer:
        """Return the memory of a dense tensor's samples from one on as a workspace.

        Args:
            bound: the tensor, as `bind` returns it.
            start: the first of those samples.
            step_bytes: of one sample.
            samples: how many the tensor has.

        Raises:
            BackendError: if the backend has no use for it.
        """
        raise BackendError(f"{self.name} lends no memory of tensors")

    def unheld(self, buffer: Buffer) -> Buffer:
        """Return a workspace that does not keep its memory, for what runs only while something else does.

        Raises:
            BackendError: if the backend has no addresses.
        """
        raise BackendError(f"{self.name} has no workspace but such that keep their memory")

    @abstractmethod
    def segment(self, buffer: Buffer, offset_bytes: int, size_bytes: int) -> Buffer:
        """Return a part of a workspace; nothing is copied."""
