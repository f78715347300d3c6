"""Overrides of PyTorch's operators: our kernels are registered in place of PyTorch's while anything is turned on."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, final

import torch

from ucudnn.backends.fork_locks import LockLevel, new_lock
from ucudnn.torch.calls.aten_kernels import OPERATORS, AtenKernels, Gradients
from ucudnn.torch.calls.interceptor import Interceptor
from ucudnn.torch.gate.call_gate import CallGate
from ucudnn.torch.tuning.auto_interceptor import AutoInterceptor

AnyInterceptor = Interceptor | AutoInterceptor
"""Takes over convolutions: plans each before its first run, or tunes the program while it runs."""


@final
class Overrides:
    """The interceptors through which the convolutions of a process go.

    Attributes:
        interceptor: the one of all convolutions, or None.
        converted: those of modules that were converted, in order.
    """

    def __init__(self) -> None:
        self.interceptor: AnyInterceptor | None = None
        self.converted: tuple[AnyInterceptor, ...] = ()
        self._lock = new_lock(LockLevel.OVERRIDES)
        self._kept: list[AnyInterceptor] = []
        self._aten: dict[str, AtenKernels] = {}
        self._libraries: dict[str, torch.library.Library] = {}
        self._gates: dict[str, CallGate] = {}

    def is_gated(self, device_type: str) -> bool:
        """Return whether the gate stands in front of PyTorch's operators, or of kernels that compute by plans."""
        return device_type.upper() in self._gates

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
            before, self.interceptor = self.interceptor, interceptor
            if isinstance(before, AutoInterceptor):
                before.end()
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

    def refresh(self, *, rules_only: bool = False) -> None:
        """Register the operators that are wanted now; called between the steps of a program.

        Args:
            rules_only: whether gates that are open only get other rules.
        """
        with self._lock:
            if not rules_only:
                self._register()
                return
            for key in [*self._gates]:
                gated = self._gated(key.lower())
                if gated is None or gated.open_gate(again=True) is None:
                    self._gates.pop(key).close()  # the kernels in Python, to which it has passed on, stay

    @contextmanager
    def gates_aside(self) -> Iterator[None]:
        """Return a context in which no gate uses a handle of cuDNN, because Python does, and none is opened."""
        with self._lock, ExitStack() as stack:
            for opened in self._gates.values():
                stack.enter_context(opened.aside())
            yield

    def clear(self) -> None:
        """Send all convolutions to PyTorch, also those of converted modules."""
        with self._lock:
            self._keep_captured()
            for each in (self.interceptor, *self.converted):
                if isinstance(each, AutoInterceptor):
                    each.end()
            self.interceptor, self.converted = None, ()
            self._register()

    def _keep_captured(self) -> None:
        """Keep interceptors whose memory captured CUDA graphs use, because graphs hold addresses only."""
        for each in (self.interceptor, *self.converted):
            if each is not None and each not in self._kept and any(h.captured for h in each.handles().values()):
                self._kept.append(each)

    def _register(self) -> None:
        """Register our kernels for the device types that have an interceptor, and PyTorch's for the others."""
        for opened in self._gates.values():  # first, because they may pass on to kernels in Python
            opened.close()
        self._gates.clear()
        for library in self._libraries.values():
            library._destroy()
        self._libraries.clear()
        for device_type in {each.device_type for each in (self.interceptor, *self.converted) if each is not None}:
            key = device_type.upper()
            gated = self._gated(device_type)
            is_below = gated is not None and gated.is_below_gate
            if gated is not None and is_below:
                gated.opener.keep(device_type)
                self._libraries[key] = self._library(device_type)
            gate = None if gated is None else gated.open_gate()
            if gate is not None:
                self._gates[key] = gate
            elif not is_below:
                self._libraries[key] = self._library(device_type)

    def _library(self, device_type: str) -> torch.library.Library:
        """Register our kernels for a device type."""
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns that a kernel is replaced; we replace it on purpose
            for name, kernel in zip(OPERATORS, self._chosen(device_type), strict=True):
                if kernel is not None:
                    library.impl(name, kernel, device_type.upper())
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
        forward, backward = partial(_forward, converted, last), partial(_backward, converted, last)
        wanted = [each.operators() for each in [*converted, *([current] if current else [])]]
        return forward if any(each for each, _ in wanted) else None, backward if any(
            each for _, each in wanted
        ) else None


def _forward(
    converted: list[AnyInterceptor],
    last: AnyInterceptor | AtenKernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    *arguments: Any,
) -> torch.Tensor:
    chosen = next((each for each in converted if each.names.of(weight)), last)
    return chosen.forward(x, weight, *arguments)


def _backward(
    converted: list[AnyInterceptor],
    last: AnyInterceptor | AtenKernels,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *arguments: Any,
) -> Gradients:
    chosen = next((each for each in converted if each.names.of(weight)), last)
    return chosen.backward(grad, x, weight, *arguments)


process_overrides = Overrides()
"""The overrides of this process: PyTorch has one table of operators for each process."""
