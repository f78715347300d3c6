"""StepReads: what a step reads beside tensors: attributes, variables, functions and classes, as they were before it.

A plan holds their values. So none may change while the step is traced, and those that a user may change are compared
before each step, too.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from threading import get_ident
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any, final

from torch import Generator, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ucudnn.backends.fork_locks import LockLevel, new_lock
from ucudnn.memory.torch.subject.attribute_content import ABSENT, CONSTANTS, VALUES, AttributeContent
from ucudnn.memory.torch.subject.left_as_found import Snapshot
from ucudnn.memory.torch.subject.model_state import hooks_of, modules_of
from ucudnn.memory.torch.subject.module_attributes import AttributeRead, ModuleAttributes, read_now
from ucudnn.memory.torch.tracing.code_reads import code_reads
from ucudnn.memory.torch.tracing.provenance import is_called_by_gc, is_library
from ucudnn.memory.torch.tracing.step_effects import GUARDED

_CALLED = "__call__", "_wrapped_call_impl", "_call_impl", "forward", "__getattr__", "__getattribute__"
_OWN = {*dir(nn.Module), *vars(nn.Module())} - {"forward", "training"}
_REMADE = {"_flat_weights", "_flat_weight_refs"}  # by a recurrent layer, where one of its parameters is set
_FOREIGN = {"torch", "builtins", "ucudnn", "numpy", "enum", "typing", "functools", "dataclasses", "abc", "collections"}
_STEADY = (*VALUES, *CONSTANTS, float, Tensor, type(ABSENT))


@final
class StepReads:
    """Knows what was read while it was entered, and what code that ran names.

    Attributes that the step itself writes, such as counters, are compared while it is traced alone: they change with
    every call of the model. So are variables that only the code of a whole function tells, and tensors without memory,
    in whose place others are once the trace has ended.
    """

    def __init__(self, model: nn.Module, loss: Any, snapshot: Snapshot) -> None:
        self._loss, self._snapshot = loss, snapshot
        self._modules = {id(each): (each, name) for name, each in reversed([*modules_of(model, loss)])}
        self._of_model = {*map(id, model.modules())}
        self._thread = 0
        self._seen: dict[Any, Any] = {}  # an object lives as long as its number counts
        self._reads: dict[tuple[int, str], tuple[AttributeRead, Any]] = {}  # with the value
        self._lasting = set[tuple[int, str]]()
        self._writes = Counter[tuple[int, str]]()
        snapshot.undo(self.end)

    def begin(self) -> None:
        """Follow what is read and written from now on."""
        self._thread = get_ident()
        for module, name in reversed(self._modules.values()):
            self._note_calls(module)
            self._note_beside(vars(module), "training", f"{name}.training" if name else "training")
            for value in chain(type(module).__mro__, vars(module).values(), *map(dict.values, hooks_of(module))):
                self._meet(value)
        self._note_code(self._loss, ())
        self._meet(self._loss)
        _INTERCEPTION.begin(self)

    def end(self) -> None:
        """Follow nothing any more; a second call does nothing."""
        _INTERCEPTION.end(self)

    def attributes(self) -> ModuleAttributes:
        """Return what was read, not changed since, and is to be compared before each step."""
        kept = [
            each
            for key, each, now in self._now()
            if key in self._lasting - self._writes.keys() and not each.content.is_fake and now == each.content
        ]
        return ModuleAttributes(kept)

    def kept(self) -> Iterator[tuple[AttributeRead, Sequence[Tensor], int]]:
        """Yield what was read first, and holds tensors of the trace now."""
        for key, each, now in self._now():
            if key in self._lasting and now.is_fake and not each.content.is_fake:
                yield each, now.tensors, self._writes[key]

    def changed(self) -> Iterator[AttributeRead]:
        """Yield what the step has read and what has changed since; kept tensors are for `check_kept`, but no more."""
        for key, each, now in self._now():
            grown = isinstance(each.value(), list) and now.size != each.content.size
            kept = key in self._lasting and now.is_fake and not grown
            if now != each.content and not kept and each.key not in _REMADE:
                yield each

    def generators(self) -> Iterator[Generator]:
        """Yield the generators of random numbers of PyTorch among what was read."""
        found = chain.from_iterable(each.content.generators for each, _ in self._reads.values())
        return (each for each in found if isinstance(each, Generator))

    def called(self, frame: FrameType) -> None:
        """Note what code that begins to run names."""
        code, table = frame.f_code, frame.f_globals
        if is_called_by_gc(frame) or is_library(frame) or _is_foreign(table.get("__name__")):
            return
        asks = "FakeTensor" in code.co_names or any(table.get(each) is FakeTensor for each in code.co_names)
        if asks and "isinstance" not in table:
            table["isinstance"] = _is_instance_in_steps
            self._snapshot.undo(partial(table.pop, "isinstance", None))
        for name in filter(table.__contains__, code.co_names):
            value = table[name]
            self._note_beside(table, name, f"global {name}")
            self._meet(value)
            if isinstance(value, ModuleType):
                for each in vars(value).keys() & {*code.co_names}:
                    self._note_beside(vars(value), each, f"{name}.{each}")

    def read(self, module: nn.Module, name: str, *, found: bool) -> None:
        """Note that an attribute was read, and whether the module or its class has one of that name."""
        key = id(module), name
        if key in self._seen or not self._follows(module, name):
            return
        self._seen[key] = module
        with _unwatched():
            tables = [each for each in (module._parameters, module._buffers, module._modules) if name in each]
            if found and name not in vars(module):
                self._read_of_class(module, name)
            elif name in vars(module) or not tables:
                self._note(vars(module), name, self._label(module, name))
            elif tables[0].get(name) is None and tables[0] is not module._modules:
                self._note(tables[0], name, self._label(module, name))

    def written(self, module: nn.Module, name: str) -> None:
        """Note that an attribute is about to be written."""
        if self._follows(module, name):
            key = id(vars(module)), name
            self._seen[key] = module
            self._writes[key] += 1

    def _now(self) -> Iterator[tuple[tuple[int, str], AttributeRead, AttributeContent]]:
        for key, (each, before) in [*self._reads.items()]:
            value = each.value()
            same = value is before and isinstance(value, _STEADY)
            yield key, each, each.content if same else AttributeContent(value)

    def _read_of_class(self, module: nn.Module, name: str) -> None:
        """Note what a class has, or what makes it, such as a method or a property."""
        kinds = type(module).__mro__
        for kind in kinds:
            self._note(kind, name, f"{kind.__name__}.{name}", kinds[:-1])
            if (found := read_now(kind, name)) is not ABSENT:
                if not hasattr(type(found), "__set__"):  # an attribute of the module would be in its place
                    self._note(vars(module), name, self._label(module, name))
                return

    def _note_calls(self, module: nn.Module) -> None:
        """Note the class of a module, and what runs when the module is called, which nobody reads of the module."""
        kinds = type(module).__mro__[:-1]
        self._note(module, "__class__", self._label(module, "__class__"))
        self._note(vars(module), "_call_impl", self._label(module, "_call_impl"))
        for kind in kinds:
            for name in _CALLED if kind is not nn.Module else _CALLED[:-1]:
                self._note(kind, name, f"{kind.__name__}.{name}", kinds)
        for hook in chain.from_iterable(map(dict.values, hooks_of(module))):
            self._note_code(hook, ())

    def _note_code(self, value: Any, kinds: Sequence[type]) -> None:
        for owner, key, label in code_reads(value, kinds):
            self._note(owner, key, label, kinds if owner in kinds else ())

    def _note(self, owner: Any, name: str, label: str, kinds: Sequence[type] = ()) -> None:
        """Note what is compared before each step, too."""
        key = id(owner), name
        if key not in self._writes and key not in self._lasting:
            self._lasting.add(key)
            self._note_code(self._added(owner, name, label), kinds)

    def _note_beside(self, owner: Any, name: str, label: str) -> None:
        """Note what is compared while the step is traced alone."""
        known = (id(owner), name) in self._reads
        if not known and not isinstance(read_now(owner, name), (ModuleType, type, FunctionType)):
            self._added(owner, name, label)

    def _added(self, owner: Any, name: str, label: str) -> Any:
        key = id(owner), name
        if key in self._reads:
            read, value = self._reads[key]
            content = read.content
        else:
            value = read_now(owner, name)
            content = AttributeContent(value)
            self._snapshot.note(owner, name, value, content.generators)
        self._reads[key] = AttributeRead(owner, name, label, content), value
        return value

    def _meet(self, value: Any) -> None:
        """Note what a function or a class of the program holds."""
        value = value.func if isinstance(value, partial) else value
        value = value.__func__ if isinstance(value, MethodType) else value
        met = not isinstance(value, (FunctionType, type)) or id(value) in self._seen
        if met or _is_foreign(value.__module__):
            return
        self._seen[id(value)] = value
        if isinstance(value, type):
            for name, each in vars(value).copy().items():
                if isinstance(each, FunctionType):
                    self._meet(each)
                elif not name.startswith("__") and not hasattr(type(each), "__get__"):
                    self._note_beside(value, name, f"{value.__name__}.{name}")
            return
        for each in ("__defaults__", "__kwdefaults__"):
            self._note_beside(value, each, f"a default of {value.__qualname__}")
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if (inside := read_now(cell, "cell_contents")) is not ABSENT:
                self._note_beside(cell, "cell_contents", f"{variable} of {value.__qualname__}")
                self._meet(inside)

    def _follows(self, module: nn.Module, name: str) -> bool:
        """Whether an attribute counts: what another thread reads of other modules does not."""
        if name in _OWN:
            return False
        if name == "training" and id(module) in self._of_model:
            return False  # `ModelState` checks the modes of the model
        return get_ident() == self._thread or id(module) in self._modules

    def _label(self, module: nn.Module, name: str) -> str:
        _, path = self._modules.get(id(module), (None, f"({type(module).__name__})"))
        return f"{path}.{name}" if path else name


@contextmanager
def _unwatched() -> Iterator[None]:
    """Hide from the profile of a `StepEffects` what is no call of the model."""
    profile = sys.getprofile()
    if not callable(profile):
        yield
        return
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(profile)


def _is_instance_in_steps(value: Any, kinds: Any) -> bool:
    """Answer a program that asks for tensors without memory as a step does, which has none."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    return isinstance(value, tuple(each for each in kinds if each is not FakeTensor))


def _is_foreign(module: Any) -> bool:
    return str(module).partition(".")[0] in _FOREIGN


@final
class _Interception:
    """Lets recorders see what is read and written of all modules, and guards tensors, while there are any."""

    def __init__(self) -> None:
        self._lock = new_lock(LockLevel.INNERMOST)
        self._recorders: tuple[StepReads, ...] = ()
        self._before: list[tuple[type, str, Any]] = []

    def begin(self, recorder: StepReads) -> None:
        with self._lock:
            self._recorders += (recorder,)
            if not self._before:
                self._install()

    def end(self, recorder: StepReads) -> None:
        """Let it see no longer; classes are as before when none is left."""
        with self._lock:
            self._recorders = tuple(each for each in self._recorders if each is not recorder)
            while self._before and not self._recorders:
                kind, name, value = self._before[-1]
                if value is not ABSENT:
                    setattr(kind, name, value)
                elif name in vars(kind):
                    delattr(kind, name)
                self._before.pop()

    def _install(self) -> None:
        original = nn.Module.__setattr__

        def read(module: nn.Module, name: str) -> Any:
            if name in _OWN:
                return super(nn.Module, module).__getattribute__(name)
            found = False
            try:
                value = super(nn.Module, module).__getattribute__(name)
                found = True
                return value
            finally:
                for recorder in self._recorders:
                    recorder.read(module, name, found=found)

        def write(module: nn.Module, name: str, value: Any) -> None:
            for recorder in self._recorders:
                recorder.written(module, name)
            original(module, name, value)

        of_modules = {"__getattribute__": read, "__setattr__": write}
        for kind, functions in ((nn.Module, of_modules), (FakeTensor, GUARDED)):
            for name, function in functions.items():
                self._before.append((kind, name, read_now(kind, name)))
                setattr(kind, name, function)


_INTERCEPTION = _Interception()
