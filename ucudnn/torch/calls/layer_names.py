"""Names of layers: which module calls a convolution, found by the module that runs, or by its weight."""

from threading import local
from typing import Any, final
from weakref import ref

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from ucudnn.bounded import BoundedDict

_MOST_WEIGHTS = 1 << 14  # autocast makes new copies of weights in each step
_CONVOLUTIONS = (torch.nn.modules.conv._ConvNd,)


@final
class _Running(local):
    def __init__(self) -> None:
        self.names: list[str] = []


@final
class LayerNames:
    """Which layer a convolution belongs to.

    While the forward of a named module runs, a convolution belongs to it. Autograd calls with the weight that the
    module was called with. Compiled code runs no modules, but calls with the weight that the module has.
    """

    def __init__(self) -> None:
        self.any = False  # whether any module was named
        self._running = _Running()
        # By address. Another tensor may get the address later, so a name counts only while the weight's memory lives.
        self._known: BoundedDict[int, tuple[str, StorageWeakRef]] = BoundedDict(_MOST_WEIGHTS)
        self._modules: list[tuple[ref[torch.nn.Module], str]] = []

    def give(self, module: torch.nn.Module) -> None:
        """Name the convolutions of a module tree by their path in the tree."""
        for name, each in module.named_modules():
            if isinstance(each, _CONVOLUTIONS):
                hooks = _NamingHooks(self._running, name or type(each).__name__)
                each.register_forward_pre_hook(hooks.enter)
                each.register_forward_hook(hooks.leave, always_call=True)
                self._modules.append((ref(each), hooks.name))
        self.any = True

    def of(self, weight: torch.Tensor) -> str:
        """Return the name of the layer that calls now, or '' if it has none."""
        running = self._running.names
        address = weight.data_ptr()
        known = self._known.get(address)
        if known is not None and (known[1].expired() or (running and known[0] != running[-1])):
            known = None
        if known is None:
            name = running[-1] if running else self._name_at(address)
            known = self._known[address] = name, StorageWeakRef(weight.untyped_storage())
        return known[0]

    def _name_at(self, address: int) -> str:
        """Return the name of the module whose weight has an address now: modules may move after they were named."""
        for module, name in self._modules:
            # `module.weight` would compute a parametrized weight, which may have side effects.
            weight = getattr(module(), "_parameters", {}).get("weight")
            if weight is not None and not is_lazy(weight) and weight.data_ptr() == address:
                return name
        return ""


@final
class _NamingHooks:
    """The hooks of one layer. A copy of the module keeps them; a module that was saved and loaded again has none."""

    def __init__(self, running: _Running | None, name: str) -> None:
        self._running = running
        self.name = name

    def enter(self, *_: Any) -> None:
        if self._running is not None and not torch.compiler.is_compiling():
            self._running.names.append(self.name)

    def leave(self, *_: Any) -> None:
        if self._running is not None and not torch.compiler.is_compiling():
            self._running.names.pop()

    def __deepcopy__(self, memo: object) -> "_NamingHooks":
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _NamingHooks, (None, self.name)
