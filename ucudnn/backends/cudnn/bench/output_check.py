"""Checks what an algorithm writes before it is measured: all of it, from its inputs alone, as exactly as it should.

cuDNN 9.19 offers engines that multiply what the output holds by beta = 0, or what the workspace held before by other
zeros, so that NaN in fresh memory comes through, and Winograd algorithms of 5 x 5 filters that are 5e-3 off in float32.
None of it is in its notes.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice, product
from math import ceil, prod
from typing import Any, final

import numpy as np

from ucudnn.backends.base import PreparedCall
from ucudnn.backends.cudnn.algorithms.legacy_call import LegacyCall
from ucudnn.backends.cudnn.api.library import Library
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer, Gpu
from ucudnn.errors import BackendError, UnsupportedProblemError
from ucudnn.problem import ConvolutionProblem, DataType, MathMode, Operation
from ucudnn.slabs import Piece, Rows, row_bytes

WINDOW_BYTES = 4096
"""Of a sample's begin or end, as much as is looked at."""

TOLERANCES: dict[DataType, float] = {
    DataType.FLOAT16: 2e-3,
    DataType.BFLOAT16: 1e-2,
    DataType.FLOAT32: 2e-3,
    DataType.FLOAT64: 1e-10,
}
"""Relative L2 distance from a plain algorithm; float32 as TF32 multiplies it."""

FMA_TOLERANCE = 1e-4
"""The same for float32 without TF32: what Winograd algorithms of 3 x 3 filters keep."""

_TAPS = 16
"""Of a filter gradient, about so many are computed on the host, where there are that many."""

_MOST_READ = 1 << 20
"""Elements that are read at a time."""

_MOST_HELD = 1 << 25
"""Elements of x that are held, of several channels, unless one has more."""

_PLAIN = {
    Operation.FORWARD: ("IMPLICIT_GEMM", "IMPLICIT_PRECOMP_GEMM"),
    Operation.BACKWARD_DATA: ("ALGO_0", "ALGO_1"),
    Operation.BACKWARD_FILTER: ("ALGO_0", "ALGO_1", "ALGO_3"),
}
"""Legacy algorithms that multiply and add, and nothing else."""


_Manner = tuple[bool, bool, tuple[tuple[int, int], ...], int]


def _manner_of(problem: ConvolutionProblem) -> _Manner:
    """Return what the exactness of an algorithm may depend on."""
    gaps = bool(problem.x_channel_stride), bool(problem.y_channel_stride)
    # Engine 50 of cuDNN 9.19 computes some pairs of paddings, and others not: see `faults`.
    return (*gaps, problem.paddings if problem.post_padding else (), problem.alignment)


@final
class OutputCheck:
    """Checks algorithms on the first samples of the operands of a benchmark.

    Whether NaN comes through is checked at every size. How exact an algorithm is depends on the algorithm, on gaps,
    alignment and, where both sides are not padded alike, on how they are, but not on the number of samples or rows; so
    that is checked where these are met first. Of one that rounds parts of its sums, it is checked at every size.

    Args:
        problem: the mini-batch.
        library: cuDNN.
        handle: address of the cudnnHandle_t.
        device: the GPU.
        operands: x, w and y.
        workspace: gives workspaces.
    """

    def __init__(
        self,
        problem: ConvolutionProblem,
        library: Library,
        handle: int,
        device: Gpu,
        operands: tuple[DeviceBuffer, DeviceBuffer, DeviceBuffer],
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
        self._exact: set[tuple[str, _Manner, ConvolutionProblem | None]] = set()

    def __call__(
        self, call: PreparedCall, name: str, piece: Piece, workspace: DeviceBuffer, *, rounds: bool = False
    ) -> None:
        """Launch an algorithm on the first samples and look at the begin, the middle and the end of its output.

        Args:
            call: the algorithm, prepared for a micro-batch or a slab of one.
            name: its name.
            piece: the micro-batch or the slab.
            workspace: what it takes as workspace; filled with NaN before.
            rounds: whether it rounds parts of its sums.

        Raises:
            UnsupportedProblemError: if the output is not what it should be.
            CudnnError: if the launch fails.
        """
        met = name, _manner_of(piece.problem), piece.problem if rounds else None
        first = met not in self._exact
        if first and piece not in self._references:
            self._references[piece] = self._reference(piece)
        # BackwardFilter begins with beta = 0 on whatever memory holds, and goes on with beta = 1.
        for beta in (0.0, 1.0) if self._accumulates and first else (float(self._accumulates),):
            if workspace.size_bytes:
                self._device.set_bytes(workspace.address, 0xFF, workspace.size_bytes)
            found = self._outcome(call, piece, piece.first_rows, beta, workspace)
            if np.isnan(found).any():
                raise UnsupportedProblemError(
                    "NaN of its output or workspace comes through, or some of it stays unwritten"
                )
            if first:
                self._compare(found, piece)
        self._exact.add(met)

    def _compare(self, found: Any, piece: Piece) -> None:
        reference, most = self._references[piece], self._tolerance()
        error = _distance(found, reference)
        if error > most and self._accumulates and self._problem.dtype.has_16_bits:
            # Plain algorithms add up a filter gradient of 16 bits in 16 bits, where several blocks of threads share it:
            # over a large mini-batch, they are further off than what is checked. How far, the host says.
            exact = self._gradient(piece)
            own = _distance(reference, exact)
            if own > most / 2 and error <= most + 2 * own:
                error = _distance(found, exact)
        if error > most:
            raise UnsupportedProblemError(f"its result is {error:.1e} off, more than {most:.0e}")

    def _tolerance(self) -> float:
        fma = self._problem.dtype is DataType.FLOAT32 and self._problem.math is MathMode.FMA
        return FMA_TOLERANCE if fma else TOLERANCES[self._problem.dtype]

    def _reference(self, piece: Piece) -> Any:
        """Return what the windows should hold, NaN where that is not known, or None where nothing computes the problem.

        A slab that plain algorithms do not compute, for they pad both sides alike, is part of what they make of the
        whole; of a gradient, one channel is computed on the host.
        """
        ways = [(piece.problem, piece.first_rows)]
        if piece.first_rows is not None and not self._accumulates:
            ways.append((self._problem.part(piece.problem.batch), None))
        for problem, rows in ways:
            for name in _PLAIN[problem.operation]:
                try:
                    call = LegacyCall(self._library, self._handle, replace(problem, math=MathMode.FMA), name)
                    windows = self._outcome(call, piece, rows, 0.0, self._workspace(call.workspace_bytes))
                except (BackendError, MemoryError):
                    continue
                if not np.isnan(windows).any():
                    return windows
        if piece.first_rows is None or not self._accumulates:
            return None
        return self._gradient(piece)

    def _gradient(self, piece: Piece) -> Any:
        """Return the windows of a filter gradient, of which taps of the first filter's first channels are known."""
        if piece in self._gradients:
            return self._gradients[piece]
        problem, rows = piece.problem, piece.first_rows or (0, 0)
        x, _, y = self._operands
        size = min(problem.w_bytes, WINDOW_BYTES) // problem.dtype.itemsize
        windows = np.full(2 * size, np.nan)
        channels, taps = problem.channels // problem.groups, prod(problem.kernel)
        step, following = (channels, 1) if problem.layout.channels_last else (1, taps)
        taps = min(taps, ceil(size / step))  # the others lie beyond the window
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
        """Return the first channels of the rows of x (0) or y (1) on the host, (channels, samples, *sizes)."""
        channels, sizes, gaps = (
            (problem.channels, problem.spatial, problem.x_channel_stride),
            (problem.filters, problem.output, problem.y_channel_stride),
        )[which]
        last, size, width = problem.layout.channels_last, prod(sizes), problem.dtype.itemsize
        begin = address + row * row_bytes(problem)[which]
        found = np.empty((count, problem.batch, size))
        beside, wanted = (channels, count) if last else (1, 1)  # channels that lie side by side
        several = max(1, _MOST_READ // beside)
        reads = product(range(problem.batch), range(0, count, wanted), range(0, size, several))
        for sample, channel, first in reads:
            stop = min(size, first + several)
            place = begin + sample * problem.steps[which] + (channel * (gaps or size) + first * beside) * width
            read = self._device.read(place, (stop - first) * beside * width, problem.dtype).reshape(-1, beside)
            found[channel : channel + wanted, sample, first:stop] = read[:, :wanted].T
        return found.reshape(count, problem.batch, *sizes)

    def _outcome(
        self, call: PreparedCall, piece: Piece, first_rows: Rows | None, beta: float, workspace: DeviceBuffer
    ) -> Any:
        """Launch on an output of NaN, or of zeros where it accumulates, and return windows of it.

        Args:
            call: computes the piece, or the whole.
            piece: what the windows are of.
            first_rows: where that begins which the call computes.
            beta: factor of what the output holds.
            workspace: of the call.
        """
        problem, rows = piece.problem, piece.first_rows
        x, w, y = self._operands
        if self._accumulates:
            self._device.set_bytes(w.address, 0x00 if beta else 0xFF, problem.w_bytes)
            samples = [(w.address, problem.w_bytes)]
        else:
            forward = problem.operation is Operation.FORWARD
            elements = problem.y_sample if forward else problem.x_sample
            address, step = (y.address, problem.steps[1]) if forward else (x.address, problem.steps[0])
            if rows is not None:
                address += rows[forward] * row_bytes(problem)[forward]
            sample = elements * problem.dtype.itemsize
            size = problem.batch
            self._device.set_bytes(address, 0xFF, (size - 1) * step + sample)
            samples = [(address + index * step, sample) for index in sorted({0, size // 2, size - 1})]
        addresses = x.address, w.address, y.address
        call.launch(*addresses, start=0, alpha=1.0, beta=beta, workspace=workspace, first_rows=first_rows)
        windows = []
        for number, (address, sample) in enumerate(samples):
            window = min(sample, WINDOW_BYTES, self._run(problem))
            # The begin of the first sample, the end of the last, the begin of what is between.
            ends = (address, address + sample - window) if len(samples) == 1 else (address,)
            if number and number == len(samples) - 1:
                ends = (address + sample - window,)
            windows += [self._device.read(each, window, problem.dtype) for each in ends]
        return np.concatenate(windows)

    def _run(self, problem: ConvolutionProblem) -> int:
        """Return the bytes of an output that follow each other: one channel of a slab, for there are gaps."""
        if self._accumulates:
            return problem.w_bytes
        forward = problem.operation is Operation.FORWARD
        sizes, gaps = (
            (problem.output, problem.y_channel_stride) if forward else (problem.spatial, problem.x_channel_stride)
        )
        sample = problem.y_sample if forward else problem.x_sample
        return (prod(sizes) if gaps else sample) * problem.dtype.itemsize


def _distance(found: Any, expected: Any) -> float:
    """Return the relative L2 distance where it is known what is expected; 0 where nothing is."""
    if expected is None:
        return 0.0
    known = ~np.isnan(expected)
    size = max(float(np.linalg.norm(expected[known])), 1e-300)
    return float(np.linalg.norm((found - expected)[known]) / size)


def _taps(problem: ConvolutionProblem, data: Any, gradient: Any, count: int) -> Any:
    """Return the first taps of the filter gradient of one channel of x, (samples, *spatial), and one of dy."""
    padded = np.pad(data, [(0, 0), *problem.paddings])
    taps = np.empty(count)
    for index, tap in enumerate(islice(np.ndindex(*problem.kernel), count)):
        sides = zip(tap, problem.dilation, problem.output, problem.stride, strict=True)
        window = padded[(slice(None), *(slice(t * d, t * d + (o - 1) * s + 1, s) for t, d, o, s in sides))]
        taps[index] = np.vdot(window, gradient)
    return taps
