"""FFT and FFT_TILING: convolution as a product of spectra, either of whole tensors or of tiles of a fixed size."""

from typing import final

from ucudnn.backends.cpu.algorithm import CpuAlgorithm
from ucudnn.backends.cpu.fft_tiles import FftFiltering, FftGradient, tile_count
from ucudnn.backends.cpu.fft_transforms import good_size
from ucudnn.backends.cpu.geometry import Array
from ucudnn.problem import ConvolutionProblem, Operation

SMALL_TILE, LARGE_TILE = 16, 32
"""FFT sizes of FFT_TILING in each dimension: small for kernels up to half of it, else large."""


def _is_plain(problem: ConvolutionProblem) -> bool:
    return set(problem.stride) == set(problem.dilation) == {1}


def _engine(problem: ConvolutionProblem, fft: tuple[int, ...], steps: tuple[int, ...]) -> FftFiltering | FftGradient:
    gradient = problem.operation is Operation.BACKWARD_FILTER
    return FftGradient(problem, fft, steps) if gradient else FftFiltering(problem, fft, steps)


def _tile_size(problem: ConvolutionProblem) -> int:
    return SMALL_TILE if max(problem.kernel) <= SMALL_TILE // 2 else LARGE_TILE


def _steps(problem: ConvolutionProblem) -> tuple[int, ...]:
    return tuple(_tile_size(problem) - kernel + 1 for kernel in problem.kernel)


@final
class Fft(CpuAlgorithm):
    """Transforms whole samples. FFT sizes are 5-smooth and hold the tensors with the padding of one side."""

    def __init__(self, problem: ConvolutionProblem) -> None:
        # x may wrap around, because the padding before it and the padding after it are the same zeros.
        fft = tuple(
            good_size(max(size + max(pads), output, kernel))
            for size, pads, output, kernel in zip(
                problem.spatial, problem.paddings, problem.output, problem.kernel, strict=True
            )
        )
        whole = problem.spatial if problem.operation is Operation.BACKWARD_DATA else problem.output
        self._engine = _engine(problem, fft, whole)

    @staticmethod
    def applies(problem: ConvolutionProblem) -> bool:
        """Return whether stride and dilation are 1."""
        return _is_plain(problem)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the spectra of x, w and y, or more if a row of the real result is larger than what it overlays."""
        return self._engine.workspace_bytes

    def compute(self, x: Array, w: Array, y: Array, *, alpha: float, beta: float, workspace: Array) -> None:
        """Compute through spectra of the whole micro-batch; see CpuAlgorithm.compute."""
        self._engine.compute(x, w, y, alpha, beta, workspace)


@final
class FftTiling(CpuAlgorithm):
    """Transforms tiles by overlap-save: 16 positions in each dimension, or 32 if a kernel is larger than 8."""

    def __init__(self, problem: ConvolutionProblem) -> None:
        fft = (_tile_size(problem),) * len(problem.kernel)
        self._engine = _engine(problem, fft, _steps(problem))

    @staticmethod
    def applies(problem: ConvolutionProblem) -> bool:
        """Return whether stride and dilation are 1, kernels at most 16, and there is more than one tile."""
        fits = _is_plain(problem) and max(problem.kernel) <= LARGE_TILE // 2
        return fits and tile_count(problem, _steps(problem)) > 1

    @property
    def workspace_bytes(self) -> int:
        """Bytes of one tile's spectra for the whole micro-batch, and of the filters' spectrum."""
        return self._engine.workspace_bytes

    def compute(self, x: Array, w: Array, y: Array, *, alpha: float, beta: float, workspace: Array) -> None:
        """Compute tile by tile; see CpuAlgorithm.compute."""
        self._engine.compute(x, w, y, alpha, beta, workspace)
