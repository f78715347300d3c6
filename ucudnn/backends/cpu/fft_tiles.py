"""Convolution through spectra, tile by tile (overlap-save): the engines of FFT and FFT_TILING.

Positions are those of a stride and dilation of 1: output o meets input o + tap - pad. A tile of the result needs a
window of the source; the part of the window that lies inside the tensor is transformed from position 0 on, and
the result is found at a shift, modulo the FFT size. That is exact where positions of the window are distinct modulo
the FFT size, or where those that are not hold zeros.

Method: Mathieu, Henaff, LeCun, "Fast Training of Convolutional Networks through FFTs", ICLR 2014.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import final

import numpy as np

from ucudnn.backends.cpu.algorithm import Sizes
from ucudnn.backends.cpu.fft_transforms import circular, half, restore, scale, transform
from ucudnn.backends.cpu.geometry import Array, Box
from ucudnn.backends.cpu.scaling import accumulate, finish
from ucudnn.backends.cpu.scratch import Scratch
from ucudnn.problem import ConvolutionProblem, Operation


@final
@dataclass(frozen=True, slots=True)
class _Side:
    """One dimension of a tile.

    Attributes:
        tile: positions of the tile: of the output in Forward, of x in BackwardData, of y in BackwardFilter.
        window: positions of the source that meet them and lie inside the tensor; may be empty.
        first: position of the source that the window begins with, outside of the tensor or not.
    """

    tile: slice
    window: slice
    first: int


def _side(start: int, step: int, extent: int, source: int, offset: int, kernel: int) -> _Side:
    """Return one tile of one dimension; tile position t meets sources [t + offset, t + offset + kernel)."""
    stop = min(start + step, extent)
    low, high = max(0, start + offset), min(source, stop - 1 + offset + kernel)
    return _Side(slice(start, stop), slice(low, high) if low < high else slice(0, 0), start + offset)


def _extents(problem: ConvolutionProblem) -> tuple[int, ...]:
    return problem.spatial if problem.operation is Operation.BACKWARD_DATA else problem.output


def _tiles(problem: ConvolutionProblem, steps: tuple[int, ...]) -> Iterator[tuple[_Side, ...]]:
    backward = problem.operation is Operation.BACKWARD_DATA
    sources = problem.output if backward else problem.spatial
    offsets = (
        pad - kernel + 1 if backward else -pad for pad, kernel in zip(problem.padding, problem.kernel, strict=True)
    )
    sizes = tuple(zip(steps, _extents(problem), sources, offsets, problem.kernel, strict=True))
    # One by one: a list of the tiles of a long dimension would be memory that nobody has granted.
    for index in np.ndindex(*_counts(problem, steps)):
        yield tuple(_side(at * size[0], *size) for at, size in zip(index, sizes, strict=True))


def _counts(problem: ConvolutionProblem, steps: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-extent // step) for extent, step in zip(_extents(problem), steps, strict=True))


def tile_count(problem: ConvolutionProblem, steps: tuple[int, ...]) -> int:
    """Return how many tiles of at most `steps` positions there are."""
    return prod(_counts(problem, steps))


def _windows(tile: tuple[_Side, ...]) -> Box:
    return tuple(side.window for side in tile)


def _positions(tile: tuple[_Side, ...]) -> Box:
    return tuple(side.tile for side in tile)


def _deliver(spectrum: Array, result: Array, target: Array, shifts: tuple[int, ...], alpha: float, beta: float) -> None:
    """Transform a spectrum (*half, groups, rows, columns) back row by row, and write what the target is of it."""
    fft = result.shape[3:]
    for row in range(target.shape[1]):
        rows = slice(row, row + 1)
        restore(spectrum[..., rows, :], result, fft)
        for to, at in circular(shifts, target.shape[3:], fft):
            finish(target[:, rows, :, *to], result[:, :, :, *at], alpha * scale(fft), beta)


@final
class SpectralFiltering:
    """Forward (x with w correlated into y) and BackwardData (y with w convolved into x).

    The workspace holds the spectrum of w, once for all tiles, and of one tile the spectra of the source and of
    the result; one sample of the result in real numbers lies where the source's spectrum was.
    """

    def __init__(self, problem: ConvolutionProblem, fft: tuple[int, ...], steps: tuple[int, ...]) -> None:
        """Plan tiles of `steps` positions of the result with FFTs of the sizes `fft`."""
        sizes = Sizes(problem)
        scratch = Scratch()
        self._problem, self._fft, self._steps = problem, fft, steps
        self._forward = problem.operation is Operation.FORWARD
        groups, filters, channels = sizes.w[:3]
        sources, results = (channels, filters) if self._forward else (filters, channels)
        batch, shape = problem.batch, half(fft)
        self._product = scratch.region((*shape, groups, batch, results), sizes.complex)
        self._w = scratch.region((*shape, groups, filters, channels), sizes.complex)
        top = scratch.top
        self._source = scratch.region((*shape, groups, batch, sources), sizes.complex)
        scratch.release(top)
        self._result = scratch.region((groups, 1, results, *fft), sizes.dtype)
        self.workspace_bytes = scratch.size_bytes

    def compute(self, x: Array, w: Array, y: Array, alpha: float, beta: float, workspace: Array) -> None:
        """Compute tile by tile; see Routine.compute."""
        regions = (self._w, self._source, self._product, self._result)
        filters, spectrum, products, result = (region.of(workspace) for region in regions)
        source, target = (x, y) if self._forward else (y, x)
        source, target = source.swapaxes(1, 2), target.swapaxes(1, 2)
        transform(w, filters, self._fft)
        factors = filters
        if self._forward:
            np.conjugate(filters, out=filters)
            factors = filters.swapaxes(-1, -2)
        for tile in _tiles(self._problem, self._steps):
            transform(source[:, :, :, *_windows(tile)], spectrum, self._fft)
            np.matmul(spectrum, factors, out=products)
            _deliver(products, result, target[:, :, :, *_positions(tile)], self._shifts(tile), alpha, beta)

    def _shifts(self, tile: tuple[_Side, ...]) -> tuple[int, ...]:
        if self._forward:
            return tuple(side.first - side.window.start for side in tile)
        return tuple(
            side.first + kernel - 1 - side.window.start for side, kernel in zip(tile, self._problem.kernel, strict=True)
        )


@final
class SpectralGradient:
    """BackwardFilter: x correlated with y into w, summed over samples by the products and over tiles in the spectrum.

    The workspace holds of one tile the spectra of x, y and the product; with more than one tile also the sum of the
    products, and, before y's spectrum is there, the tile of x within its padding in real numbers: the sum needs
    every tile at the same shift. One filter of the result in real numbers lies where the spectra of x and y were.
    """

    def __init__(self, problem: ConvolutionProblem, fft: tuple[int, ...], steps: tuple[int, ...]) -> None:
        """Plan tiles of `steps` positions of y with FFTs of the sizes `fft`."""
        sizes = Sizes(problem)
        scratch = Scratch()
        self._problem, self._fft, self._steps = problem, fft, steps
        groups, filters, channels = sizes.w[:3]
        batch, shape = problem.batch, half(fft)
        self._tiled = tile_count(problem, steps) > 1
        self._sum = scratch.region((*shape, groups, filters, channels), sizes.complex)
        bottom = scratch.top
        self._x = scratch.region((*shape, groups, batch, channels), sizes.complex)
        if self._tiled:
            top = scratch.top
            self._stage = scratch.region((groups, batch, channels, *fft), sizes.dtype)
            scratch.release(top)
        self._y = scratch.region((*shape, groups, batch, filters), sizes.complex)
        if self._tiled:
            self._product = scratch.region((*shape, groups, filters, channels), sizes.complex)
        scratch.release(bottom)
        self._result = scratch.region((groups, 1, channels, *fft), sizes.dtype)
        self.workspace_bytes = scratch.size_bytes

    def compute(self, x: Array, w: Array, y: Array, alpha: float, beta: float, workspace: Array) -> None:
        """Compute tile by tile; see Routine.compute."""
        total, spectrum, gradient, result = (
            region.of(workspace) for region in (self._sum, self._x, self._y, self._result)
        )
        x, y = x.swapaxes(1, 2), y.swapaxes(1, 2)
        term = total
        for tile in _tiles(self._problem, self._steps):
            transform(self._padded(x, tile, workspace), spectrum, self._fft)
            transform(y[:, :, :, *_positions(tile)], gradient, self._fft)
            np.conjugate(gradient, out=gradient)
            np.matmul(gradient.swapaxes(-1, -2), spectrum, out=term)
            if term is not total:
                accumulate(total, term)
            elif self._tiled:
                term = self._product.of(workspace)
        shifts = (0,) * len(self._fft) if self._tiled else tuple(-pad for pad in self._problem.padding)
        _deliver(total, result, w, shifts, alpha, beta)

    def _padded(self, x: Array, tile: tuple[_Side, ...], workspace: Array) -> Array:
        windows = _windows(tile)
        if not self._tiled:
            return x[:, :, :, *windows]
        stage = self._stage.of(workspace)
        stage.fill(0)
        inside = tuple(slice(side.window.start - side.first, side.window.stop - side.first) for side in tile)
        if all(side.window.stop for side in tile):  # else the tile meets nothing but padding
            np.copyto(stage[:, :, :, *inside], x[:, :, :, *windows])
        return stage
