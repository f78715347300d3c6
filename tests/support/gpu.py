"""Problems, operands and workspaces on a GPU, and how exact results must be there."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from tests.support.reference import WRITTEN, reference_convolution, terms
from ucudnn.backends import open_backend
from ucudnn.configuration import MicroConfiguration
from ucudnn.errors import BackendUnavailableError
from ucudnn.problem import DataType, MathMode
from ucudnn.profiles.measurement import Effort

SHAPES = {
    "1-D": dict(channels=8, spatial=(41,), filters=16, kernel=(5,), padding=(2,)),
    "2-D": dict(channels=8, spatial=(17, 14), filters=16, kernel=(3, 3), padding=(1, 1)),
    "2-D odd": dict(channels=3, spatial=(15, 13), filters=5, kernel=(5, 4), padding=(2, 1), stride=(2, 1)),
    "pointwise": dict(channels=16, spatial=(9, 9), filters=32, kernel=(1, 1), stride=(2, 2)),
    "3-D skipping": dict(
        channels=8, spatial=(7, 8, 9), filters=8, kernel=(1, 3, 1), padding=(0, 1, 0), stride=(2, 1, 2)
    ),
    "dilated": dict(channels=8, spatial=(19, 18), filters=8, kernel=(3, 3), padding=(2, 3), dilation=(2, 3)),
    "grouped": dict(channels=16, spatial=(12, 12), filters=32, kernel=(3, 3), padding=(1, 1), groups=4),
    "depth-wise": dict(channels=16, spatial=(14, 14), filters=16, kernel=(3, 3), padding=(1, 1), groups=16),
    "3-D": dict(channels=8, spatial=(6, 9, 8), filters=8, kernel=(3, 3, 3), padding=(1, 1, 1)),
    "3-D grouped": dict(channels=8, spatial=(5, 7, 6), filters=8, kernel=(3, 1, 3), groups=2, dilation=(1, 1, 2)),
}


MODES = [(dtype, MathMode.TF32) for dtype in DataType] + [(DataType.FLOAT32, MathMode.FMA)]


GUARD_BYTES = 512
QUICK = Effort(warmup=1, repeats=1, time_limit_ms=5)


TOLERANCE = {DataType.FLOAT16: 2e-3, DataType.BFLOAT16: 1e-2, DataType.FLOAT64: 1e-12, DataType.FLOAT32: 2e-3}
"""Relative L2 distance from float64; float32 as TF32 multiplies it."""


PLAIN = {"IMPLICIT_GEMM", "IMPLICIT_PRECOMP_GEMM", "GEMM", "FFT", "FFT_TILING", "ALGO_0", "ALGO_1", "ALGO_3"}
"""Legacy algorithms that are no Winograd, whose transforms amplify rounding."""


def tolerance(problem, algorithm=""):
    """Return the relative L2 distance from float64 that is allowed.

    Sums of n random terms, one after another in float32, are off by about u sqrt(n) / 4 (u = 2^-24; Higham and Mary,
    2019): 1e-6 at n = 4000.
    """
    if problem.dtype is DataType.FLOAT32 and problem.math is MathMode.FMA:
        return max(1e-6, 2**-25 * terms(problem) ** 0.5) if algorithm in PLAIN else 1e-4
    return TOLERANCE[problem.dtype]


@cache
def opened(candidates):
    return open_backend("cudnn", candidates=candidates)


def open_or_skip(candidates):
    try:
        return opened(candidates)
    except BackendUnavailableError as error:
        pytest.skip(str(error)[:120])


def element_type(dtype):
    if dtype is DataType.BFLOAT16:
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype(dtype.value)


def measured(cudnn, problem, size=None):
    """Return the algorithms of a problem that run at a micro-batch size and pass their check."""
    size = size or problem.batch
    with cudnn.bench(problem) as bench:
        return [each for each in cudnn.algorithms(problem.part(size)) if bench.measure(size, each, QUICK).measured]


def micro(size, algorithm):
    """Return a micro-batch of a size by an algorithm, whose time nobody asks for."""
    return MicroConfiguration(
        size=size, algorithm=algorithm.name, time_ms=1.0, workspace_bytes=algorithm.workspace_bytes
    )


def captured(stream, run):
    """Return the graph of what a function launches on a stream."""
    with stream:
        stream.begin_capture()
        run()
        return stream.end_capture()


@dataclass
class Operands:
    """x, w and y on the GPU in the problem's layout, with gaps between samples, and what they hold in float64."""

    problem: object
    memory: dict
    views: dict
    exact: dict

    @classmethod
    def random(cls, cupy, problem, seed=None):
        """Draw fresh numbers in [-0.5, 0.5)."""
        rng = np.random.default_rng(seed)
        dtype = element_type(problem.dtype)
        shapes = {"x": problem.x_shape, "w": problem.w_shape, "y": problem.y_shape}
        rows = {"x": problem.x_batch_stride, "w": problem.w_sample, "y": problem.y_batch_stride}
        memory, views, exact = {}, {}, {}
        for name, shape in shapes.items():
            # Numbers of 53 bits for float64, whose products float64 must round; those of float32 it would not.
            drawn = np.float64 if problem.dtype is DataType.FLOAT64 else np.float32
            host = (rng.random((shape[0], rows[name]), dtype=drawn) - drawn(0.5)).astype(dtype)
            memory[name] = cupy.asarray(host)
            inner = int(np.prod(shape[1:]))
            views[name] = memory[name][:, :inner].reshape(shape) if inner == rows[name] else memory[name][:, :inner]
            value = cupy.asarray(host[:, :inner].astype(np.float64).reshape(shape))
            exact[name] = cupy.moveaxis(value, -1, 1) if problem.layout.channels_last else value
        return cls(problem, memory, views, exact)

    @property
    def written(self):
        return WRITTEN[self.problem.operation]

    def addresses(self):
        return tuple(self.memory[name].data.ptr for name in "xwy")

    def expected(self, alpha=1.0, beta=0.0):
        """Return alpha * conv + beta * out in float64, from what the operands held at first."""
        out = alpha * reference_convolution(self.problem, *(self.exact[name] for name in "xwy"))
        return out + beta * self.exact[self.written] if beta else out

    def poison(self):
        """Make sure that all of the output must be written."""
        self.memory[self.written].fill(float("nan"))

    def restore(self, cupy):
        """Give the output its first contents again."""
        name = self.written
        exact = self.exact[name]
        value = cupy.moveaxis(exact, 1, -1) if self.problem.layout.channels_last else exact
        flat = value.reshape(value.shape[0], -1)
        self.memory[name][:, : flat.shape[1]] = flat.astype(self.memory[name].dtype)

    def prepare(self, cupy, beta):
        """Poison an output that is not read, or give it its first contents again."""
        self.restore(cupy) if beta else self.poison()

    def result(self, cupy):
        """Return the output in float64, channels first."""
        name = self.written
        shape = {"x": self.problem.x_shape, "w": self.problem.w_shape, "y": self.problem.y_shape}[name]
        flat = self.memory[name][:, : int(np.prod(shape[1:]))].astype(np.float64)
        value = flat.reshape(shape)
        return cupy.moveaxis(value, -1, 1) if self.problem.layout.channels_last else value

    def error(self, cupy, expected):
        """Return the relative L2 distance of the output; NaN where anything was left unwritten."""
        return float(cupy.linalg.norm(self.result(cupy) - expected) / cupy.linalg.norm(expected))


class Guarded:
    """A workspace between guard bytes, all of it poisoned."""

    def __init__(self, cupy, backend, size_bytes, offset=0):
        self._cupy = cupy
        self._size = size_bytes
        self._before = GUARD_BYTES + offset
        self._memory = cupy.full(self._before + size_bytes + GUARD_BYTES, 0xFF, cupy.uint8)
        buffer_type = type(backend.allocate(0))
        self.buffer = buffer_type(self._memory.data.ptr + self._before, size_bytes) if size_bytes else buffer_type(0, 0)

    def intact(self):
        before, after = self._memory[: self._before], self._memory[self._before + self._size :]
        return bool((before == 0xFF).all()) and bool((after == 0xFF).all())
