"""The protocol of backends: they list algorithms, measure them and, where there is hardware, run them.

A backend knows nothing of limits, policies or plans. `ComputeBackend` adds what execution needs to a `Backend`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import inf
from typing import Any, NamedTuple, final

from ucudnn.arrays import BiasedFilters
from ucudnn.backends.bench import Bench, PrefetchRequest
from ucudnn.backends.fork_locks import LockLevel, new_lock
from ucudnn.configuration import Float32Sum
from ucudnn.errors import BackendError, ReentryError, UnsupportedProblemError
from ucudnn.problem import MOST_ALIGNMENT, ConvolutionProblem
from ucudnn.profiles.measurement import Algorithm
from ucudnn.slabs import Rows

Tensor = Any
"""What a backend computes on: NumPy arrays for the CPU, device arrays or addresses for cuDNN."""

Buffer = Any
"""A workspace, as the backend's `allocate` returns it."""

SLACK_BYTES = 255
"""The most bytes of lent memory that are lost, because workspaces begin on multiples of up to 256 bytes."""


@final
class Spare(NamedTuple):
    """Memory of the caller that a call may overwrite and use as its workspace."""

    buffer: Buffer
    size_bytes: int


@final
class Offset(NamedTuple):
    """Where the part that a call computes begins in the tensors of the mini-batch.

    Attributes:
        start: first sample.
        first_rows: for a slab, the first row of x and the first row of y; None for a call that computes all rows.
    """

    start: int = 0
    first_rows: Rows | None = None


@final
class Scaling(NamedTuple):
    """The factors of out = alpha * conv + beta * out.

    Attributes:
        alpha: factor of the convolution.
        beta: factor of the values that the output holds; at 0 the output is not read.
    """

    alpha: float = 1.0
    beta: float = 0.0


BEGIN = Offset()
"""The beginning of the mini-batch."""

OVERWRITE = Scaling(1.0, 0.0)
"""The output is overwritten."""

ACCUMULATE = Scaling(1.0, 1.0)
"""The result is added to the output."""


class Backend(ABC):
    """What planning needs: the algorithms of a problem, and their times.

    Attributes:
        lock: held while a handle plans or launches. Handles that share a backend share its queue too, so they wait for
            each other.
        in_this_thread: whether the calling thread holds the lock.
    """

    def __init__(self) -> None:
        self.lock = new_lock(LockLevel.BACKEND)
        self.in_this_thread: Callable[[], bool] = self.lock._is_owned

    def refuse_reentry(self) -> None:
        """Raise an error if the calling thread holds the lock, as a signal handler may find it.

        A convolution that begins inside another one of the same thread would overwrite its workspace.

        Raises:
            ReentryError: if the thread is planning or launching already.
        """
        if self.in_this_thread():
            raise ReentryError(
                "a convolution was called inside another one of the same thread and backend, as signal handlers can do:"
                " let the handler set a flag, and convolve after it"
            )

    @property
    @abstractmethod
    def name(self) -> str:
        """The name under which the backend was opened, such as 'cpu' or 'replay:h200'."""

    @abstractmethod
    def conditions(self) -> Mapping[str, str]:
        """Return the conditions of measurements, for reports: device and versions."""

    def machine(self) -> Mapping[str, str]:
        """Return the conditions that times and names of algorithms depend on; stored measurements have them as key."""
        return self.conditions()

    @abstractmethod
    def algorithms(self, problem: ConvolutionProblem) -> tuple[Algorithm, ...]:
        """Return the algorithms that can compute the problem within its math mode and determinism.

        Raises:
            UnsupportedProblemError: if the backend cannot compute the problem at all.
        """

    def algorithm(self, problem: ConvolutionProblem, name: str) -> Algorithm | None:
        """Return an algorithm of a problem by its name, or None if it does not compute the problem."""
        try:
            return next((each for each in self.algorithms(problem) if each.name == name), None)
        except UnsupportedProblemError:
            return None

    def slab_names(self, name: str) -> tuple[str, ...]:
        """Return the names under which an algorithm may compute slabs: its own name, and those of its variants."""
        return (name,)

    def names(self, problem: ConvolutionProblem, sizes: Sequence[int]) -> tuple[str, ...]:
        """Return the names of algorithms that may compute micro-batches of some sizes, most promising first.

        Raises:
            UnsupportedProblemError: if no size can be computed.
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

    def leading(self, problem: ConvolutionProblem, most: int) -> Sequence[Algorithm]:
        """Return the first algorithms in the order of `names`, at most some, or the quick ones; raises as that."""
        found = (self.algorithm(problem, name) for name in self.names(problem, (problem.batch,))[:most])
        return [each for each in found if each is not None]

    def sizes(self, problem: ConvolutionProblem) -> frozenset[int] | None:
        """Return the micro-batch sizes that can be measured, or None if every size can."""
        return None

    def knows_slab(self, slab: ConvolutionProblem, part: ConvolutionProblem) -> bool:
        """Return whether a slab of a micro-batch can be measured, or was recorded together with the micro-batch."""
        return True

    def float32_sum(self, problem: ConvolutionProblem) -> Float32Sum | None:
        """Return what the float32 sum of a filter gradient takes; None if the backend computes no such problems."""
        return None

    def warm_up(self) -> None:  # noqa: B027, because few backends have anything to load
        """Load now what the first measurement of each operation would have to load."""

    def prefetch(self, problems: Sequence[PrefetchRequest]) -> None:  # noqa: B027, because few work in the background
        """Begin in the background the work that measuring these problems needs."""

    def drop(self) -> None:  # noqa: B027, because few work in the background
        """Drop background work that has not begun to run."""

    def is_ready(self, problem: ConvolutionProblem) -> bool:
        """Return whether no background work for a problem is left to wait for."""
        return True

    def expected_seconds(self, problems: Collection[ConvolutionProblem]) -> float:
        """Return about how long benchmarks of problems take, where that may be long enough to be told; else 0."""
        return 0.0

    @abstractmethod
    def bench(self, problem: ConvolutionProblem) -> AbstractContextManager[Bench]:
        """Return a context in which micro-batches of the problem can be measured.

        Raises:
            UnsupportedProblemError: if the backend cannot compute the problem at all.
        """


class PreparedCall(ABC):
    """One algorithm that is ready for one (micro-batch) problem; it may be launched any number of times."""

    @abstractmethod
    def launch(
        self, x: Tensor, w: Tensor, y: Tensor, workspace: Buffer, offset: Offset = BEGIN, scaling: Scaling = OVERWRITE
    ) -> None:
        """Compute out = alpha * conv + beta * out for one part of the mini-batch.

        Args:
            x: input or its gradient, the whole mini-batch in the problem's layout.
            w: filters or their gradient.
            y: output or its gradient, the whole mini-batch.
            workspace: at least the algorithm's workspace, from the backend's `allocate` or `segment`.
            offset: where the part begins. It has as many samples, and rows, as the problem.
            scaling: alpha and beta.

        Raises:
            BackendError: if the algorithm fails.
        """

    def bind(
        self, x: Tensor, w: Tensor, y: Tensor, workspace: Buffer, offset: Offset = BEGIN, scaling: Scaling = OVERWRITE
    ) -> Callable[[], None]:
        """Return a launch with these arguments, after all the work that only a first launch has to do.

        Raises:
            BackendError: if that work fails.
        """
        return partial(self.launch, x, w, y, workspace, offset, scaling)

    def kernels(self, scaling: Scaling) -> object:
        """Return what must live as long as a CUDA graph that captured a launch with these factors; None for nothing."""
        return None


class PreparedSum(ABC):
    """The float32 sum of one filter gradient of 16 bits. It lies at the beginning of a workspace."""

    @abstractmethod
    def split(self, workspace: Buffer) -> tuple[Tensor, Buffer]:
        """Return the sum as the w that calls write, and the workspace that is left for the calls."""

    @abstractmethod
    def bind(self, total: Tensor, w: Tensor, scaling: Scaling = OVERWRITE) -> Callable[[], None]:
        """Return what computes w = alpha * total + beta * w in float32, rounds once, and may raise BackendError.

        Args:
            total: the sum, as `split` returns it.
            w: the filter gradient; not read at beta = 0.
            scaling: alpha and beta.
        """


class ComputeBackend(Backend):
    """What execution needs besides: prepared calls and workspaces.

    Attributes:
        recycles: whether calls allocate their workspaces and hold none, because later calls on the queue reuse the
            memory.
    """

    recycles = False

    def devices(self) -> Sequence[int]:
        """Return the numbers of all devices."""
        return (0,)

    def device(self) -> int:
        """Return the number of the backend's device."""
        return 0

    @property
    @abstractmethod
    def workspace_unit(self) -> int:
        """Bytes of which every workspace is a multiple, so that segments of one buffer all begin aligned."""

    @abstractmethod
    def prepare(self, problem: ConvolutionProblem, algorithm: str, *, adds: bool = True) -> PreparedCall:
        """Make an algorithm ready for a problem, so that a launch costs as little as possible.

        Args:
            problem: the problem at micro-batch size.
            algorithm: name of the algorithm.
            adds: whether a filter gradient may be added to what is there, as in micro-batches; if not, a first launch
                with beta = 1 may take long.

        Raises:
            UnsupportedProblemError: if the algorithm cannot compute the problem.
        """

    def prepare_sum(self, problem: ConvolutionProblem) -> PreparedSum:
        """Make the float32 sum of a filter gradient ready; an UnsupportedProblemError says that there is none."""
        raise UnsupportedProblemError(f"{self.name} keeps no float32 sum of {problem}")

    def lend_plans(self, borrower: "ComputeBackend") -> None:
        """Let another backend of the same device run what this one prepares from now on."""

    @abstractmethod
    def allocate(self, size_bytes: int) -> Buffer:
        """Return a workspace of at least this many bytes; a MemoryError says that too little memory is left."""

    def headroom_bytes(self) -> float:
        """Return how large a workspace may be now beside the live bytes; infinity if no limit of memory is stated."""
        return inf

    @abstractmethod
    def operands(self, problem: ConvolutionProblem) -> tuple[Tensor, Tensor, Tensor]:
        """Return tensors x, w and y of a problem, filled with random numbers in [-0.5, 0.5)."""

    @abstractmethod
    def elapsed_ms(self, run: Callable[[], None], lead: Callable[[], None] | None = None) -> float:
        """Return the milliseconds until everything that a function launches is done, on the backend's own clock.

        Args:
            run: launches what is timed.
            lead: launches work that is not timed and that keeps a GPU busy while `run` begins, so that the time does
                not include waiting for the host.
        """

    def bind(self, x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return the tensors in the form that prepared calls take, and the alignment that they share, in bytes.

        A backend that needs no alignment returns the tensors unchanged, and 16.

        Raises:
            InvalidProblemError: if a tensor is not in the backend's memory.
        """
        return x, w, y, MOST_ALIGNMENT

    def address(self, bound: Tensor) -> int:
        """Return the address of a tensor that `bind` returned; of filters with a bias, that of the filters."""
        bound = bound.w if isinstance(bound, BiasedFilters) else bound
        return bound if isinstance(bound, int) else int(bound.__array_interface__["data"][0])

    def queue(self) -> int:
        """Return the identity of the queue that calls go to now. Calls on one queue run one after another."""
        return 0

    def stream_number(self, queue: int) -> int:
        """Return a number of the current queue, which `queue` returned, that no later queue has after its end."""
        return queue

    def synchronize(self) -> None:
        """Block the calling thread until all work of all queues is done; never called in a capture."""

    def capturing(self, queue: int) -> bool:
        """Return whether calls on a queue are recorded to be run later any number of times (CUDA graphs)."""
        return False

    def mark(self) -> Any:
        """Return a mark after everything that the current queue holds; None if calls are done when they return."""
        return None

    def wait(self, mark: Any) -> None:
        """Let later launches on the current queue wait for a mark; the calling thread does not wait."""

    def finish(self, mark: Any) -> None:
        """Block the calling thread until everything before a mark is done."""

    def order_before_free(self, first: Any, marks: Sequence[Any]) -> bool:
        """Let the queue on which memory was allocated, that of the first mark, wait for the marks of its last uses.

        Return whether that was done; it cannot be done while the current queue is captured.
        """
        return True

    def spare(self, bound: Tensor, size_bytes: int) -> Spare | None:
        """Return the memory of a dense tensor of some bytes as a workspace; None if it is too small or not dense.

        The tensor comes as it is, or as `bind` returns it. Tensors of one size give workspaces of one size.
        """
        return None

    def tail_buffer(self, bound: Tensor, *, start: int, step_bytes: int, samples: int) -> Buffer:
        """Return the memory of a dense tensor's last samples as a workspace.

        Args:
            bound: the tensor, as `bind` returns it.
            start: the first of these samples.
            step_bytes: size of one sample.
            samples: number of samples of the tensor.

        Raises:
            BackendError: if the backend cannot lend a tensor's memory.
        """
        raise BackendError(f"{self.name} cannot lend memory of tensors")

    def without_owner(self, buffer: Buffer) -> Buffer:
        """Return the same workspace without ownership of its memory, for use only while its owner lives.

        Raises:
            BackendError: if the backend's workspaces always own their memory.
        """
        raise BackendError(f"{self.name} has only workspaces that own their memory")

    @abstractmethod
    def segment(self, buffer: Buffer, offset_bytes: int, size_bytes: int) -> Buffer:
        """Return a part of a workspace; nothing is copied.

        Raises:
            BackendError: if the part is not inside the workspace.
        """
