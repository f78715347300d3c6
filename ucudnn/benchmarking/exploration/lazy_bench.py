"""A bench that is opened by its first measurement, and whose measurements go into the state of an exploration."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from math import inf
from typing import final

from ucudnn.backends.bench import Bench, Following
from ucudnn.benchmarking.exploration.compile_filter import FAR
from ucudnn.benchmarking.exploration.state import Context, State
from ucudnn.profiles.measurement import Algorithm, Effort, Measurement, MeasurementStatus
from ucudnn.slabs import Slab, pieces_of

_LOG = logging.getLogger(__name__)


@final
class LazyBench:
    """Measures the micro-batches and slabs of one request. Its end frees the operands, and saves the measurements.

    Args:
        context: the request, and the backend that measures.
        state: what is measured is added to it.
    """

    def __init__(self, context: Context, state: State) -> None:
        self._context = context
        self._state = state
        self._stack = ExitStack()
        self._bench: Bench | None = None

    def __enter__(self) -> "LazyBench":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bench = None
        self._stack.close()
        storage, unsaved = self._context.storage, self._state.unsaved
        if storage is not None and unsaved:
            storage.save(unsaved)

    def announce(self, size: int, algorithm: Algorithm) -> None:
        """Let a compiler begin with an algorithm that may be measured soon."""
        if self._bench is not None:
            self._bench.announce(size, algorithm)

    def measure(
        self,
        size: int,
        algorithm: Algorithm,
        effort: Effort,
        worth_ms: float,
        slabs: Sequence[Slab] = (),
        following: Following | None = None,
    ) -> Measurement:
        """Measure an algorithm on a micro-batch, or on slabs of it that are the same problem.

        Args:
            size: micro-batch size.
            algorithm: what to measure.
            effort: how much time goes into the measurement.
            worth_ms: the time from which on it does not matter how slow the algorithm is.
            slabs: slabs of the micro-batch; () for all of it.
            following: gives what is measured next.

        Raises:
            MemoryError: if there is no room for the operands of one sample.
            BackendError: if nothing can be measured now.
        """
        state, problem = self._state, self._context.request.problem
        if self._bench is None:
            self._bench = self._stack.enter_context(self._context.backend.bench(problem))
        if following is not None:
            self._bench.look_ahead(following)
        found = self._bench.measure(size, algorithm, effort, worth_ms, slabs)
        part = pieces_of(problem, size, slabs)[0].problem
        state.measured += 1
        state.results.put(part, found)
        if found.measured and algorithm.compiles and worth_ms < inf and state.has_uncompiled():
            self._judge(algorithm, found.time_ms / worth_ms, whole=not slabs)
        if not found.measured:
            where = f"{f'slabs of {slabs[0].rows} rows of ' if slabs else ''}micro-batch {size} of {problem}"
            _LOG.info("%s at %s failed: %s", algorithm.name, where, found.reason)
        if found.status is MeasurementStatus.HINDERED:
            state.hindered = True
            if found.reason.startswith("MemoryError"):
                state.room_bytes = min(state.room_bytes, algorithm.workspace_bytes or inf)
        else:
            state.unsaved.append((part, found))
        return found

    def _judge(self, algorithm: Algorithm, ratio: float, *, whole: bool) -> None:
        """Tell the compile filter how slow an algorithm was; that it was far behind only if the limit allowed it."""
        request = self._context.request
        fits = algorithm.workspace_bytes == 0 or self._state.fits(request.problem.batch, algorithm.name)
        if ratio < FAR or (whole and fits):
            self._context.compile_filter.add(request, algorithm.name, ratio)
