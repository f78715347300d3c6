"""The cuDNN backend lists, measures and runs cuDNN's algorithms on the current GPU."""

import platform
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final

from ucudnn.arrays import BiasedFilters
from ucudnn.backends.base import ACCUMULATE, OVERWRITE, SLACK_BYTES, ComputeBackend, Spare, Tensor
from ucudnn.backends.bench import Bench, PrefetchRequest, float32_sum_on_gpu
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.algorithms.compile_ahead import SMALL, AheadCompiler
from ucudnn.backends.cudnn.algorithms.gathered import dense_of, promised
from ucudnn.backends.cudnn.algorithms.heuristics import anchors
from ucudnn.backends.cudnn.algorithms.listing import AlgorithmList
from ucudnn.backends.cudnn.algorithms.operation_graph import WORKSPACE_UNIT, round_up
from ucudnn.backends.cudnn.algorithms.packed import PACKING
from ucudnn.backends.cudnn.algorithms.prepare import CudnnCall, Preparer
from ucudnn.backends.cudnn.algorithms.summed import GpuSum, sums_fit
from ucudnn.backends.cudnn.api.library import Library, OwnedHandle
from ucudnn.backends.cudnn.bench.bench import CudnnBench
from ucudnn.backends.cudnn.bench.output_check import Operands, random_operands
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer, Gpu
from ucudnn.backends.cudnn.gpu.cupy_gpu import CupyGpu, address_of, is_dense
from ucudnn.backends.fork_locks import call_in_child
from ucudnn.configuration import Float32Sum
from ucudnn.errors import BackendError
from ucudnn.problem import MOST_ALIGNMENT, ConvolutionProblem, MathMode, Operation
from ucudnn.profiles.measurement import Algorithm

_NO_STREAM = -(1 << 65)  # beyond all addresses and numbers of threads


@final
class CudnnBackend(ComputeBackend):
    """cuDNN on a GPU.

    Calls are queued on CuPy's current stream, or on the stream that `set_stream` names. Memory comes from CuPy's
    allocator. A `Gpu` of another library has its own streams and allocator. Tensors are CuPy arrays, device addresses
    as ints, or objects with `data_ptr` or `__cuda_array_interface__`.

    Args:
        candidates: the algorithms of cuDNN to offer. BEST, the default, and GRAPH fall back on legacy algorithms for a
            problem that no engine of the graph API computes.
        library_path: libcudnn to load; None searches for it.
        device: number of the GPU; None for CuPy's current one; or a GPU of another library, which must be the thread's
            current one.

    Attributes:
        cudnn_handle: address of the cudnnHandle_t, for functions of cuDNN outside this backend.
        library: cuDNN.
        other_stream: one number, which is 0 while `cudnn_handle` is set to the default stream.
        most_bytes: what live bytes and a workspace may come to; None if no limit of memory is stated.
        keeps_sums: whether parts of filter gradients of 16 bits may be added in float32, by kernels of our own.

    Raises:
        BackendUnavailableError: if CuPy, cuDNN or a GPU is missing.
        CudnnError: if cuDNN cannot be initialized.
    """

    def __init__(
        self,
        *,
        candidates: Candidates = Candidates.BEST,
        library_path: str | None = None,
        device: int | Gpu | None = None,
    ) -> None:
        super().__init__()
        self._candidates = candidates
        self._device: Gpu = device if isinstance(device, Gpu) else CupyGpu(device)
        self.recycles = self._device.recycles
        self.most_bytes = self._device.most_bytes
        self.library = Library(library_path)
        self._handle = OwnedHandle(self.library)
        self.cudnn_handle = self._handle.address
        self._set_stream = self.library.function("cudnnSetStream")
        self._stream = 0
        self.other_stream = array("q", [0])
        self._compiler = AheadCompiler(self.library, self._device)
        self._preparer = Preparer(self.library, self.cudnn_handle, self._device, self._compiler, self._handle)
        self._list = AlgorithmList(candidates, self._preparer)
        self.keeps_sums = True
        self._forked = False
        call_in_child(self._leave_to_parent)

    @property
    def name(self) -> str:
        return "cudnn" if self._candidates is Candidates.BEST else f"cudnn:{self._candidates.value}"

    def conditions(self) -> Mapping[str, str]:
        return {
            **self._device.conditions(),
            "cudnn": self.library.version_text,
            "python": platform.python_version(),
        }

    def machine(self) -> Mapping[str, str]:
        return {**self._device.machine(), "cudnn": self.library.version_text}

    def devices(self) -> Sequence[int]:
        return range(self._device.count())

    def device(self) -> int:
        return self._device.ordinal

    @property
    def workspace_unit(self) -> int:
        """256, because some engines need workspaces that are aligned so."""
        return WORKSPACE_UNIT

    def algorithms(self, problem: ConvolutionProblem) -> tuple[Algorithm, ...]:
        return self._list.of(self._as_asked(problem))

    def algorithm(self, problem: ConvolutionProblem, name: str) -> Algorithm | None:
        """Return an algorithm by its name, even if heuristics do not offer it; None if it does not apply."""
        problem = self._as_asked(problem)
        if problem in self._list.known:
            return super().algorithm(problem, name)
        return self._list.named(problem, name)

    def float32_sum(self, problem: ConvolutionProblem) -> Float32Sum | None:
        own = self.keeps_sums and sums_fit(problem) and self._device.sum_kernels is not None
        return float32_sum_on_gpu(problem) if own else None

    def prepare_sum(self, problem: ConvolutionProblem) -> GpuSum:
        return GpuSum(problem, float32_sum_on_gpu(problem).size_bytes, self._device)

    def slab_names(self, name: str) -> tuple[str, ...]:
        return name, name + PACKING.end

    def names(self, problem: ConvolutionProblem, sizes: Sequence[int]) -> tuple[str, ...]:
        """Return the names of algorithms that may compute micro-batches of a problem.

        Heuristics are asked only at some of the sizes, because they take longer than most measurements, and engines
        with knobs that they offer at one size compute the others too.
        """
        return super().names(problem, anchors(sizes) if self._candidates.offers("graph", problem) else sizes)

    def leading(self, problem: ConvolutionProblem, most: int) -> Sequence[Algorithm]:
        """Return what heuristic mode A offers, or else what all modes offer, which takes them 15 times as long."""
        return self._list.leading(self._as_asked(problem), most) or super().leading(problem, most)

    def warm_up(self) -> None:
        """Create the handles of background threads, and load cuDNN's heuristics (0.1 to 0.3 s an operation)."""
        if self._candidates.offers("graph", SMALL[0]):
            self._compiler.warm_up()

    def prefetch(self, problems: Sequence[PrefetchRequest]) -> None:
        # What sums need is listed for the problem itself, too.
        own = [each for each in problems if not each.problem.float32_sum]
        asked = [each for each in own if self._candidates.offers("graph", each.problem)]
        if not asked or self.capturing(self.queue()):
            return
        for problem, sizes, limit_bytes, promises in asked:
            parts = [self._as_asked(problem).part(size) for size in anchors(sizes)]
            if self._list.gathers(parts[0]):
                copies = [dense_of(part) for part in parts]
                self._compiler.begin(copies, limit_bytes, partial(promised, promises), self._list.known)
            self._compiler.begin(parts, limit_bytes, promises, self._list.known)

    def drop(self) -> None:
        self._compiler.drop()

    def is_ready(self, problem: ConvolutionProblem) -> bool:
        problem = self._as_asked(problem)
        forms = (problem, dense_of(problem)) if self._list.gathers(problem) else (problem,)
        return all(map(self._compiler.is_ready, forms))

    def stop(self) -> None:
        """End all background work; at the exit of Python this happens by itself."""
        self._compiler.stop()

    @contextmanager
    def bench(self, problem: ConvolutionProblem) -> Iterator[Bench]:
        if self.capturing(self.queue()):
            raise BackendError(
                f"nothing can be measured while a CUDA graph is captured: plan {problem} before, by one call or by"
                " get_algorithm and optimize"
            )
        problem = self._as_asked(problem)
        if not self._device.can_delay:  # else work of the host does not change the times
            self._compiler.settle()
        with self._device.scratch() as allocate:
            bench = CudnnBench(
                problem,
                self._device,
                allocate,
                self._preparer.prepare_for_bench,
                self.library,
                self.cudnn_handle,
                self._preparer.announce,
            )
            try:
                yield bench
            finally:
                bench.close()

    def prepare(self, problem: ConvolutionProblem, algorithm: str, *, adds: bool = True) -> CudnnCall:
        """Make an algorithm ready with alpha = 1 and beta = 0, and where it adds filter gradients with beta = 1 too.

        Each pair has a plan of its own. To build one takes 0.2 to 0.5 s where cuDNN compiles it.

        Raises:
            UnsupportedProblemError: if there is no such algorithm.
            CudnnError: if cuDNN cannot build an execution plan.
        """
        adds = adds and problem.operation is Operation.BACKWARD_FILTER
        scalings = (OVERWRITE, ACCUMULATE) if adds else (OVERWRITE,)
        return self._preparer.prepare(self._as_asked(problem), algorithm, scalings)

    def lend_plans(self, borrower: ComputeBackend) -> None:
        if isinstance(borrower, CudnnBackend):
            self._preparer.built = borrower._preparer.built

    def allocate(self, size_bytes: int) -> DeviceBuffer:
        return self._device.allocate(size_bytes)

    def headroom_bytes(self) -> float:
        return self._device.headroom_bytes()

    def spare(self, bound: Tensor, size_bytes: int) -> Spare | None:
        left = size_bytes - SLACK_BYTES  # whatever the address, so that tensors of one size lend the same
        if left <= 0 or not is_dense(bound):
            return None
        return Spare(DeviceBuffer(round_up(address_of(bound)), left), left)

    def tail_buffer(self, bound: int, *, start: int, step_bytes: int, samples: int) -> DeviceBuffer:
        return DeviceBuffer(round_up(bound + start * step_bytes), (samples - start) * step_bytes - SLACK_BYTES)

    def without_owner(self, buffer: DeviceBuffer) -> DeviceBuffer:
        return DeviceBuffer(buffer.address, buffer.size_bytes)

    def segment(self, buffer: DeviceBuffer, offset_bytes: int, size_bytes: int) -> DeviceBuffer:
        if not 0 <= offset_bytes <= offset_bytes + size_bytes <= buffer.size_bytes:
            raise BackendError(
                f"bytes {offset_bytes} to {offset_bytes + size_bytes} are not inside a workspace of {buffer.size_bytes}"
            )
        return buffer.part(offset_bytes, size_bytes)

    def operands(self, problem: ConvolutionProblem) -> Operands:
        return random_operands(problem, self._device, self._device.allocate)

    def bind(self, x: Any, w: Any, y: Any) -> tuple[int, int | BiasedFilters, int, int]:
        if isinstance(w, BiasedFilters):
            x, filters, y, alignment = self.bind(x, w.w, y)
            *_, bias, shared = self.bind(0, 0, w.bias)
            return x, BiasedFilters(filters, bias), y, min(alignment, shared)
        if not type(x) is type(w) is type(y) is int:
            try:
                x, w, y = x.data.ptr, w.data.ptr, y.data.ptr  # the fastest way for CuPy arrays
            except AttributeError:
                x, w, y = address_of(x), address_of(w), address_of(y)
        low = (x | w | y) & (MOST_ALIGNMENT - 1)
        return x, w, y, (low & -low) if low else MOST_ALIGNMENT

    def elapsed_ms(self, run: Callable[[], None], lead: Callable[[], None] | None = None) -> float:
        self.queue()
        return self._device.timed(run, lead).wait_ms()

    def delay(self, time_ms: float) -> None:
        """Keep the current stream busy for some milliseconds, as `Gpu.delay` does."""
        self._device.delay(time_ms)

    def queue(self) -> int:
        """Point cuDNN to the current stream, and return a number that identifies the stream.

        Raises:
            BackendError: if this thread's current GPU is not the backend's.
        """
        queue = self._device.queue()
        if queue != self._stream:
            if self._forked:
                raise BackendError(
                    "CUDA does not survive a fork: start processes that use the GPU by `spawn`, not by `fork`"
                )
            self.library.check(self._set_stream(self.cudnn_handle, self._device.stream()), "cudnnSetStream")
            self._stream = queue
            self.other_stream[0] = queue != 0
        return queue

    def capturing(self, queue: int) -> bool:
        return self._device.capturing(queue)

    def mark(self) -> Any:
        """Return an event after everything on the current stream; None in a capture, whose caller keeps the order."""
        return None if self.capturing(self._device.queue()) else self._device.mark()

    def wait(self, mark: Any) -> None:
        if mark is not None and not self.capturing(self._device.queue()):
            self._device.wait(mark)

    def stream_number(self, queue: int) -> int:
        return self._device.stream_number(queue)

    def synchronize(self) -> None:
        self._device.synchronize()

    def order_before_free(self, first: Any, marks: Sequence[Any]) -> bool:
        with self._device.use():
            if self.capturing(self._device.queue()):
                return False
            for mark in marks:
                if first is None:  # it was allocated in a capture
                    self.finish(mark)
                else:
                    first[1].wait_event(mark[0])
        return True

    def finish(self, mark: Any) -> None:
        if mark is not None:
            mark[0].synchronize()

    def set_stream(self, stream: int | None) -> None:
        """Queue all calls on one stream from now on, whatever CuPy's current stream is; None ends that."""
        self._device.pin(stream)
        self.queue()

    def _leave_to_parent(self) -> None:
        """Refuse each later call in a forked child; no queue equals the one that is noted, so each call looks here."""
        self._forked = True
        self._stream = _NO_STREAM
        self.other_stream[0] = 1

    def _as_asked(self, problem: ConvolutionProblem) -> ConvolutionProblem:
        return replace(problem, math=MathMode.FMA) if self._candidates is Candidates.LEGACY_FMA else problem
