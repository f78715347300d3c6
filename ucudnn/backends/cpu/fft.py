"""FFT and FFT_TILING: convolution through spectra, of whole tensors or tile by tile (overlap-save).

Stride and dilation are 1, so output o meets input o + tap - pad. A tile of the result needs a window of the source. The
part of the window that lies inside the tensor is transformed from position 0 on, and the result appears at a shift,
modulo the FFT size. That is exact if positions of the window are distinct modulo the FFT size, or hold zeros.

Transforms lie in workspace memory, with frequencies outermost. What numpy.fft itself allocates does not grow with the
tensors. With `out` given, one transform allocates less than 2 KiB of Python objects (tracemalloc, NumPy 2.0 to 2.4),
under two conditions that are kept here. First, an array that is both input and output is passed as the very same view.
Second, `norm` is not 'backward' in a forward transform, because NumPy then passes the scale as an integer and
transforms float32 in double precision, through copies. The C++ code of pocketfft also holds about two complex lines of
the transform, FFT size * 32 bytes, which tracemalloc does not see.

Method: Mathieu, Henaff, LeCun, "Fast Training of Convolutional Networks through FFTs", ICLR 2014.
"""

from collections.abc import Iterator
from itertools import count, product
from math import prod, sqrt
from typing import Final, final

import numpy as np

from ucudnn.backends.cpu.algorithm import CpuAlgorithm, Planner, ViewShapes, accumulate, finish, is_plain
from ucudnn.backends.cpu.geometry import Array, Box
from ucudnn.backends.cpu.scratch import Scratch
from ucudnn.problem import ConvolutionProblem, Operation

NORM: Final = "ortho"
"""Normalization of every transform, forward and inverse; `scale` returns the factor that corrects it."""


def good_size(least: int) -> int:
    """Return the first size from `least` on without prime factors above 5, because such sizes are fast."""
    # Such a size divides a power of 30, and one with so many factors suffices.
    return next(size for size in count(least) if pow(30, size.bit_length(), size) == 0)


def half(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the spectrum of real data: conjugate-symmetric, so half of its last dimension."""
    return (*sizes[:-1], sizes[-1] // 2 + 1)


def scale(sizes: tuple[int, ...]) -> float:
    """Return the factor of a convolution computed by orthonormal transforms, two forward and one inverse."""
    return sqrt(prod(sizes))


def frequencies_last(spectrum: Array) -> Array:
    """View a spectrum (*frequencies, groups, rows, columns) as (groups, rows, columns, *frequencies)."""
    dimensions = spectrum.ndim - 3
    return spectrum.transpose(dimensions, dimensions + 1, dimensions + 2, *range(dimensions))


def transform(source: Array, spectrum: Array, sizes: tuple[int, ...]) -> None:
    """Transform real data, extended with zeros to the FFT sizes.

    Args:
        source: (groups, rows, columns, *segment), no segment longer than its FFT size; may be empty.
        spectrum: (*half(sizes), groups, rows, columns), contiguous; overwritten.
        sizes: FFT size of each dimension.
    """
    if source.size == 0:
        spectrum.fill(0)
        return
    dimensions = len(sizes)
    lead = tuple(slice(0, length) for length in source.shape[3:-1])
    view = frequencies_last(spectrum)
    np.fft.rfft(source, n=sizes[-1], axis=-1, norm=NORM, out=view[:, :, :, *lead])
    for axis in reversed(range(dimensions - 1)):
        # Dimensions before this one still have the length of the segment; this one and later ones are complete.
        part = view[:, :, :, *lead[:axis]]
        part[:, :, :, *(slice(None),) * axis, lead[axis].stop :].fill(0)
        np.fft.fft(part, axis=3 + axis, norm=NORM, out=part)


def restore(spectrum: Array, result: Array, sizes: tuple[int, ...]) -> None:
    """Transform a spectrum back to real data.

    Args:
        spectrum: (*half(sizes), groups, rows, columns), contiguous; destroyed.
        result: (groups, rows, columns, *sizes), contiguous; overwritten.
        sizes: FFT size of each dimension.
    """
    view = frequencies_last(spectrum)
    for axis in range(len(sizes) - 1):
        np.fft.ifft(view, axis=3 + axis, norm=NORM, out=view)
    np.fft.irfft(view, n=sizes[-1], axis=-1, norm=NORM, out=result)


def circular(shifts: tuple[int, ...], counts: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[tuple[Box, Box]]:
    """Yield boxes of the target, each with a box of the circular data, so that target[i] is data[(i + shift) mod size].

    Args:
        shifts: for each dimension, the position in the data of the target's first element; any integer.
        counts: lengths of the target, at most the sizes.
        sizes: lengths of the data.
    """
    sides = [
        tuple(_pieces(shift % size, length, size)) for shift, length, size in zip(shifts, counts, sizes, strict=True)
    ]
    for pieces in product(*sides):
        yield tuple(target for target, _ in pieces), tuple(source for _, source in pieces)


def _pieces(first: int, length: int, size: int) -> Iterator[tuple[slice, slice]]:
    straight = min(length, size - first)
    yield slice(0, straight), slice(first, first + straight)
    if straight < length:
        yield slice(straight, length), slice(0, length - straight)


SMALL_TILE, LARGE_TILE = 16, 32
"""FFT sizes of FFT_TILING in each dimension: small for kernels up to half of it, else large."""


_Tile = tuple[Box, Box, tuple[int, ...]]
"""Positions of a tile: in the output for Forward, in x for BackwardData, in y for BackwardFilter. Then those of the
source that meet it and lie inside the tensor, if any, and the first one that meets it, which may lie outside of it."""


def _side(start: int, step: int, extent: int, source: int, offset: int, kernel: int) -> tuple[slice, slice, int]:
    """Return one dimension of a tile; tile position t meets source positions [t + offset, t + offset + kernel)."""
    stop = min(start + step, extent)
    low, high = max(0, start + offset), min(source, stop - 1 + offset + kernel)
    return slice(start, stop), slice(low, high) if low < high else slice(0, 0), start + offset


def _extents(problem: ConvolutionProblem) -> tuple[int, ...]:
    return problem.spatial if problem.operation is Operation.BACKWARD_DATA else problem.output


def _tiles(problem: ConvolutionProblem, steps: tuple[int, ...]) -> Iterator[_Tile]:
    backward = problem.operation is Operation.BACKWARD_DATA
    sources = problem.output if backward else problem.spatial
    offsets = (
        pad - kernel + 1 if backward else -pad for pad, kernel in zip(problem.padding, problem.kernel, strict=True)
    )
    sizes = tuple(zip(steps, _extents(problem), sources, offsets, problem.kernel, strict=True))
    # One by one, because a list of the tiles of a long dimension would be memory outside the workspace.
    for index in np.ndindex(*_counts(problem, steps)):
        sides = [_side(at * size[0], *size) for at, size in zip(index, sizes, strict=True)]
        positions, windows, firsts = zip(*sides, strict=True)
        yield positions, windows, firsts


def _counts(problem: ConvolutionProblem, steps: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-extent // step) for extent, step in zip(_extents(problem), steps, strict=True))


def _deliver(spectrum: Array, result: Array, target: Array, shifts: tuple[int, ...], alpha: float, beta: float) -> None:
    """Transform a spectrum (*half, groups, rows, columns) back row by row, and write the part in the target."""
    fft = result.shape[3:]
    for row in range(target.shape[1]):
        rows = slice(row, row + 1)
        restore(spectrum[..., rows, :], result, fft)
        for to, at in circular(shifts, target.shape[3:], fft):
            finish(target[:, rows, :, *to], result[:, :, :, *at], alpha * scale(fft), beta)


@final
class FftFiltering(CpuAlgorithm):
    """Forward (x with w correlated into y) and BackwardData (y with w convolved into x).

    The workspace holds the spectrum of w for all tiles, and the spectra of one tile of the source and of the result.
    One sample of the real result overlays the spectrum of the source.
    """

    def __init__(self, problem: ConvolutionProblem, fft: tuple[int, ...], steps: tuple[int, ...]) -> None:
        """Plan tiles of `steps` positions of the result with FFTs of the sizes `fft`."""
        shapes = ViewShapes(problem)
        scratch = Scratch()
        self._problem, self._fft, self._steps = problem, fft, steps
        self._forward = problem.operation is Operation.FORWARD
        groups, filters, channels = shapes.w[:3]
        sources, results = (channels, filters) if self._forward else (filters, channels)
        batch, shape = problem.batch, half(fft)
        self._product = scratch.region((*shape, groups, batch, results), shapes.complex)
        self._w = scratch.region((*shape, groups, filters, channels), shapes.complex)
        top = scratch.top
        self._source = scratch.region((*shape, groups, batch, sources), shapes.complex)
        scratch.top = top
        self._result = scratch.region((groups, 1, results, *fft), shapes.dtype)
        self.workspace_bytes = scratch.size_bytes

    def compute(self, x: Array, w: Array, y: Array, *, alpha: float, beta: float, workspace: Array) -> None:
        regions = (self._w, self._source, self._product, self._result)
        filters, spectrum, products, result = (region.of(workspace) for region in regions)
        source, target = (x, y) if self._forward else (y, x)
        source, target = source.swapaxes(1, 2), target.swapaxes(1, 2)
        transform(w, filters, self._fft)
        factors = filters
        if self._forward:
            np.conjugate(filters, out=filters)
            factors = filters.swapaxes(-1, -2)
        last_taps = [0 if self._forward else kernel - 1 for kernel in self._problem.kernel]
        for positions, windows, firsts in _tiles(self._problem, self._steps):
            transform(source[:, :, :, *windows], spectrum, self._fft)
            np.matmul(spectrum, factors, out=products)
            sides = zip(firsts, last_taps, windows, strict=True)
            shifts = tuple(first + last - window.start for first, last, window in sides)
            _deliver(products, result, target[:, :, :, *positions], shifts, alpha, beta)


@final
class FftGradient(CpuAlgorithm):
    """BackwardFilter: x correlated with y into w. Products sum over samples, and spectra are summed over tiles.

    The workspace holds the spectra of one tile of x, of y and of their product. With more than one tile it also holds
    the sum of the products and a real copy of the tile of x with its padding, because the sum needs every tile at the
    same shift. The spectrum of y overlays that copy. One filter of the real result overlays the spectra of x and y.
    """

    def __init__(self, problem: ConvolutionProblem, fft: tuple[int, ...], steps: tuple[int, ...]) -> None:
        """Plan tiles of `steps` positions of y with FFTs of the sizes `fft`."""
        shapes = ViewShapes(problem)
        scratch = Scratch()
        self._problem, self._fft, self._steps = problem, fft, steps
        groups, filters, channels = shapes.w[:3]
        batch, shape = problem.batch, half(fft)
        self._tiled = prod(_counts(problem, steps)) > 1
        self._sum = scratch.region((*shape, groups, filters, channels), shapes.complex)
        bottom = scratch.top
        self._x = scratch.region((*shape, groups, batch, channels), shapes.complex)
        if self._tiled:
            top = scratch.top
            self._stage = scratch.region((groups, batch, channels, *fft), shapes.dtype)
            scratch.top = top
        self._y = scratch.region((*shape, groups, batch, filters), shapes.complex)
        if self._tiled:
            self._product = scratch.region((*shape, groups, filters, channels), shapes.complex)
        scratch.top = bottom
        self._result = scratch.region((groups, 1, channels, *fft), shapes.dtype)
        self.workspace_bytes = scratch.size_bytes

    def compute(self, x: Array, w: Array, y: Array, *, alpha: float, beta: float, workspace: Array) -> None:
        total, spectrum, gradient, result = (
            region.of(workspace) for region in (self._sum, self._x, self._y, self._result)
        )
        x, y = x.swapaxes(1, 2), y.swapaxes(1, 2)
        term = total
        for positions, windows, firsts in _tiles(self._problem, self._steps):
            transform(self._padded(x, windows, firsts, workspace), spectrum, self._fft)
            transform(y[:, :, :, *positions], gradient, self._fft)
            np.conjugate(gradient, out=gradient)
            np.matmul(gradient.swapaxes(-1, -2), spectrum, out=term)
            if term is not total:
                accumulate(total, term)
            elif self._tiled:
                term = self._product.of(workspace)
        shifts = (0,) * len(self._fft) if self._tiled else tuple(-pad for pad in self._problem.padding)
        _deliver(total, result, w, shifts, alpha, beta)

    def _padded(self, x: Array, windows: Box, firsts: tuple[int, ...], workspace: Array) -> Array:
        if not self._tiled:
            return x[:, :, :, *windows]
        stage = self._stage.of(workspace)
        stage.fill(0)
        inside = (slice(side.start - first, side.stop - first) for side, first in zip(windows, firsts, strict=True))
        if all(side.stop for side in windows):  # else the tile meets only padding
            np.copyto(stage[:, :, :, *inside], x[:, :, :, *windows])
        return stage


def _engine(problem: ConvolutionProblem, fft: tuple[int, ...], steps: tuple[int, ...]) -> CpuAlgorithm:
    gradient = problem.operation is Operation.BACKWARD_FILTER
    return FftGradient(problem, fft, steps) if gradient else FftFiltering(problem, fft, steps)


def _whole(problem: ConvolutionProblem) -> CpuAlgorithm:
    """Plan transforms of whole samples. FFT sizes are 5-smooth and hold the tensors with the padding of one side."""
    # x may wrap around, because the padding before it and the padding after it are the same zeros.
    sides = zip(problem.spatial, problem.paddings, problem.output, problem.kernel, strict=True)
    fft = tuple(good_size(max(size + max(pads), output, kernel)) for size, pads, output, kernel in sides)
    return _engine(problem, fft, _extents(problem))


def _tile_size(problem: ConvolutionProblem) -> int:
    return SMALL_TILE if max(problem.kernel) <= SMALL_TILE // 2 else LARGE_TILE


def _tile_steps(problem: ConvolutionProblem) -> tuple[int, ...]:
    return tuple(_tile_size(problem) - kernel + 1 for kernel in problem.kernel)


def _tiled(problem: ConvolutionProblem) -> CpuAlgorithm:
    return _engine(problem, (_tile_size(problem),) * len(problem.kernel), _tile_steps(problem))


def _has_tiles(problem: ConvolutionProblem) -> bool:
    fits = is_plain(problem) and max(problem.kernel) <= LARGE_TILE // 2
    return fits and prod(_counts(problem, _tile_steps(problem))) > 1


FFT = Planner(_whole, is_plain)
FFT_TILING = Planner(_tiled, _has_tiles)
