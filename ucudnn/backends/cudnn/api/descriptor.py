"""Descriptors of cuDNN's backend API: they are created, given attributes, finalized and read."""

import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any, final

from ucudnn.backends.cudnn.api.enums import Attribute, DescriptorType, Type
from ucudnn.backends.cudnn.api.library import Library
from ucudnn.bounded import BoundedDict

_CREATE, _SET, _FINALIZE = "cudnnBackendCreateDescriptor", "cudnnBackendSetAttribute", "cudnnBackendFinalize"
_INT64 = "q"
_ARRAY_CODES: dict[Type, str] = {
    Type.DATA_TYPE: "i",
    Type.BOOLEAN: "b",
    Type.POINTWISE_MODE: "i",
    Type.CONVOLUTION_MODE: "i",
    Type.HEUR_MODE: "i",
    Type.KNOB_TYPE: "i",
    Type.NUMERICAL_NOTE: "i",
    Type.BEHAVIOR_NOTE: "i",
    Type.FLOAT: "f",
    Type.DOUBLE: "d",
}


@final
class BackendDescriptor:
    """One cudnnBackendDescriptor_t; it is destroyed with this object."""

    __slots__ = ("_kept", "_library", "address")

    def __init__(self, library: Library, kind: DescriptorType) -> None:
        self._library = library
        self._kept: tuple[BackendDescriptor, ...] = ()  # most keep none, and Python's collector visits each list
        self.address = 0
        memory = array(_INT64, (0,))
        library.check(library.function(_CREATE)(kind, memory.buffer_info()[0]), _CREATE)
        self.address = memory[0]

    def set(
        self,
        attribute: int,
        kind: Type,
        values: "tuple[float, ...] | list[float] | list[BackendDescriptor] | float | BackendDescriptor",
    ) -> "BackendDescriptor":
        """Give an attribute its value or values. Descriptors among the values live as long as this one."""
        items: Any = values if isinstance(values, tuple | list) else (values,)
        if kind is Type.DESCRIPTOR:
            self._kept = *self._kept, *items
            items = [each.address for each in items]
        memory = array(_ARRAY_CODES.get(kind, _INT64), items)
        give = self._library.function(_SET)  # which is called most often
        status = give(self.address, attribute, kind, len(items), memory.buffer_info()[0])
        self._library.check(status, _SET)
        return self

    def forget_parts(self) -> None:
        """Keep the descriptors no longer that were given to this one; for one of which cuDNN has made another."""
        self._kept = ()

    def finalize(self) -> "BackendDescriptor":
        """Finish the descriptor (cudnnBackendFinalize)."""
        self._library.check(self._library.function(_FINALIZE)(self.address), _FINALIZE)
        return self

    def numbers(self, attribute: int, kind: Type, most: int) -> list[int]:
        """Return the integers of an attribute, at most `most` of them."""
        memory = array(_ARRAY_CODES.get(kind, _INT64), [0]) * most
        found = self._library.call(
            "cudnnBackendGetAttribute", self.address, attribute, kind, most, memory.buffer_info()[0]
        )
        return [int(value) for value in memory[: min(found, most)]]

    def number(self, attribute: int, kind: Type) -> int:
        """Return the integer of an attribute that has one. This is the fastest way, because it is read most often."""
        memory = array(_ARRAY_CODES.get(kind, _INT64), (0,))
        get = self._library.function("cudnnBackendGetAttribute")
        status = get(self.address, attribute, kind, 1, None, memory.buffer_info()[0])
        self._library.check(status, "cudnnBackendGetAttribute")
        return int(memory[0])

    def count(self, attribute: int) -> int:
        """Return the number of descriptors of an attribute."""
        found: int = self._library.call("cudnnBackendGetAttribute", self.address, attribute, Type.DESCRIPTOR, 0, 0)
        return found

    def receive(self, attribute: int, receivers: "Sequence[BackendDescriptor]") -> "Sequence[BackendDescriptor]":
        """Read the descriptors of an attribute into descriptors of their type, and return those that were filled."""
        memory = array(_INT64, [each.address for each in receivers])
        found = self._library.call(
            "cudnnBackendGetAttribute", self.address, attribute, Type.DESCRIPTOR, len(memory), memory.buffer_info()[0]
        )
        return receivers[:found]

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the process cuDNN may be unloaded before its descriptors are deleted.
        if self.address and not finalizing():
            self._library.function("cudnnBackendDestroyDescriptor")(self.address)


def variant_pack(
    library: Library, identities: "array[int]", pointers: Sequence[int], workspace: int
) -> BackendDescriptor:
    """Return the variant pack of a launch.

    A program whose addresses change makes one for each launch. So this sets the attributes of one without a detour.
    """
    pack = BackendDescriptor(library, DescriptorType.VARIANT_PACK)
    give, finish, at, count = library.function(_SET), library.function(_FINALIZE), pack.address, len(identities)
    memory = array(_INT64, (*pointers, workspace))
    first = memory.buffer_info()[0]
    status = (
        give(at, Attribute.VARIANT_PACK_UNIQUE_IDS, Type.INT64, count, identities.buffer_info()[0])
        or give(at, Attribute.VARIANT_PACK_DATA_POINTERS, Type.VOID_PTR, count, first)
        or give(at, Attribute.VARIANT_PACK_WORKSPACE, Type.VOID_PTR, 1, first + count * memory.itemsize)
    )
    library.check(status, _SET)
    library.check(finish(at), _FINALIZE)
    return pack


_MOST_PARTS = 1 << 11

Given = tuple[Attribute, Type, int | tuple[int, ...]]
"""An attribute of a descriptor with its type and its value or values."""


@final
class GraphParts:
    """Makes parts of graphs, and keeps the latest ones; for graphs of one thread.

    A finalized descriptor does not change, so graphs share it. The three kernels of a layer have the same tensors, and
    all sizes of its images have the same filters and convolution. Describing them takes most of a graph's time.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._parts: BoundedDict[tuple[DescriptorType, tuple[Given, ...]], BackendDescriptor] = BoundedDict(_MOST_PARTS)

    def part(self, kind: DescriptorType, *given: Given) -> BackendDescriptor:
        """Return the finalized descriptor with these attributes."""
        found = self._parts.get((kind, given))
        if found is None:
            found = BackendDescriptor(self._library, kind)
            for attribute, of, values in given:
                found.set(attribute, of, values)
            self._parts[kind, given] = found.finalize()
        return found
