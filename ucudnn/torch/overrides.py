"""Overrides of PyTorch's operators: our kernels are registered in place of PyTorch's while anything is turned on."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch

from ucudnn.backends.fork_locks import LockLevel, new_lock
from ucudnn.torch.aten_kernels import OPERATORS, AtenKernels, Gradients
from ucudnn.torch.interceptor import Interceptor


@final
class Overrides:
    """The interceptors through which the convolutions of a process go.

    Attributes:
        interceptor: the one of all convolutions, or None.
        converted: those of modules that were converted, in order.
    """

    def __init__(self) -> None:
        self.interceptor: Interceptor | None = None
        self.converted: tuple[Interceptor, ...] = ()
        self._lock = new_lock(LockLevel.OVERRIDES)
        self._kept: list[Interceptor] = []
        self._aten: dict[str, AtenKernels] = {}
        self._libraries: dict[str, torch.library.Library] = {}

    def aten_kernels(self, device_type: str) -> AtenKernels:
        """Return PyTorch's own kernels for 'cuda' or 'cpu'.

        Raises:
            BackendUnavailableError: if PyTorch is too old.
        """
        key = device_type.upper()
        with self._lock:
            if key not in self._libraries:  # otherwise, the registered kernels are ours
                self._aten[key] = AtenKernels(key)
            return self._aten[key]

    def use(self, interceptor: Interceptor | None) -> None:
        """Send all convolutions to an interceptor, or to PyTorch; those of converted modules stay where they are."""
        with self._lock:
            self._keep_captured()
            self.interceptor = interceptor
            self._register()

    def add(self, interceptor: Interceptor) -> None:
        """Send the convolutions of a converted module to an interceptor."""
        with self._lock:
            self.converted = (*self.converted, interceptor)
            self._register()

    def clear(self) -> None:
        """Send all convolutions to PyTorch, also those of converted modules."""
        with self._lock:
            self._keep_captured()
            self.interceptor, self.converted = None, ()
            self._register()

    def _keep_captured(self) -> None:
        """Keep interceptors whose memory captured CUDA graphs use, because graphs hold addresses only."""
        for each in (self.interceptor, *self.converted):
            if each is not None and each not in self._kept and any(h.captured for h in each.handles().values()):
                self._kept.append(each)

    def _register(self) -> None:
        """Register our kernels for the device types that have an interceptor, and PyTorch's for the others."""
        for library in self._libraries.values():
            library._destroy()
        self._libraries.clear()
        for device_type in {each.device_type for each in (self.interceptor, *self.converted) if each is not None}:
            key = device_type.upper()
            library = torch.library.Library("aten", "IMPL")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch warns that a kernel is replaced, which is what is wanted
                for name, kernel in zip(OPERATORS, self._chosen(device_type), strict=True):
                    library.impl(name, kernel, key)
            self._libraries[key] = library

    def _chosen(self, device_type: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return what computes on a device type: methods of the interceptor, because a wrapper would take time."""
        converted = [each for each in self.converted if each.device_type == device_type]
        current = self.interceptor
        last = current if current and current.device_type == device_type else converted[0].aten
        if not converted:
            return last.forward, last.backward
        return partial(_forward, converted, last), partial(_backward, converted, last)


def _forward(
    converted: list[Interceptor],
    last: Interceptor | AtenKernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    *arguments: Any,
) -> torch.Tensor:
    chosen = next((each for each in converted if each.names.of(weight)), last)
    return chosen.forward(x, weight, *arguments)


def _backward(
    converted: list[Interceptor],
    last: Interceptor | AtenKernels,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *arguments: Any,
) -> Gradients:
    chosen = next((each for each in converted if each.names.of(weight)), last)
    return chosen.backward(grad, x, weight, *arguments)


process_overrides = Overrides()
"""The overrides of this process: PyTorch has one table of operators for each process."""
