"""What the functions of a model read: their own code and default arguments, and variables of modules and functions."""

import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dis import Instruction, get_instructions
from functools import cached_property, lru_cache, partial
from numbers import Number
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ucudnn.memory.torch.subject.attribute_content import ABSENT, CONSTANTS, VALUES
from ucudnn.memory.torch.subject.module_attributes import read_now

_FOLDERS = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_LIBRARIES = (*_FOLDERS, str(Path(torch.__file__).parent), str(Path(__file__).parents[3]), "<frozen")
_WRAPPED = type(lru_cache(len)), FunctionType
_COMPARED = (*VALUES, *CONSTANTS, *_WRAPPED, MethodType, partial, Number, tuple, frozenset, Tensor, nn.Module)
_INNER = {MethodType: "__func__", staticmethod: "__func__", classmethod: "__func__"} | {
    property: "fget",
    cached_property: "func",
    partial: "func",
}
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")

CodeRead = tuple[Any, str, str]
"""What `module_attributes.read_now` takes, an owner and a key, and its name in messages."""


def code_reads(value: Any, kinds: Sequence[type]) -> Iterator[CodeRead]:
    """Yield what the function behind a value reads besides its arguments, where a user may change it.

    Functions of libraries are left out. Of what variables hold, numbers, texts, functions, tensors and the like are
    compared; of other objects only the attributes and entries that the code names. The value may hold the function, as
    a bound method, a property or an object that can be called does. Attributes of its first argument are looked up
    among some classes.
    """
    function, first = _function_of(value)
    if function is None:
        return
    name = function.__qualname__
    yield function, "__code__", f"the code of {name}"
    for key in ("__defaults__", "__kwdefaults__"):
        if getattr(function, key):
            yield function, key, f"{name}.{key}"
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    own = function.__code__.co_varnames[0] if first is not ABSENT and function.__code__.co_argcount else None
    for instructions in _bodies(function.__code__):
        written = {each.argval for each in instructions if each.opname in ("STORE_GLOBAL", "STORE_DEREF")}
        for at, each in enumerate(instructions):
            behind, found = instructions[at + 1 : at + 8], each.argval
            if each.opname in _ATTRIBUTES:
                yield from _of_classes(kinds, found)
            elif each.opname == "LOAD_GLOBAL" and found not in written:
                yield from _chain(function.__globals__, found, f"{function.__module__}.{found}", behind)
            elif each.opname == "LOAD_DEREF" and found in cells.keys() - written:
                yield from _chain(cells[found], "cell_contents", f"{found}, which {name} reads,", behind)
            elif each.opname.startswith("LOAD_FAST") and found == own:
                yield from _chain({"": first}, "", type(first).__name__, behind)


def _bodies(code: CodeType) -> Iterator[list[Instruction]]:
    yield [*get_instructions(code)]
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _bodies(each)


def _function_of(value: Any) -> tuple[FunctionType | None, Any]:
    """Return the user's function that a value runs when it is called or read, and what it is bound to."""
    first: Any = ABSENT
    held = isinstance(value, (*_INNER, *_WRAPPED, type, nn.Module))
    if callable(value) and not held and isinstance(type(value).__call__, FunctionType):
        value = value.__call__
    while not isinstance(value, FunctionType) or value.__code__.co_filename.startswith(_LIBRARIES):
        if isinstance(value, MethodType) and not isinstance(value.__self__, (type, nn.Module)):
            first = value.__self__
        inner = next((name for kind, name in _INNER.items() if isinstance(value, kind)), "__wrapped__")
        if inner == "__wrapped__" and not isinstance(value, _WRAPPED):
            return None, ABSENT
        value = getattr(value, inner, None)
    return value, first


def _of_classes(kinds: Sequence[type], name: str) -> Iterator[CodeRead]:
    """Yield an attribute of classes, of each of them, because `super()` begins behind the first."""
    if any(name in vars(kind) for kind in kinds):
        for kind in kinds:
            yield kind, name, f"{kind.__name__}.{name}"


def _chain(owner: Any, key: str, label: str, behind: Sequence[Instruction]) -> Iterator[CodeRead]:
    """Yield a variable, and the attributes and entries of it that the instructions behind it read one by one."""
    following = iter(behind)
    while True:
        value = read_now(owner, key)
        if isinstance(value, _COMPARED) and key:
            yield owner, key, label
        each = next(following, None)
        if each is None or isinstance(value, (Tensor, nn.Module)):
            return
        if each.opname in _ATTRIBUTES and isinstance(value, type):
            yield from _of_classes(value.__mro__[:-1], each.argval)
            return
        table: Mapping[str, Any] | None = None
        if each.opname in _ATTRIBUTES:
            table, key, shown = getattr(value, "__dict__", None), each.argval, f".{each.argval}"
        elif each.opname == "LOAD_CONST" and isinstance(each.argval, str):
            subscript = next(following, None)
            if subscript is not None and (subscript.opname == "BINARY_SUBSCR" or subscript.argrepr == "[]"):
                table, key, shown = value, each.argval, f"[{each.argval!r}]"
        if type(table) is not dict or key not in table:
            return
        owner, label = table, f"{label}{shown}"
