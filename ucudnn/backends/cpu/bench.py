"""Measures algorithms on this machine's CPU, on random operands of one mini-batch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, prod
from time import perf_counter
from typing import Any, final

import numpy as np

from ucudnn.arrays import BiasedFilters
from ucudnn.backends.base import ACCUMULATE, OVERWRITE, Offset, PreparedCall
from ucudnn.backends.bench import Bench, sample, worthless
from ucudnn.backends.cpu.geometry import Array
from ucudnn.errors import UcudnnError
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.profiles.measurement import Algorithm, Effort, Measurement, MeasurementStatus
from ucudnn.slabs import Slab, pieces_of

SEED = 20180907
"""Seed of the random operands, which are the same in every run."""


@final
class CpuBench(Bench):
    """Operands of one mini-batch; `prepare` and `allocate` are the backend's."""

    def __init__(
        self,
        problem: ConvolutionProblem,
        prepare: Callable[[ConvolutionProblem, str], PreparedCall],
        allocate: Callable[[int], Array],
    ) -> None:
        self._problem = problem
        self._prepare = prepare
        self._allocate = allocate
        self._operands = random_operands(problem)

    def measure(
        self, size: int, algorithm: Algorithm, effort: Effort, worth_ms: float = inf, slabs: Sequence[Slab] = ()
    ) -> Measurement:
        pieces = pieces_of(self._problem, size, slabs)
        starts = range(0, self._problem.batch - size + 1, size)
        if not starts:
            return Measurement.failed(
                algorithm, f"a micro-batch of {size} does not fit into the mini-batch of {self._problem.batch}"
            )
        scaling = ACCUMULATE if self._problem.operation is Operation.BACKWARD_FILTER else OVERWRITE
        try:
            call = self._prepare(pieces[0].problem, algorithm.name)
            workspace = self._allocate(algorithm.workspace_bytes)
            workspace.fill(0)  # the first access to memory makes the system map it, which may take longer than a call

            def launch(offset: Offset) -> None:
                call.launch(*self._operands, workspace, offset, scaling)

            offsets = [Offset(start, piece.first_rows) for start in starts for piece in pieces]
            # Calls to warm up would double long benchmarks, and all memory has been touched before.
            samples_ms = sample(launch, offsets, replace(effort, warmup=0), perf_counter, worth_ms)
        except MemoryError as error:
            return Measurement.failed(algorithm, f"MemoryError: {error}", MeasurementStatus.HINDERED)
        except UcudnnError as error:
            return Measurement.failed(algorithm, f"{type(error).__name__}: {error}")
        complete = not worthless(samples_ms, worth_ms)
        return Measurement.of(algorithm, samples_ms, complete=complete)


def random_operands(problem: ConvolutionProblem) -> tuple[Array, Array | BiasedFilters, Array]:
    """Return x, w and y with values in [-0.5, 0.5), in the problem's layout and with its batch strides."""
    random = np.random.default_rng(SEED)
    dtype = np.dtype(problem.dtype.value)
    x = _operand(random, problem.x_shape, problem.x_batch_stride, dtype)
    w = _operand(random, problem.w_shape, prod(problem.w_shape[1:]), np.dtype(problem.w_dtype.value))
    y = _operand(random, problem.y_shape, problem.y_batch_stride, dtype)
    bias = _operand(random, (1, problem.filters), problem.filters, dtype)[0] if problem.biased else None
    return x, w if bias is None else BiasedFilters(w, bias), y


def _operand(random: np.random.Generator, shape: tuple[int, ...], stride: int, dtype: np.dtype[Any]) -> Array:
    drawn = dtype if dtype.itemsize > 2 else np.dtype(np.float32)  # no generator draws 16 bits
    rows = random.random((shape[0], stride), drawn)
    rows -= 0.5
    return rows.astype(dtype, copy=False)[:, : prod(shape[1:])].reshape(shape)
