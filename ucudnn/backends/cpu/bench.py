"""Measures algorithms on this machine's CPU, on random operands of one mini-batch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from time import perf_counter
from typing import final

from ucudnn.backends.base import ACCUMULATE, OVERWRITE, Offset, PreparedCall
from ucudnn.backends.bench import Bench
from ucudnn.backends.cpu.geometry import Array
from ucudnn.backends.cpu.operands import random_operands
from ucudnn.backends.sampling import sample, worthless
from ucudnn.errors import UcudnnError
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.profiles.measurement import Algorithm, Effort, Measurement, MeasurementStatus
from ucudnn.slabs import Slab, pieces_of


@final
class CpuBench(Bench):
    """Operands of one mini-batch with values in [-0.5, 0.5), in the problem's layout and batch strides."""

    def __init__(
        self,
        problem: ConvolutionProblem,
        prepare: Callable[[ConvolutionProblem, str], PreparedCall],
        allocate: Callable[[int], Array],
    ) -> None:
        """Make the operands.

        Args:
            problem: the mini-batch.
            prepare: the backend's `prepare`.
            allocate: the backend's `allocate`.
        """
        self._problem = problem
        self._prepare = prepare
        self._allocate = allocate
        self._operands = random_operands(problem)

    def measure(
        self, size: int, algorithm: Algorithm, effort: Effort, worth_ms: float = inf, slabs: Sequence[Slab] = ()
    ) -> Measurement:
        """Measure an algorithm on micro-batches of `size` samples that begin at samples 0, size, 2 * size, ...

        There are no calls to warm up: they would double long benchmarks, and all memory has been touched before.
        """
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
            samples_ms = sample(launch, offsets, replace(effort, warmup=0), perf_counter, worth_ms)
        except MemoryError as error:
            return Measurement.failed(algorithm, f"MemoryError: {error}", MeasurementStatus.HINDERED)
        except UcudnnError as error:
            return Measurement.failed(algorithm, f"{type(error).__name__}: {error}")
        complete = not worthless(samples_ms, worth_ms)
        return Measurement.of(algorithm, samples_ms, complete=complete)
