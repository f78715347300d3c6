"""Overrides of PyTorch's operators: our kernels are registered in place of PyTorch's while anything is turned on."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch

from ucudnn.backends.fork_locks import LockLevel, new_lock
from ucudnn.torch.calls.aten_kernels import OPERATORS, AtenKernels, Gradients
from ucudnn.torch.calls.interceptor import Interceptor
from ucudnn.torch.device.compilation import never_compiled
from ucudnn.torch.gate.call_gate import CallGate
from ucudnn.torch.tuning.auto_interceptor import AutoInterceptor

AnyInterceptor = Interceptor | AutoInterceptor
"""Takes over convolutions: plans each before its first run, or tunes the program while it runs."""


@final
class Overrides:
    """The interceptors through which the convolutions of a process go."""

    def __init__(self) -> None:
        self.interceptor: AnyInterceptor | None = None
        self.converted: tuple[AnyInterceptor, ...] = ()
        self._lock = new_lock(LockLevel.OVERRIDES)
        self._kept: list[AnyInterceptor] = []
        self._aten: dict[str, AtenKernels] = {}
        self._libraries: dict[str, torch.library.Library] = {}
        self._gates: dict[str, CallGate] = {}

    def is_gated(self, device_type: str) -> bool:
        """Return whether the gate stands in front of PyTorch's operators, and has rules."""
        gate = self._gates.get(device_type.upper())
        return gate is not None and gate.is_open

    def aten_kernels(self, device_type: str) -> AtenKernels:
        """Return PyTorch's own kernels for 'cuda' or 'cpu'.

        Raises:
            BackendUnavailableError: if PyTorch is too old.
        """
        key = device_type.upper()
        with self._lock:
            if key not in self._libraries and key not in self._gates:  # otherwise, the registered kernels are ours
                self._aten[key] = AtenKernels(key)
            return self._aten[key]

    def use(self, interceptor: AnyInterceptor | None) -> None:
        """Send all convolutions to an interceptor, or to PyTorch; those of converted modules stay where they are."""
        with self._lock:
            self._keep_captured()
            before, self.interceptor = self.interceptor, None
            if isinstance(before, AutoInterceptor):
                self._register()  # first, because the gate may call it
                before.end()
            self.interceptor = interceptor
            if isinstance(interceptor, AutoInterceptor):
                interceptor.begin()
            self._register()

    def add(self, interceptor: AnyInterceptor) -> None:
        """Send the convolutions of a converted module to an interceptor."""
        with self._lock:
            self.converted = (*self.converted, interceptor)
            if isinstance(interceptor, AutoInterceptor):
                interceptor.begin()
            self._register()

    def refresh(self) -> None:
        """Register what is wanted now; called between the steps of a program."""
        with self._lock:
            self._register()

    @contextmanager
    def without_gates(self) -> Iterator[None]:
        """Return a context in which no gate uses a handle of cuDNN, because Python does, and none is opened."""
        with self._lock, ExitStack() as stack:
            for opened in self._gates.values():
                stack.enter_context(opened.in_python())
            yield

    def clear(self) -> None:
        """Send all convolutions to PyTorch, also those of converted modules."""
        with self._lock:
            self._keep_captured()
            ended = self.interceptor, *self.converted
            self.interceptor, self.converted = None, ()
            self._register()
            for each in ended:
                if isinstance(each, AutoInterceptor):
                    each.end()

    def _keep_captured(self) -> None:
        """Keep interceptors whose memory captured CUDA graphs use, because graphs hold addresses only."""
        for each in (self.interceptor, *self.converted):
            if each is not None and each not in self._kept and any(h.captured for h in each.handles().values()):
                self._kept.append(each)

    def _register(self) -> None:
        """Register the gate or our kernels for the device types that have an interceptor, and PyTorch's for the others.

        A gate that stands already only gets another table.
        """
        taken = {each.device_type for each in (self.interceptor, *self.converted) if each is not None}
        for device_type in taken.union(key.lower() for key in (*self._libraries, *self._gates)):
            key, gated = device_type.upper(), self._gated(device_type)
            gate, before = None if gated is None else gated.router.gate, self._gates.pop(key, None)
            if before is not None and before is not gate:
                before.close()
            library = self._libraries.pop(key, None)
            if library is not None:
                library._destroy()
            if gated is not None and gate is not None and gated.use_gate():
                self._gates[key] = gate
            elif device_type in taken:
                self._libraries[key] = self._library(device_type)

    def _library(self, device_type: str) -> torch.library.Library:
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns that a kernel is replaced; we replace it on purpose
            for name, kernel in zip(OPERATORS, self._chosen(device_type), strict=True):
                if kernel is not None:
                    library.impl(name, never_compiled(kernel), device_type.upper())
        return library

    def _gated(self, device_type: str) -> AutoInterceptor | None:
        """Return the interceptor that may put a gate in front of the operators; None if none may."""
        current = self.interceptor
        if not isinstance(current, AutoInterceptor) or current.device_type != device_type:
            return None
        if any(each.device_type == device_type for each in self.converted):  # the gate does not know modules
            return None
        return current

    def _chosen(self, device_type: str) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
        """Return what computes on a device type; None where PyTorch's own operator stays."""
        converted = [each for each in self.converted if each.device_type == device_type]
        current = self.interceptor if self.interceptor and self.interceptor.device_type == device_type else None
        if current is not None and not converted:
            return current.operators()
        last = converted[0].aten if current is None else current

        def owner(weight: torch.Tensor) -> AnyInterceptor | AtenKernels:
            return next((each for each in converted if each.names.of(weight)), last)

        def forward(*call: Any) -> torch.Tensor:
            return owner(call[1]).forward(*call)

        def backward(*call: Any) -> Gradients:
            return owner(call[2]).backward(*call)

        wanted = [each.operators() for each in (*converted, *([current] if current else []))]
        computed = [any(each[at] for each in wanted) for at in range(2)]
        return forward if computed[0] else None, backward if computed[1] else None


process_overrides = Overrides()
"""The overrides of this process: PyTorch has one table of operators for each process."""
