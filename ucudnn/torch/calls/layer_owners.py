"""Owners: which layers asked for a convolution, found without a change to the model, for reports.

Hooks would cost time at every call. Instead, the modules that run at a convolution's first call are read off the stack,
and their weights are known by address from then on.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from threading import local
from typing import Any, final
from weakref import WeakKeyDictionary, ref

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import Parameter, is_lazy

from ucudnn.bounded import BoundedDict
from ucudnn.problem import WITH_BIAS, ConvolutionProblem

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


_MOST = 1 << 14  # as many shapes as calls are kept
_CALL = torch.nn.Module._call_impl.__code__
_COMPILED = "_orig_mod"  # what `torch.compile` puts before the names of a model


@final
class LayerOwners:
    """Which layers ask for a convolution: several, where their convolutions look the same and share a kernel."""

    def __init__(self) -> None:
        self._first: BoundedDict[str, str] = BoundedDict(_MOST)
        # By address, in the order of the module tree.
        self._parameters: BoundedDict[int, tuple[str, ref[Parameter]]] = BoundedDict(_MOST)
        self._names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()

    def note(self, problem: ConvolutionProblem) -> None:
        """Note which module computes a convolution that is called for the first time, by the stack of this thread."""
        running = list(_running())
        if not running:
            return
        innermost, outermost = running[0], running[-1]
        if not (innermost in self._names and all(map(self._is_there, _own(innermost)))):
            self._read(outermost)  # once, unless weights move: images of a new size come to known layers
        name = self._names.get(innermost)
        if name is not None:
            self._first.setdefault(shapes_of(problem), name)

    def _read(self, model: torch.nn.Module) -> None:
        for path, module in torch.nn.Module.named_modules(model):
            name = path.removeprefix(_COMPILED).removeprefix(".") or type(module).__name__
            own = _own(module)
            if own:  # a module without weights, such as a compiled model, may run for any layer
                self._names[module] = name
            for parameter in own:
                self._parameters[parameter.data_ptr()] = name, ref(parameter)

    def _is_there(self, parameter: Parameter) -> bool:
        """Return whether a parameter is where it was when the model was read."""
        found = self._parameters.get(parameter.data_ptr())
        return found is not None and found[1]() is parameter

    def names(self, filters: Mapping[str, Iterable[int]]) -> dict[str, tuple[str, ...]]:
        """Return the layers that asked for convolutions, as far as they are known, in the order of the module tree.

        The parameters are read once for all convolutions, of which a program may have thousands.

        Args:
            filters: for the shapes of each convolution (see `shapes_of`), the addresses of the filters with which it
                was computed; those of copies have no name.
        """
        found: dict[str, dict[str, None]] = {shapes: {} for shapes in filters}
        users: dict[int, list[str]] = {}
        for shapes, addresses in filters.items():
            for address in set(addresses):
                users.setdefault(address, []).append(shapes)
        for address, (name, parameter) in list(self._parameters.items()):
            weight = parameter() if address in users else None
            if weight is not None and weight.data_ptr() == address:  # it may have moved, and another tensor be there
                for shapes in users[address]:
                    found[shapes][name] = None
        # The module that asked first is less sure, because a compiled model may run for its layers.
        first = {shapes: (self._first[shapes],) if self._first.get(shapes) else () for shapes in filters}
        return {shapes: tuple(names) or first[shapes] for shapes, names in found.items()}


def _own(module: torch.nn.Module) -> list[Parameter]:
    """Return the parameters of a module itself; tensors of other types may have no memory."""
    return [each for each in module._parameters.values() if type(each) is Parameter]


def _running() -> Iterator[torch.nn.Module]:
    """Yield the modules whose forward runs in this thread, the innermost first."""
    frame = sys._getframe()
    while frame is not None:
        # Only this function's variables are read: reading them makes a copy that lives as long as the frame, and would
        # keep the tensors of a training loop. Here it holds the module's inputs, which the call holds anyway.
        if frame.f_code is _CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]


def shapes_of(problem: ConvolutionProblem | str) -> str:
    """Return a problem, or its text, as text of its shapes: a layer has all three operations, and maybe a bias."""
    return str(problem).partition(" ")[2].removesuffix(WITH_BIAS)
