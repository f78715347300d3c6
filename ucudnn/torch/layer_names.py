"""Names of layers: which of them calls, known by the module that runs, and by its weight where autograd runs."""

from threading import local
from typing import Any, final
from weakref import ref

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

_MOST = 1 << 14
_CONVOLUTIONS = (torch.nn.modules.conv._ConvNd,)


@final
class LayerNames:
    """Which layer a convolution belongs to.

    Inside a named module's forward it is that module. Autograd calls with the weight that the module was called with;
    compiled code, which runs no modules, with the weight that the module has.

    Attributes:
        any: whether there are any names.
    """

    def __init__(self) -> None:
        self.any = False
        self._running = local()
        # By address, and as long as the memory there is the weight's: another tensor may get it afterwards.
        self._known: dict[int, tuple[str, StorageWeakRef]] = {}  # '' for weights of no layer
        self._modules: list[tuple[ref[torch.nn.Module], str]] = []

    def give(self, module: torch.nn.Module) -> None:
        """Name the convolutions of a module tree as the tree does."""
        for name, each in module.named_modules():
            if isinstance(each, _CONVOLUTIONS):
                namer = _Namer(self, name or type(each).__name__)
                each.register_forward_pre_hook(namer.enter)
                each.register_forward_hook(namer.leave, always_call=True)
                self._modules.append((ref(each), namer.name))
        self.any = True

    def of(self, weight: torch.Tensor) -> str:
        """Return the name of the layer that calls now, or ''."""
        running = getattr(self._running, "stack", None)
        address = weight.data_ptr()
        known = self._known.get(address)
        if known is not None and (known[1].expired() or (running and known[0] != running[-1])):
            known = None
        if known is None:
            if len(self._known) >= _MOST:
                self._known.clear()  # casts of autocast lie somewhere else in each step
            known = running[-1] if running else self._learned(address), StorageWeakRef(weight.untyped_storage())
            self._known[address] = known
        return known[0]

    def _learned(self, address: int) -> str:
        """Look whether a module's weight lies there now: modules are moved after they were named."""
        for module, name in self._modules:
            # Not module.weight: a parametrized one is computed when it is read, which may have effects.
            weight = getattr(module(), "_parameters", {}).get("weight")
            if weight is not None and not is_lazy(weight) and weight.data_ptr() == address:
                return name
        return ""

    def enter(self, name: str) -> None:
        """Say that a layer runs in this thread."""
        if not hasattr(self._running, "stack"):
            self._running.stack = []
        self._running.stack.append(name)

    def leave(self) -> None:
        """Say that it has ended."""
        self._running.stack.pop()


@final
class _Namer:
    """The hooks of one layer; a copy of its module has the same ones, and one that was saved has none."""

    def __init__(self, names: LayerNames | None, name: str) -> None:
        self._names = names
        self.name = name

    def enter(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._names is not None and not torch.compiler.is_compiling():
            self._names.enter(self.name)

    def leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self._names is not None and not torch.compiler.is_compiling():
            self._names.leave()

    def __deepcopy__(self, memo: object) -> "_Namer":
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _Namer, (None, self.name)
