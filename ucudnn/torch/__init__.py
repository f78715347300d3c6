"""PyTorch: every convolution of a program under a workspace limit, without touching the model.

`enable` takes over `aten::convolution` and `aten::convolution_backward`, to which all of PyTorch's convolutions come,
forward and backward, plain and transposed, in one to three dimensions; `disable` gives them back. What is not computed
here goes to PyTorch's own kernels, and is counted.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from threading import RLock
from typing import Any, final

import torch

from ucudnn.errors import BackendUnavailableError, SettingsError
from ucudnn.handle import Handle
from ucudnn.torch.switch import Gradients, Switch

__all__ = ["Enabled", "Summary", "convert", "disable", "enable", "report"]

_LOG = logging.getLogger(__name__)
_OPERATORS = ("convolution", "convolution_backward")
_CONVOLUTIONS = (torch.nn.modules.conv._ConvNd,)


@final
class Summary:
    """What went through handles and what did not.

    Attributes:
        reports: what each device's handle decided.
        calls: how many convolutions went through a handle; each gradient counts as one.
        left: how many were left to PyTorch, by reason.
    """

    def __init__(self, switch: Switch | None) -> None:
        self.reports = switch.reports() if switch else {}
        self.calls = switch.calls if switch else 0
        self.left = dict(switch.left) if switch else {}

    def __str__(self) -> str:
        """Return tables and counts as plain text."""
        lines = [f"{device}\n{each}" for device, each in self.reports.items()]
        lines.append(f"convolutions through ucudnn: {self.calls}, left to PyTorch: {sum(self.left.values())}")
        lines += [f"  {count} x {reason}" for reason, count in self.left.items()]
        return "\n".join(lines)


@final
class Enabled:
    """What `enable` turned on; as a context, it is turned off at the end, and what was on before is on again."""

    def __init__(self, switch: Switch, before: Switch | None) -> None:
        self._switch = switch
        self._before = before

    def __enter__(self) -> "Enabled":
        return self

    def __exit__(self, *exception: object) -> None:
        _kernels.use(self._before)

    def report(self) -> Summary:
        """Return what went through handles since it was turned on."""
        return Summary(self._switch)


@final
class _Kernels:
    """PyTorch's two operators, with kernels of ours while anything is turned on."""

    def __init__(self) -> None:
        self._lock = RLock()
        self.switch: Switch | None = None
        self._converted: list[Switch] = []
        self._libraries: dict[str, tuple[torch.library.Library, dict[str, Any]]] = {}

    def use(self, switch: Switch | None) -> None:
        """Send all convolutions to a switch, or to PyTorch."""
        with self._lock:
            self.switch = switch
            self._settle()

    def add(self, switch: Switch) -> None:
        """Send those of converted modules to a switch."""
        with self._lock:
            self._converted.append(switch)
            self._settle()

    def _settle(self) -> None:
        wanted = {each.device_type.upper() for each in (self.switch, *self._converted) if each is not None}
        for key in set(self._libraries) - wanted:
            library, _ = self._libraries.pop(key)
            library._destroy()
        for key in wanted - set(self._libraries):
            stock = {name: torch.library.get_kernel(f"aten::{name}", key) for name in _OPERATORS}
            library = torch.library.Library("aten", "IMPL")
            kernels: dict[str, Callable[..., Any]] = {
                "convolution": self._forward,
                "convolution_backward": self._backward,
            }
            for name, kernel in kernels.items():
                library.impl(name, partial(kernel, stock[name]), key, with_keyset=True)
            self._libraries[key] = library, stock

    def _of(self, device_type: str, weight: torch.Tensor) -> Switch | None:
        for each in self._converted:
            if each.device_type == device_type and (each.inside or each.knows(weight)):
                return each
        switch = self.switch
        return switch if switch is not None and switch.device_type == device_type else None

    def _forward(self, stock: Any, keys: Any, x: torch.Tensor, weight: torch.Tensor, *arguments: Any) -> torch.Tensor:
        switch = self._of(x.device.type, weight)
        out = None if switch is None else switch.forward(x, weight, *arguments)
        if out is None:
            out = stock.call_boxed(keys, x, weight, *arguments)
        return out

    def _backward(
        self,
        stock: Any,
        keys: Any,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias_sizes: Sequence[int] | None,
        *arguments: Any,
    ) -> Gradients:
        switch = self._of(x.device.type, weight)
        found = None if switch is None else switch.backward(grad, x, weight, *arguments)
        if found is None:
            found = stock.call_boxed(keys, grad, x, weight, bias_sizes, *arguments)
        return found


_kernels = _Kernels()


def enable(*, backend: str | None = None, **options: Any) -> Enabled:
    """Send every convolution of the process to a handle, from now on.

    Args:
        backend: 'cpu' takes over the convolutions of CPU tensors instead, which is slow: for tests.
        **options: of `ucudnn.Handle`: workspace_limit, total_workspace, policy, database, ...; None and what is not
            given come from the environment.

    Returns:
        A context that turns it off again.

    Raises:
        SettingsError: if an option has a value that it may not have.
        BackendUnavailableError: if PyTorch has no GPU, or is too old.
    """
    before = _kernels.switch
    switch = _open(backend, options)
    _kernels.use(switch)
    return Enabled(switch, before)


def disable() -> None:
    """Give all convolutions back to PyTorch, but for those of converted modules."""
    _kernels.use(None)


def convert(module: torch.nn.Module, *, backend: str | None = None, **options: Any) -> torch.nn.Module:
    """Send the convolutions of one module and its children to a handle; layers have the names of the module tree.

    Args:
        module: changed in place.
        backend: as in `enable`.
        **options: as in `enable`.

    Returns:
        The module.

    Raises:
        SettingsError: if an option has a value that it may not have.
        BackendUnavailableError: if PyTorch has no GPU, or is too old.
    """
    switch = _open(backend, options)
    for name, each in module.named_modules():
        if isinstance(each, _CONVOLUTIONS):
            each.forward = partial(_named, switch, name or type(each).__name__, each.forward)
    _kernels.add(switch)
    return module


def report() -> Summary:
    """Return what went through handles since `enable`, and what was left to PyTorch and why."""
    return Summary(_kernels.switch)


def _named(switch: Switch, name: str, forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with switch.named(name):
        return forward(*arguments, **options)


def _open(backend: str | None, options: dict[str, Any]) -> Switch:
    if not hasattr(torch.library, "get_kernel"):
        raise BackendUnavailableError(f"PyTorch {torch.__version__} is too old: 2.10 is the first that will do")
    if backend == "cpu":
        handle = Handle(backend="cpu", **options)  # bad options are said now, not at the first convolution
        return Switch(lambda _: handle, "cpu")
    raise SettingsError(f"backend={backend!r}: convolutions on GPUs are not taken over yet; 'cpu' is")
