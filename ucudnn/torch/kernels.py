"""PyTorch's operators, with kernels of ours in the place of its own while anything is turned on."""

import warnings
from collections.abc import Sequence
from functools import partial
from threading import RLock
from typing import Any, final

import torch

from ucudnn.errors import BackendUnavailableError
from ucudnn.torch.switch import Gradients, Switch

OPERATORS = ("_convolution", "convolution_backward")
"""To these, all of PyTorch's convolutions come, forward and backward, those of TorchScript included."""


def stock_kernel(name: str, key: str) -> Any:
    """Return PyTorch's own kernel of an operator; it is called by `call_boxed(keys_of(key), ...)`.

    Raises:
        BackendUnavailableError: if PyTorch is too old.
    """
    if not hasattr(torch.library, "get_kernel"):
        raise BackendUnavailableError(f"PyTorch {torch.__version__} is too old: 2.10 is the first that will do")
    return torch.library.get_kernel(f"aten::{name}", key)


def keys_of(key: str) -> Any:
    """Return the dispatch keys with which PyTorch's own kernels are called."""
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))


@final
class Kernels:
    """Which switch the convolutions of the process go through.

    Attributes:
        switch: that of all convolutions, or None.
        converted: those of modules that were converted, in order.
    """

    def __init__(self) -> None:
        self.switch: Switch | None = None
        self.converted: tuple[Switch, ...] = ()
        self._lock = RLock()
        self._kept: list[Switch] = []
        self._libraries: dict[str, torch.library.Library] = {}
        self.stock: dict[str, tuple[Any, Any]] = {}
        """PyTorch's own kernels of OPERATORS, by dispatch key, where they were ever replaced."""

    def use(self, switch: Switch | None) -> None:
        """Send all convolutions to a switch, or to PyTorch."""
        with self._lock:
            self._retire()
            self.switch = switch
            self._settle()

    def add(self, switch: Switch) -> None:
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
        wanted = {each.device_type.upper() for each in (self.switch, *self.converted) if each is not None}
        for key in set(self._libraries) - wanted:
            self._libraries.pop(key)._destroy()
        for key in wanted - set(self._libraries):
            forward, backward = (stock_kernel(name, key) for name in OPERATORS)
            self.stock[key] = forward, backward
            library = torch.library.Library("aten", "IMPL")
            bound = key.lower(), keys_of(key)
            kernels = partial(self._forward, forward, *bound), partial(self._backward, backward, *bound)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a kernel is replaced, which is what is wanted
                for name, kernel in zip(OPERATORS, kernels, strict=True):
                    library.impl(name, kernel, key)
            self._libraries[key] = library

    def _of(self, device_type: str, weight: torch.Tensor) -> Switch | None:
        for each in self.converted:
            if each.device_type == device_type and each.names.of(weight):
                return each
        switch = self.switch
        return switch if switch is not None and switch.device_type == device_type else None

    def _forward(
        self, stock: Any, device_type: str, keys: Any, x: torch.Tensor, weight: torch.Tensor, *arguments: Any
    ) -> torch.Tensor:
        switch = self._of(device_type, weight)
        out = None if switch is None else switch.forward(x, weight, *arguments)
        if out is None:
            out = stock.call_boxed(keys, x, weight, *arguments)
        return out

    def _backward(
        self,
        stock: Any,
        device_type: str,
        keys: Any,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias_sizes: Sequence[int] | None,
        *arguments: Any,
    ) -> Gradients:
        switch = self._of(device_type, weight)
        found = None if switch is None else switch.backward(grad, x, weight, *arguments)
        if found is None:
            found = stock.call_boxed(keys, grad, x, weight, bias_sizes, *arguments)
        return found


kernels = Kernels()
"""Those of this process."""
