"""The convolution algorithms of cuDNN 4 to 7: which problems each one computes, its arithmetic and its workspace.

The workspaces are those that cuDNN reports: FFT in tiles of 32 x 32 and unfused Winograd need these bytes exactly where
an image is one tile. The arithmetic is that of the methods, so that a device's peak rate and one efficiency for each
algorithm give the time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, prod

from ucudnn.problem import ConvolutionProblem, Operation

_TILES = (16, 32)  # sides of an FFT's tiles
_COMPLEX = 8  # bytes of a complex number


@dataclass(frozen=True, slots=True)
class AlgorithmWork:
    """What an algorithm does to compute a problem.

    Attributes:
        flops: floating-point operations.
        traffic: bytes that it moves beyond the three tensors, each once.
    """

    flops: int
    traffic: int
    workspace_bytes: int


def implicit_gemm(problem: ConvolutionProblem) -> AlgorithmWork:
    """Matrix product whose left side is read from x where it lies, without workspace."""
    return AlgorithmWork(2 * problem.multiplications * _waste(problem), 0, 0)


def precomputed_gemm(problem: ConvolutionProblem) -> AlgorithmWork:
    """Matrix product whose left side is read from x by a table of offsets, one for each row."""
    return AlgorithmWork(2 * problem.multiplications * _waste(problem), 0, 4 * problem.w_sample)


def fft(problem: ConvolutionProblem) -> AlgorithmWork | None:
    """Products of spectra, in tiles of 16 x 16 or 32 x 32.

    It computes planes at stride 1 with filters of at most half a tile. Spectra are written and read by the transforms
    and by a transposition before the products.
    """
    if len(problem.spatial) != 2 or not _is_dense(problem) or not 1 < max(problem.kernel) <= _TILES[-1] // 2:
        return None
    sizes = [(size, taps) for size, taps in zip(problem.output, problem.kernel, strict=True)]
    tile = next((tile for tile in _TILES if all(size + taps - 1 <= tile for size, taps in sizes)), _TILES[-1])
    tiles = prod(ceil(size / (tile - taps + 1)) for size, taps in sizes)
    spectrum = tile * (tile // 2 + 1)
    maps = problem.batch * (problem.channels + problem.filters)
    weights = problem.channels * problem.filters
    products = 8 * spectrum * tiles * problem.batch * weights  # a complex product and sum are 8 operations
    spectra = (maps * tiles + weights) * spectrum * _COMPLEX
    return AlgorithmWork(products, 4 * spectra, (maps * min(tiles, 2) + weights) * spectrum * _COMPLEX)


def winograd(problem: ConvolutionProblem) -> AlgorithmWork | None:
    """Winograd's F(2 x 2, 3 x 3) in one kernel, which reads transformed filters; not for gradients of filters."""
    if not _is_dense(problem) or problem.kernel != (3, 3) or problem.operation is Operation.BACKWARD_FILTER:
        return None
    filters = 16 * problem.dtype.itemsize * problem.channels * problem.filters
    return AlgorithmWork(2 * problem.multiplications * 16 // 36, 2 * filters, filters)


def winograd_nonfused(problem: ConvolutionProblem) -> AlgorithmWork | None:
    """Winograd's F(4 x 4, 3 x 3), whose transformed tiles go through memory."""
    if not _is_dense(problem) or problem.kernel != (3, 3):
        return None
    tiles = prod(ceil(size / 4) for size in problem.output)
    maps = problem.batch * (problem.channels + problem.filters) * tiles
    weights = problem.channels * problem.filters
    transformed = 36 * problem.dtype.itemsize * (maps + weights)
    return AlgorithmWork(2 * 36 * tiles * problem.batch * weights, 2 * transformed, transformed)


METHODS: Mapping[str, Callable[[ConvolutionProblem], AlgorithmWork | None]] = {
    "implicit_gemm": implicit_gemm,
    "precomputed_gemm": precomputed_gemm,
    "fft": fft,
    "winograd": winograd,
    "winograd_nonfused": winograd_nonfused,
}
"""Algorithms by the names that device profiles use; None says that one cannot compute a problem."""


def _is_dense(problem: ConvolutionProblem) -> bool:
    ones = (1,) * len(problem.spatial)
    return problem.stride == ones and problem.dilation == ones and problem.groups == 1


def _waste(problem: ConvolutionProblem) -> int:
    """Return how many times as much is multiplied as is needed: zeros between the gradients of a strided layer."""
    return max(problem.stride) if problem.operation is Operation.BACKWARD_DATA else 1
