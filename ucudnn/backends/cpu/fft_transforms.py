"""Discrete Fourier transforms of tensors into, within and out of workspace memory, with frequencies outermost.

The memory that numpy.fft itself allocates does not grow with the tensors. With `out` given, one transform allocates
less than 2 KiB of Python objects (tracemalloc, NumPy 2.0 to 2.4), under two conditions that this module keeps. First,
an array that is both input and output is passed as the very same view. Second, `norm` is not 'backward' in a forward
transform, because NumPy then passes the scale as an integer and transforms float32 in double precision, through copies.
The C++ code of pocketfft also holds about two complex lines of the transform, FFT size * 32 bytes, which tracemalloc
does not see.
"""

from collections.abc import Iterator
from itertools import count, product
from math import prod, sqrt
from typing import Final

import numpy as np

from ucudnn.backends.cpu.geometry import Array, Box

NORM: Final = "ortho"
"""Normalization of every transform, forward and inverse; `scale` returns the factor that corrects it."""


def good_size(least: int) -> int:
    """Return the first size from `least` on without prime factors above 5, because such sizes are fast."""
    return next(size for size in count(least) if _is_smooth(size))


def _is_smooth(size: int) -> bool:
    for factor in (2, 3, 5):
        while size % factor == 0:
            size //= factor
    return size == 1


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
