"""AttributeContent: what the value of an attribute is made of, to be compared with what it is made of later."""

import pickle
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import count
from numbers import Number
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ucudnn.units import shortened

_MOST_ENTRIES = 1000  # a longer list is compared by its length alone, because each step looks at all entries
_MOST_DEPTH = 20
VALUES = (type(None), int, str, bytes, Enum, torch.dtype, torch.device, torch.layout, torch.memory_format, CodeType)
CONSTANTS = (type, FunctionType, BuiltinFunctionType, property, staticmethod, classmethod)
_CONTAINERS: tuple[Any, ...] = (dict, set, frozenset, list, tuple, deque)
_DRAWING = {"numpy.random._generator", "numpy.random.mtrand"}


@final
class _Absent:
    def __repr__(self) -> str:
        return "not set"


ABSENT: Final = _Absent()
"""The value of an attribute that is not there."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return "a tensor" if isinstance(self.value, Tensor) else repr(self.value)


@final
@dataclass(frozen=True, slots=True)
class _Leaf:
    """A value that can be compared: 1, 1.0 and True differ, as do zeros of both signs, and NaN is equal to itself."""

    kind: type
    value: Any
    shown: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.shown or shortened(self.value)


_MISSING = _Leaf(_Absent, _Held(ABSENT))


@final
class AttributeContent:
    """What a value is made of: itself, or the entries of lists, dictionaries and plain objects.

    An object is plain if its attributes are numbers, texts, functions and the like, or lists and objects of them: a
    dataclass of settings, for example. Any other object must stay the same object; its contents are not
    compared.

    Attributes:
        views: what yields the entries of lists, dictionaries, sets and objects as they are at any time.
        long: lists, dictionaries and sets that are too long for that.
        generators: the generators of PyTorch and of NumPy in it.
    """

    def __init__(self, value: Any) -> None:
        self._leaves: dict[str, _Leaf] = {}
        self.views: list[Iterable[Any]] = []
        self.long: list[Any] = []
        self.tensors: list[Tensor] = []
        self.generators: list[Any] = []
        self._left, self._above = _MOST_ENTRIES, dict[int, Any]()
        self._add(value, "")

    @property
    def size(self) -> int:
        """How many parts it has."""
        return len(self._leaves)

    @property
    def is_fake(self) -> bool:
        """Whether it holds a tensor without memory, as only a trace has them."""
        return any(isinstance(each, FakeTensor) for each in self.tensors)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttributeContent) and self._leaves == other._leaves

    __hash__ = None  # type: ignore[assignment]

    def change(self, label: str, now: "AttributeContent") -> str:
        """Return what has changed since, for an error message; `label` names the attribute."""
        before, after = self._leaves, now._leaves
        path = next(path for path in (*before, *after) if before.get(path) != after.get(path))
        first, second = before.get(path, _MISSING), after.get(path, _MISSING)
        if issubclass(first.kind, Tensor) and issubclass(second.kind, Tensor):
            return f"{label}{path} is another tensor than when the step was fitted: make it a buffer, or fit it again"
        return f"{label}{path} is {second} now, and was {first} when the step was fitted: fit it again"

    def _add(self, value: Any, path: str) -> None:
        self._left -= 1
        kind = type(value)
        if isinstance(value, VALUES):
            self._leaves[path] = _Leaf(kind, value)
        elif isinstance(value, Number):
            self._leaves[path] = _Leaf(kind, repr(value), repr(value))
        elif isinstance(value, MethodType):  # made anew for each reader
            self._leaves[path] = _Leaf(kind, (_Held(value.__self__), _Held(value.__func__)), repr(value.__func__))
        elif isinstance(value, CONSTANTS) or value is ABSENT:
            self._leaves[path] = _Leaf(kind, _Held(value))
        elif isinstance(value, count) or kind.__module__ in _DRAWING:
            state = repr(value) if isinstance(value, count) else pickle.dumps(value)
            self.generators += [] if isinstance(value, count) else [value]
            self._leaves[path] = _Leaf(kind, (_Held(value), state), f"a {kind.__name__} in another state")
        elif id(value) in self._above:
            self._leaves[path] = _Leaf(kind, "", "itself")
        elif len(self._above) == _MOST_DEPTH or not self._enter(value, path):
            self.tensors += [value] if isinstance(value, Tensor) else []
            self.generators += [value] if isinstance(value, torch.Generator) else []
            self._leaves[path] = _Leaf(kind, _Held(value))

    def _enter(self, value: Any, path: str) -> bool:
        """Add what is in a value; return whether it is something whose entries can be compared."""
        self._above[id(value)] = value
        try:
            if not isinstance(value, _CONTAINERS):
                return self._add_object(value, path)
            kind, size = type(value), size_of(value)
            if size > self._left:
                self.long.append(value)
                shown = f"a {kind.__name__} of {size} entries"
                self._leaves[path] = _Leaf(kind, (_Held(value), size), shown)
            elif isinstance(value, (set, frozenset)):
                self.views.append(value)
                self._leaves[path] = _Leaf(kind, frozenset(entries_of(value)), shortened({*entries_of(value)}))
            else:
                self._leaves[path] = _Leaf(kind, "", f"a {kind.__name__}")
                if isinstance(value, dict):
                    self.views += [value, dict.values(value)]
                elif isinstance(value, (list, deque)):
                    self.views.append(value)
                for key, entry in dict.items(value) if isinstance(value, dict) else enumerate(entries_of(value)):
                    name = f"{path}[{shortened(key)}]"
                    self._add(entry, name if name not in self._leaves else f"{name}#{len(self._leaves)}")
        finally:
            del self._above[id(value)]
        return True

    def _add_object(self, value: Any, path: str) -> bool:
        if not isinstance(value, partial) and not is_plain(value):
            return False
        kind, table = type(value), _table(value)
        self._leaves[path] = _Leaf(kind, "", f"a {kind.__name__}")
        self.views += [table, table.values()]
        for name, entry in table.items():
            self._add(entry, f"{path}.{name}")
        return True


def is_plain(value: Any, held: tuple[type, ...] = ()) -> bool:
    """Whether an object holds, at any depth, only values that can be compared, and not too many of them.

    Values of the types `held` may be among them.
    """
    left, seen = [value], set[int]()
    while left:
        entry = left.pop()
        if isinstance(entry, (*VALUES, *CONSTANTS, Number, *held)) or id(entry) in seen:
            continue
        seen.add(id(entry))
        inside = _inside(entry)
        if inside is None or len(seen) + len(inside) > _MOST_ENTRIES:
            return False
        left += inside
    return True


def entries_of(value: Any) -> list[Any]:
    """Return the entries of a container, or its keys, as its built-in type has them: its class may show others."""
    return [*_built_in(value).__iter__(value)]


def size_of(value: Any) -> int:
    """Return the number of entries that `entries_of` returns."""
    return int(_built_in(value).__len__(value))


def _built_in(value: Any) -> Any:
    return next(each for each in _CONTAINERS if isinstance(value, each))


def _inside(value: Any) -> list[Any] | None:
    """Return what a container or an object holds; None where there is no way to see all of it."""
    if isinstance(value, _CONTAINERS):
        return entries_of(value) + ([*dict.values(value)] if isinstance(value, dict) else [])
    table = getattr(value, "__dict__", None)
    if table is None or type(table) is not dict or isinstance(value, (Tensor, nn.Module)):
        return None
    return [*_table(value).values()]


def _table(value: Any) -> dict[str, Any]:
    if isinstance(value, partial):  # they are none of its dictionary
        return {**vars(value), "func": value.func, "args": value.args, "keywords": value.keywords}
    found: dict[str, Any] = vars(value)
    return found
