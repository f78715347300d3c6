"""PythonState: values beside tensors and attributes that a step reads, which it must leave as they are."""

import copy
import gc
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any, final

from torch import Generator, nn

from ucudnn.memory.torch.subject.attribute_content import ABSENT, AttributeContent
from ucudnn.memory.torch.subject.model_state import hooks_of
from ucudnn.memory.torch.subject.module_attributes import AttributeRead
from ucudnn.memory.torch.tracing.provenance import is_library


@final
class _KeptValue:
    """The value of an attribute before forward sets it.

    Args:
        value: the value.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        self._entries = copy.copy(value) if type(value) in (dict, list, set, deque) else None

    def restore(self, owner: Any, key: str) -> None:
        """Let a table of a module, or another object, have it again, with the entries that it had."""
        if self._value is ABSENT:
            owner.pop(key, None)
            return
        value = self._value
        owner.__setitem__(key, value) if type(owner) is dict else setattr(owner, key, value)
        if self._entries is not None:
            value.clear()
            getattr(value, "extend" if type(value) in (list, deque) else "update")(self._entries)


@final
class PythonState:
    """Knows global variables, variables of closures, defaults and attributes of classes that code of a step names.

    Args:
        modules: the modules of the model and of the loss, by name.
        functions: other functions that the step calls, such as the loss.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], functions: Iterable[Any]) -> None:
        self._collecting = {getattr(each, "__code__", None) for each in gc.callbacks}  # they run in whatever frame
        self._seen: dict[int, Any] = {}  # an object lives as long as its number counts
        self._reads: dict[tuple[int, str], tuple[AttributeRead, _KeptValue]] = {}
        for name, module in modules:
            self._note(vars(module), "training", f"{name}.training" if name else "training")
            for kind in type(module).__mro__:
                self._meet(kind)
            for value in chain(vars(module).values(), *map(dict.values, hooks_of(module))):
                self._meet(value)
        for each in functions:
            self._meet(each)

    def called(self, frame: FrameType) -> None:
        """Note what code that begins to run names."""
        code, table = frame.f_code, frame.f_globals
        if is_library(frame) or _is_foreign(table.get("__name__")) or code in self._collecting:
            return
        for name in code.co_names:
            if name not in table:
                continue
            value = table[name]
            self._note(table, name, f"global {name}")
            self._meet(value)
            if isinstance(value, ModuleType):
                inside = vars(value)
                for each in code.co_names:
                    if each in inside:
                        self._note(inside, each, f"{name}.{each}")

    def changed(self) -> Iterator[AttributeRead]:
        """Yield what is not as it was."""
        return (each for each, _ in self._reads.values() if AttributeContent(each.value()) != each.content)

    def generators(self) -> Iterator[Generator]:
        """Yield the generators of random numbers among the values."""
        return chain.from_iterable(each.content.generators for each, _ in self._reads.values())

    def restore(self) -> None:
        """Let nothing hold tensors of a trace."""
        for each, before in self._reads.values():
            each.content.restore_generators()
            if not each.content.is_fake and AttributeContent(each.value()).is_fake:
                before.restore(each.owner, each.key)

    def _note(self, owner: Any, key: str, label: str) -> None:
        read = AttributeRead(owner, key, label, AttributeContent(ABSENT))
        value = read.value()
        if (id(owner), key) in self._reads or isinstance(value, (ModuleType, type, FunctionType)):
            return
        self._seen[id(owner)] = owner
        content = AttributeContent(value)
        kept = _KeptValue(value)
        self._reads[id(owner), key] = AttributeRead(owner, key, label, content), kept

    def _meet(self, value: Any) -> None:
        """Note what a function or a class of the program holds."""
        if isinstance(value, partial):
            value = value.func
        if isinstance(value, MethodType):
            value = value.__func__
        if not isinstance(value, (FunctionType, type)) or id(value) in self._seen:
            return
        if _is_foreign(value.__module__):
            return
        self._seen[id(value)] = value
        if isinstance(value, FunctionType):
            self._meet_function(value)
            return
        for name, each in vars(value).copy().items():
            if isinstance(each, FunctionType):
                self._meet(each)
            elif not name.startswith("__") and not hasattr(type(each), "__get__"):
                self._note(value, name, f"{value.__name__}.{name}")

    def _meet_function(self, function: FunctionType) -> None:
        name = function.__qualname__
        for each in ("__defaults__", "__kwdefaults__"):
            self._note(function, each, f"a default of {name}")
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # it has no value yet
                continue
            self._note(cell, "cell_contents", f"{variable} of {name}")
            self._meet(value)


def _is_foreign(module: Any) -> bool:
    return str(module).partition(".")[0] in _FOREIGN


_FOREIGN = {"torch", "builtins", "ucudnn", "numpy", "enum", "typing", "functools", "dataclasses", "abc", "collections"}
