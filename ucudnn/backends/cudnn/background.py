"""What cuDNN does in background threads while the GPU measures: ask heuristics, and compile engines."""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from threading import local
from typing import final

from ucudnn.backends.base import Algorithm
from ucudnn.backends.cudnn.descriptor import Descriptor
from ucudnn.backends.cudnn.driver import RELAXED, exchange_capture_mode
from ucudnn.backends.cudnn.gpu import Gpu
from ucudnn.backends.cudnn.graph import OperationGraph, graph_algorithms, listing_beta
from ucudnn.backends.cudnn.library import Library, OwnHandle
from ucudnn.problem import MOST_ALIGNMENT, ConvolutionProblem

_MOST_THREADS = 8
_MOST_KEPT = 64


@final
class Background:
    """Threads with cuDNN handles of their own, for a handle serves one thread at a time.

    cuDNN compiles an engine again once no plan of it is left, so some plans are kept.

    Args:
        library: cuDNN.
        device: the GPU.
    """

    def __init__(self, library: Library, device: Gpu) -> None:
        self._library = library
        self._device = device
        self._local = local()
        self._threads: ThreadPoolExecutor | None = None
        self._lists: dict[ConvolutionProblem, Future[list[Algorithm]]] = {}
        self._plans: dict[tuple[ConvolutionProblem, str], Future[Descriptor | None]] = {}

    def begin(self, parts: Sequence[ConvolutionProblem]) -> None:
        """Begin to list what computes micro-batches of a problem, and to compile what needs it.

        Args:
            parts: the problem at descending sizes; compilation begins at the second.
        """
        for index, part in enumerate(parts):
            if part not in self._lists:
                self._lists[part] = self._submit_list(part, compile_all=index == min(1, len(parts) - 1))

    def settle(self) -> None:
        """Wait until all that was begun is listed: threads that run Python disturb measurements, compilers do not."""
        wait(list(self._lists.values()))

    def rest(self) -> None:
        """Drop what was begun but does not run yet, and wait for what runs."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        self._threads = None
        self._lists.clear()
        self._plans.clear()

    def listed(self, part: ConvolutionProblem) -> list[Algorithm] | None:
        """Return a list that was begun, once it is there; None where none was."""
        future = self._lists.pop(part, None)
        try:
            return None if future is None else future.result()
        except self._device.failures:
            return None  # whoever lists it now will hear why

    def compiled(self, part: ConvolutionProblem, name: str) -> None:
        """Wait until an engine that is being compiled for a problem is ready, whether or not that worked."""
        future = self._plans.get((_shape(part), name))
        if future is not None:
            future.result()

    def _submit_list(self, part: ConvolutionProblem, *, compile_all: bool) -> Future[list[Algorithm]]:
        def run() -> list[Algorithm]:
            with self._device.use():
                found = graph_algorithms(self._library, self._handle(), part)
            for each in found:
                if each.compiles and compile_all:
                    self._submit_plan(part, each.name)
            return found

        return self._pool().submit(run)

    def _submit_plan(self, part: ConvolutionProblem, name: str) -> None:
        if len(self._plans) >= _MOST_KEPT:
            self._plans.pop(next(iter(self._plans)))
        self._plans[_shape(part), name] = self._pool().submit(self._build, part, name)

    def _build(self, part: ConvolutionProblem, name: str) -> Descriptor | None:
        try:
            with self._device.use():
                beta = listing_beta(part)
                return OperationGraph(self._library, self._handle(), part, alpha=1.0, beta=beta).plan(name)
        except self._device.failures:
            return None  # whoever wants to measure it will hear why

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            count = min(_MOST_THREADS, os.cpu_count() or 1)
            self._threads = ThreadPoolExecutor(count, thread_name_prefix="ucudnn", initializer=_relax)
        return self._threads

    def _handle(self) -> int:
        if not hasattr(self._local, "handle"):
            self._local.handle = OwnHandle(self._library)
        own: OwnHandle = self._local.handle
        return own.address


def _relax() -> None:
    """Let what is still compiling when the program captures a CUDA graph not end that capture."""
    with suppress(OSError):  # without a driver there are no captures
        exchange_capture_mode(RELAXED)


def _shape(part: ConvolutionProblem) -> ConvolutionProblem:
    return replace(part, batch=1, alignment=MOST_ALIGNMENT)
