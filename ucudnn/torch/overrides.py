"""PyTorch's operators, with kernels of ours in the place of its own while anything is turned on."""

import warnings
from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import Any, final

import torch

from ucudnn.torch.aten_kernels import OPERATORS, AtenKernels, Gradients
from ucudnn.torch.interceptor import Interceptor


@final
class Overrides:
    """Which switch the convolutions of the process go through.

    Attributes:
        switch: that of all convolutions, or None.
        converted: those of modules that were converted, in order.
    """

    def __init__(self) -> None:
        self.switch: Interceptor | None = None
        self.converted: tuple[Interceptor, ...] = ()
        self._lock = RLock()
        self._kept: list[Interceptor] = []
        self._stock: dict[str, AtenKernels] = {}
        self._libraries: dict[str, torch.library.Library] = {}

    def stock(self, device_type: str) -> AtenKernels:
        """Return PyTorch's own kernels for 'cuda' or 'cpu'.

        Raises:
            BackendUnavailableError: if PyTorch is too old.
        """
        key = device_type.upper()
        with self._lock:
            if key not in self._libraries:  # else those that are there now are ours
                self._stock[key] = AtenKernels(key)
            return self._stock[key]

    def use(self, switch: Interceptor | None) -> None:
        """Send all convolutions to a switch, or to PyTorch."""
        with self._lock:
            self._retire()
            self.switch = switch
            self._settle()

    def add(self, switch: Interceptor) -> None:
        """Send those of converted modules to a switch."""
        with self._lock:
            self.converted = (*self.converted, switch)
            self._settle()

    def clear(self) -> None:
        """Send everything to PyTorch, converted modules included."""
        with self._lock:
            self._retire()
            self.switch, self.converted = None, ()
            self._settle()

    def _retire(self) -> None:
        """Keep what captured CUDA graphs still use: they know nothing of handles."""
        for each in (self.switch, *self.converted):
            if each is not None and each not in self._kept and any(h.captured for h in each.handles().values()):
                self._kept.append(each)

    def _settle(self) -> None:
        """Put kernels of ours in the place of PyTorch's for the device types that are turned on, and only there."""
        for library in self._libraries.values():
            library._destroy()
        self._libraries.clear()
        for device_type in {each.device_type for each in (self.switch, *self.converted) if each is not None}:
            key = device_type.upper()
            library = torch.library.Library("aten", "IMPL")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch warns that a kernel is replaced, which is what is wanted
                for name, kernel in zip(OPERATORS, self._chosen(device_type), strict=True):
                    library.impl(name, kernel, key)
            self._libraries[key] = library

    def _chosen(self, device_type: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return what computes for a device: the switch itself, for each layer between costs time."""
        converted = [each for each in self.converted if each.device_type == device_type]
        last: Interceptor | AtenKernels = (
            self.switch if self.switch and self.switch.device_type == device_type else converted[0].stock
        )
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
"""Those of this process."""
