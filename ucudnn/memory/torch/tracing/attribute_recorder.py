"""AttributeRecorder: follows which attributes a step reads of its modules while it is traced."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from threading import get_ident
from typing import Any, final

from torch import Generator, nn

from ucudnn.backends.fork_locks import LockLevel, new_lock
from ucudnn.memory.torch.subject.attribute_content import ABSENT, AttributeContent
from ucudnn.memory.torch.subject.model_state import hooks_of
from ucudnn.memory.torch.subject.module_attributes import AttributeRead, ModuleAttributes, read_now
from ucudnn.memory.torch.tracing.code_reads import code_reads
from ucudnn.memory.torch.tracing.kept_tensors import Kept

_CALLED = "__call__", "_wrapped_call_impl", "_call_impl", "forward", "__getattr__", "__getattribute__"
_OWN = {*dir(nn.Module), *vars(nn.Module())} - {"forward", "training"}


_REMADE = {"_flat_weights", "_flat_weight_refs"}  # by a recurrent layer, where one of its parameters is set


@final
class AttributeRecorder:
    """Knows what was read while it was entered.

    Attributes that the step itself writes, such as counters, are left out: they change with every call of the model.
    So do tensors without memory, in whose place others are once the trace has ended.

    Args:
        model: the model, whose modules have names.
        loss: the loss, which may be a module, too.
    """

    def __init__(self, model: nn.Module, loss: Any) -> None:
        self._loss = loss
        self._names = {id(module): (name, True) for name, module in model.named_modules()}
        self._modules = [*model.modules(), *(loss.modules() if isinstance(loss, nn.Module) else ())]
        if isinstance(loss, nn.Module):
            for name, module in loss.named_modules(prefix="loss"):
                self._names.setdefault(id(module), (name, False))
        self._thread = 0
        self._seen: dict[tuple[int, str], nn.Module] = {}  # a module lives as long as its number counts
        self._reads: dict[tuple[int, str], AttributeRead] = {}
        self._written: dict[tuple[int, str], nn.Module] = {}
        self._writes = Counter[tuple[int, str]]()

    def begin(self) -> None:
        """Follow what is read and written from now on."""
        self._thread = get_ident()
        for module in self._modules:
            self._note_calls(module)
        self._note_code(self._loss, ())
        _INTERCEPTION.begin(self)

    def end(self) -> None:
        """Follow nothing any more; a second call does nothing."""
        _INTERCEPTION.end(self)

    def attributes(self) -> ModuleAttributes:
        """Return what was read and not changed since."""
        kept = [
            each
            for key, each in self._reads.items()
            if key not in self._writes and not each.content.is_fake and AttributeContent(each.value()) == each.content
        ]
        return ModuleAttributes(kept)

    def kept(self) -> Iterator[Kept]:
        """Yield what was read first, and holds tensors of the trace now."""
        for key, each in self._reads.items():
            now = AttributeContent(each.value())
            if now.is_fake and not each.content.is_fake:
                yield Kept(each, now.tensors, self._writes[key])

    def changed(self) -> Iterator[AttributeRead]:
        """Yield what was read first, and is not as it was; tensors that it keeps are for `check_kept`, but no list."""
        for each in self._reads.values():
            now = AttributeContent(each.value())
            kept = now.is_fake and not isinstance(each.value(), list)
            if now != each.content and not kept and each.key not in _REMADE:
                yield each

    def generators(self) -> Iterator[Generator]:
        """Yield the generators of random numbers among what was read."""
        return chain.from_iterable(each.content.generators for each in self._reads.values())

    def read(self, module: nn.Module, name: str, value: Any) -> None:
        """Note that an attribute was read, as ABSENT if the module itself has none of that name."""
        key = id(module), name
        if key in self._seen or not self._follows(module, name):
            return
        self._seen[key] = module
        table, label = vars(module), self._label(module, name)
        if name in table:
            self._note(table, name, label, value)
        elif value is not ABSENT:
            self._read_of_class(module, name, label)
        elif name in module._parameters or name in module._buffers:
            tensors = module._parameters if name in module._parameters else module._buffers
            if tensors[name] is None:
                self._note(tensors, name, label, None)
        elif name not in module._modules:
            self._note(table, name, label, ABSENT)

    def written(self, module: nn.Module, name: str) -> None:
        """Note that an attribute is about to be written."""
        if self._follows(module, name):
            key = id(vars(module)), name
            self._written[key] = module
            self._writes[key] += 1

    def _read_of_class(self, module: nn.Module, name: str, label: str) -> None:
        """Note what a class has, or what makes it, such as a method or a property."""
        kinds = type(module).__mro__
        for kind in kinds:
            found = read_now(kind, name)
            self._note(kind, name, f"{kind.__name__}.{name}", found, kinds[:-1])
            if found is not ABSENT:
                if not hasattr(type(found), "__set__"):
                    self._note(vars(module), name, label, ABSENT)  # an attribute of the module would be in its place
                return

    def _note_calls(self, module: nn.Module) -> None:
        """Note the class of a module, and what runs when the module is called, which nobody reads of the module."""
        kinds = type(module).__mro__[:-1]
        self._note(module, "__class__", self._label(module, "__class__"), type(module))
        self._note(vars(module), "_call_impl", self._label(module, "_call_impl"), read_now(vars(module), "_call_impl"))
        for kind in kinds:
            for name in _CALLED if kind is not nn.Module else _CALLED[:-1]:
                self._note(kind, name, f"{kind.__name__}.{name}", read_now(kind, name), kinds)
        for hooks in hooks_of(module):
            for hook in hooks.values():
                self._note_code(hook, ())

    def _note_code(self, value: Any, kinds: Sequence[type]) -> None:
        """Note what functions read besides attributes of modules."""
        for owner, key, label in code_reads(value, kinds):
            self._note(owner, key, label, read_now(owner, key), kinds if owner in kinds else ())

    def _note(self, owner: Any, name: str, label: str, value: Any, kinds: Sequence[type] = ()) -> None:
        key = id(owner), name
        if key not in self._writes and key not in self._reads:
            self._reads[key] = AttributeRead(owner, name, label, AttributeContent(value))
            self._note_code(value, kinds)

    def _follows(self, module: nn.Module, name: str) -> bool:
        """Whether an attribute counts: what another thread reads of other modules does not."""
        if name in _OWN:
            return False
        _, of_model = self._names.get(id(module), ("", False))
        if name == "training" and of_model:
            return False  # `ModelState` checks the modes of the model
        return get_ident() == self._thread or id(module) in self._names

    def _label(self, module: nn.Module, name: str) -> str:
        path, _ = self._names.get(id(module), (f"({type(module).__name__})", False))
        return f"{path}.{name}" if path else name


@final
class _Interception:
    """Lets recorders see what is read and written of all modules, as long as there are any."""

    def __init__(self) -> None:
        self._lock = new_lock(LockLevel.INNERMOST)
        self._recorders: tuple[AttributeRecorder, ...] = ()
        self._write: Any = None

    def begin(self, recorder: AttributeRecorder) -> None:
        """Let a recorder see."""
        with self._lock:
            self._recorders += (recorder,)
            if self._write is None:
                self._install()

    def end(self, recorder: AttributeRecorder) -> None:
        """Let it see no longer; modules are as before when none is left."""
        with self._lock:
            self._recorders = tuple(each for each in self._recorders if each is not recorder)
            if not self._recorders and self._write is not None:
                if "__getattribute__" in vars(nn.Module):
                    del nn.Module.__getattribute__
                nn.Module.__setattr__ = self._write  # type: ignore[method-assign]
                self._write = None

    def _install(self) -> None:
        self._write = original = nn.Module.__setattr__

        def read(module: nn.Module, name: str) -> Any:
            try:
                value = super(nn.Module, module).__getattribute__(name)
            except AttributeError:
                self._tell_read(module, name, ABSENT)
                raise
            self._tell_read(module, name, value)
            return value

        def write(module: nn.Module, name: str, value: Any) -> None:
            for recorder in self._recorders:
                recorder.written(module, name)
            original(module, name, value)

        nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
        nn.Module.__setattr__ = write  # type: ignore[method-assign, assignment]

    def _tell_read(self, module: nn.Module, name: str, value: Any) -> None:
        if name not in _OWN:
            for recorder in self._recorders:
                recorder.read(module, name, value)


_INTERCEPTION = _Interception()
