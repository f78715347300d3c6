"""Checks an algorithm's output: it must be complete, depend on the inputs alone, and be exact enough.

cuDNN 9.19 offers engines that multiply the old values of the output by beta = 0, or those of the workspace by other
zeros, so that NaN in fresh memory comes through. It also offers Winograd algorithms for 5 x 5 filters whose float32
results have an error of 5e-3. Its notes tell neither.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice, product
from math import ceil, prod
from typing import Any, final

import numpy as np

from ucudnn.arrays import BiasedFilters
from ucudnn.backends.base import BEGIN, Offset, PreparedCall, Scaling
from ucudnn.backends.cudnn.algorithms.legacy_call import AddedBiasCall, LegacyCall
from ucudnn.backends.cudnn.api.library import Library
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer, Gpu
from ucudnn.errors import BackendError, UnsupportedProblemError
from ucudnn.problem import ConvolutionProblem, DataType, MathMode, Operation
from ucudnn.slabs import Piece, row_bytes

Operands = tuple[DeviceBuffer, DeviceBuffer | BiasedFilters, DeviceBuffer]
"""x, w and y. Where a problem adds a bias, it comes with w."""


def random_operands(problem: ConvolutionProblem, device: Gpu, allocate: Callable[[int], DeviceBuffer]) -> Operands:
    """Return x, w and y with random numbers in [-0.5, 0.5), the same in every run."""
    sizes = [problem.x_bytes, problem.w_bytes, problem.y_bytes]
    if problem.biased:
        sizes.append(problem.filters * problem.dtype.itemsize)
    x, w, y, *bias = buffers = [allocate(size) for size in sizes]
    for seed, buffer in enumerate(buffers):
        device.fill(buffer, problem.w_dtype if buffer is w else problem.dtype, seed)
    return x, BiasedFilters(w, bias[0]) if bias else w, y


def addresses_of(operands: Operands) -> tuple[int, int | BiasedFilters, int]:
    """Return the addresses of x, w and y, in the form that prepared calls take."""
    x, w, y = operands
    filters = BiasedFilters(w.w.address, w.bias.address) if isinstance(w, BiasedFilters) else w.address
    return x.address, filters, y.address


WINDOW_BYTES = 4096
"""Bytes that are checked at the begin or the end of a sample."""

TOLERANCES: dict[DataType, float] = {
    DataType.FLOAT16: 2e-3,
    DataType.BFLOAT16: 1e-2,
    DataType.FLOAT32: 2e-3,
    DataType.FLOAT64: 1e-10,
}
"""The largest relative L2 distance from a plain algorithm; for float32 that of TF32 products."""

FMA_TOLERANCE = 1e-4
"""The same for float32 without TF32; Winograd algorithms for 3 x 3 filters stay within it."""

_TAPS = 16  # about so many elements of a filter gradient are computed on the host, if it has as many
_MOST_READ = 1 << 20  # elements that are read at once
_MOST_HELD = 1 << 25  # elements of several channels of x that are held on the host; one channel may have more

_PLAIN = {
    Operation.FORWARD: ("IMPLICIT_GEMM", "IMPLICIT_PRECOMP_GEMM"),
    Operation.BACKWARD_DATA: ("ALGO_0", "ALGO_1"),
    Operation.BACKWARD_FILTER: ("ALGO_0", "ALGO_1", "ALGO_3"),
}
"""Legacy algorithms that multiply and add, and nothing else."""


_Traits = tuple[bool, bool, tuple[tuple[int, int], ...], int]
"""What an algorithm's error may depend on: gaps in x and y, paddings that differ, and the alignment."""


@final
class OutputCheck:
    """Checks algorithms on the first samples of a benchmark's operands.

    Every size is checked for NaN. An algorithm's error depends on gaps, on alignment and on padding that differs before
    and after x, but not on the number of samples or rows. So the error is checked once for each combination of these,
    and at every size only for an algorithm that rounds parts of its sums.
    """

    def __init__(
        self,
        problem: ConvolutionProblem,
        library: Library,
        handle: int,
        device: Gpu,
        operands: Operands,
        workspace: Callable[[int], DeviceBuffer],
    ) -> None:
        self._problem = problem
        self._library = library
        self._handle = handle
        self._device = device
        self._operands = operands
        self._workspace = workspace
        self._accumulates = problem.operation is Operation.BACKWARD_FILTER
        self._references: dict[Piece, Any] = {}
        self._gradients: dict[Piece, Any] = {}
        self._exact: set[tuple[str, _Traits, ConvolutionProblem | None]] = set()

    def __call__(
        self, call: PreparedCall, name: str, piece: Piece, workspace: DeviceBuffer, *, rounds: bool = False
    ) -> None:
        """Launch an algorithm on the first samples, and check the begin, the middle and the end of its output."""
        problem = piece.problem
        # Engine 50 of cuDNN 9.19 is right for some pairs of paddings and wrong for others: see `computes_wrong`.
        paddings = problem.paddings if problem.post_padding else ()
        gaps = bool(problem.x_channel_stride), bool(problem.y_channel_stride)
        met = name, (*gaps, paddings, problem.alignment), problem if rounds else None
        first = met not in self._exact
        if first and piece not in self._references:
            self._references[piece] = self._reference(piece)
        # BackwardFilter begins with beta = 0 on arbitrary memory, and continues with beta = 1.
        for beta in (0.0, 1.0) if self._accumulates and first else (float(self._accumulates),):
            if workspace.size_bytes:
                self._device.set_bytes(workspace.address, 0xFF, workspace.size_bytes)
            found = self._outcome(call, piece, Offset(0, piece.first_rows), beta, workspace)
            if np.isnan(found).any():
                raise UnsupportedProblemError(
                    "NaN from its output or workspace is in its result, or a part of the output is not written"
                )
            if first:
                self._compare(found, piece)
        self._exact.add(met)

    def _compare(self, found: Any, piece: Piece) -> None:
        reference, dtype = self._references[piece], self._problem.dtype
        fma = dtype is DataType.FLOAT32 and self._problem.math is MathMode.FMA
        most = FMA_TOLERANCE if fma else TOLERANCES[dtype]
        error = _distance(found, reference)
        if error > most and self._accumulates and dtype.has_16_bits:
            # If several blocks of threads share a filter gradient of 16 bits, plain algorithms add it up in 16 bits.
            # Over a large mini-batch their error may be the larger one. The host computes how large it is.
            exact = self._gradient(piece)
            own = _distance(reference, exact)
            if own > most / 2 and error <= most + 2 * own:
                error = _distance(found, exact)
        if error > most:
            raise UnsupportedProblemError(f"its result has an error of {error:.1e}, more than {most:.0e}")

    def _reference(self, piece: Piece) -> Any:
        """Return the expected values of the windows, NaN where unknown; None if no plain algorithm computes them.

        Plain algorithms pad both sides alike. If they do not compute a slab, it is taken from the result for all rows.
        For a filter gradient some channels are computed on the host.
        """
        if piece.problem.float32_sum:
            return self._gradient(piece)  # the legacy API writes the type that it reads
        ways = [(piece.problem, Offset(0, piece.first_rows))]
        if piece.first_rows is not None and not self._accumulates:
            ways.append((self._problem.part(piece.problem.batch), BEGIN))
        for problem, offset in ways:
            for name in _PLAIN[problem.operation]:
                try:
                    call = self._plain(problem, name)
                    windows = self._outcome(call, piece, offset, 0.0, self._workspace(call.workspace_bytes))
                except (BackendError, MemoryError):
                    continue
                if not np.isnan(windows).any():
                    return windows
        if piece.first_rows is None or not self._accumulates:
            return None
        return self._gradient(piece)

    def _plain(self, problem: ConvolutionProblem, name: str) -> AddedBiasCall | LegacyCall:
        asked = replace(problem, math=MathMode.FMA, biased=False)
        call = LegacyCall(self._library, self._handle, asked, name)
        if not problem.biased:
            return call
        return AddedBiasCall(self._library, self._handle, problem, call, call.workspace_bytes)

    def _gradient(self, piece: Piece) -> Any:
        """Return the windows of a filter gradient in float64; only the first channels of the first filter are known."""
        if piece in self._gradients:
            return self._gradients[piece]
        problem, rows = piece.problem, piece.first_rows or (0, 0)
        x, _, y = self._operands
        size = min(problem.w_bytes, WINDOW_BYTES) // problem.w_dtype.itemsize
        windows = np.full(2 * size, np.nan)
        channels, taps = problem.channels // problem.groups, prod(problem.kernel)
        step, following = (channels, 1) if problem.layout.channels_last else (1, taps)
        taps = min(taps, ceil(size / step))  # the others lie outside the window
        count = max(1, min(channels, ceil(_TAPS / taps), _MOST_HELD // (problem.batch * prod(problem.spatial))))
        data = self._channels(x.address, 0, problem, rows[0], count)
        gradient = self._channels(y.address, 1, problem, rows[1], 1)[0]
        for channel in range(count):
            places = channel * following + np.arange(taps) * step
            known = places < size
            windows[places[known]] = _taps(problem, data[channel], gradient, taps)[known]
        self._gradients[piece] = windows
        return windows

    def _channels(self, address: int, which: int, problem: ConvolutionProblem, row: int, count: int) -> Any:
        """Return the first channels of x (0) or y (1), from a row on, as (channels, samples, *sizes) on the host."""
        channels, sizes, gaps, _ = _side(problem, bool(which))
        last, size, width = problem.layout.channels_last, prod(sizes), problem.dtype.itemsize
        begin = address + row * row_bytes(problem)[which]
        found = np.empty((count, problem.batch, size))
        beside, wanted = (channels, count) if last else (1, 1)  # adjacent channels, and those of them that are kept
        several = max(1, _MOST_READ // beside)
        reads = product(range(problem.batch), range(0, count, wanted), range(0, size, several))
        for sample, channel, first in reads:
            stop = min(size, first + several)
            place = begin + sample * problem.steps[which] + (channel * (gaps or size) + first * beside) * width
            read = self._device.read(place, (stop - first) * beside * width, problem.dtype).reshape(-1, beside)
            found[channel : channel + wanted, sample, first:stop] = read[:, :wanted].T
        return found.reshape(count, problem.batch, *sizes)

    def _outcome(self, call: PreparedCall, piece: Piece, offset: Offset, beta: float, workspace: DeviceBuffer) -> Any:
        """Launch a call on an output of NaN, or of zeros if it accumulates, and return windows of the output."""
        problem, rows = piece.problem, piece.first_rows
        x, w, y = self._operands
        if not isinstance(w, DeviceBuffer):
            w = w.w
        if self._accumulates:
            self._device.set_bytes(w.address, 0x00 if beta else 0xFF, problem.w_bytes)
            samples, run = [(w.address, problem.w_bytes)], problem.w_bytes
        else:
            in_y = problem.operation is Operation.FORWARD
            address, step = (y.address, problem.steps[1]) if in_y else (x.address, problem.steps[0])
            if rows is not None:
                address += rows[in_y] * row_bytes(problem)[in_y]
            _, sizes, gaps, sample = _side(problem, in_y)
            run = prod(sizes) * problem.dtype.itemsize if gaps else sample  # the longest without gaps
            size = problem.batch
            self._device.set_bytes(address, 0xFF, (size - 1) * step + sample)
            samples = [(address + index * step, sample) for index in sorted({0, size // 2, size - 1})]
        call.launch(*addresses_of(self._operands), workspace, offset, Scaling(1.0, beta))
        windows = []
        for number, (address, sample) in enumerate(samples):
            window = min(sample, WINDOW_BYTES, run)
            # The begin of the first sample, the end of the last one, and the begin of the one between.
            ends = (address, address + sample - window) if len(samples) == 1 else (address,)
            if number and number == len(samples) - 1:
                ends = (address + sample - window,)
            dtype = problem.w_dtype if self._accumulates else problem.dtype
            windows += [self._device.read(each, window, dtype) for each in ends]
        return np.concatenate(windows)


def _side(problem: ConvolutionProblem, in_y: bool) -> tuple[int, tuple[int, ...], int, int]:
    """Return the channels of x or y, their sizes, their stride where there are gaps, and the bytes of a sample."""
    width = problem.dtype.itemsize
    if in_y:
        return problem.filters, problem.output, problem.y_channel_stride, problem.y_sample * width
    return problem.channels, problem.spatial, problem.x_channel_stride, problem.x_sample * width


def _distance(found: Any, expected: Any) -> float:
    """Return the relative L2 distance of the values that are expected; 0 if none are."""
    if expected is None:
        return 0.0
    known = ~np.isnan(expected)
    size = max(float(np.linalg.norm(expected[known])), 1e-300)
    return float(np.linalg.norm((found - expected)[known]) / size)


def _taps(problem: ConvolutionProblem, data: Any, gradient: Any, count: int) -> Any:
    """Return the first taps of the filter gradient for one channel of x, (samples, *spatial), and one of dy."""
    padded = np.pad(data, [(0, 0), *problem.paddings])
    taps = np.empty(count)
    for index, tap in enumerate(islice(np.ndindex(*problem.kernel), count)):
        sides = zip(tap, problem.dilation, problem.output, problem.stride, strict=True)
        window = padded[(slice(None), *(slice(t * d, t * d + (o - 1) * s + 1, s) for t, d, o, s in sides))]
        taps[index] = np.vdot(window, gradient)
    return taps
