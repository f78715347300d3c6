"""Descriptors of cuDNN's backend API: created, given attributes, finalized, read, and destroyed with their owner."""

import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any, final

from ucudnn.backends.cudnn.api.enums import Kind, Type
from ucudnn.backends.cudnn.api.library import Library

_INT64 = "q"
_ARRAY_CODES: dict[Type, str] = {
    Type.DATA_TYPE: "i",
    Type.CONVOLUTION_MODE: "i",
    Type.HEUR_MODE: "i",
    Type.KNOB_TYPE: "i",
    Type.NUMERICAL_NOTE: "i",
    Type.BEHAVIOR_NOTE: "i",
    Type.FLOAT: "f",
    Type.DOUBLE: "d",
}


@final
class Descriptor:
    """One cudnnBackendDescriptor_t.

    Args:
        library: cuDNN.
        kind: what it describes.

    Attributes:
        address: of the descriptor, for other descriptors and for cudnnBackendExecute.
    """

    __slots__ = ("_kept", "_library", "address")

    def __init__(self, library: Library, kind: Kind) -> None:
        self._library = library
        self._kept: list[Descriptor] = []
        self.address = 0
        self.address = library.call("cudnnBackendCreateDescriptor", kind)

    def set(
        self,
        attribute: int,
        kind: Type,
        values: "tuple[float, ...] | list[float] | list[Descriptor] | float | Descriptor",
    ) -> "Descriptor":
        """Give an attribute its value or values; descriptors among them live as long as this one (a set is a list).

        Raises:
            CudnnError: if cuDNN does not take them.
        """
        items: Any = values if isinstance(values, tuple | list) else (values,)
        if kind is Type.DESCRIPTOR:
            self._kept += items
            items = [each.address for each in items]
        memory = array(_ARRAY_CODES.get(kind, _INT64), items)
        self._library.call(
            "cudnnBackendSetAttribute", self.address, attribute, kind, len(items), memory.buffer_info()[0]
        )
        return self

    def finalize(self) -> "Descriptor":
        """Finish the descriptor.

        Raises:
            CudnnError: if its attributes do not fit together, or cuDNN has no way to compute what it describes.
        """
        self._library.call("cudnnBackendFinalize", self.address)
        return self

    def numbers(self, attribute: int, kind: Type, most: int) -> list[int]:
        """Return the whole numbers of an attribute, as many as there are up to `most`.

        Raises:
            CudnnError: if the attribute cannot be read.
        """
        memory = array(_ARRAY_CODES.get(kind, _INT64), [0]) * most
        found = self._library.call(
            "cudnnBackendGetAttribute", self.address, attribute, kind, most, memory.buffer_info()[0]
        )
        return [int(value) for value in memory[: min(found, most)]]

    def number(self, attribute: int, kind: Type) -> int:
        """Return the whole number of an attribute that has one; the quickest way, for it is asked most.

        Raises:
            CudnnError: if the attribute cannot be read.
        """
        memory = array(_ARRAY_CODES.get(kind, _INT64), (0,))
        get = self._library.function("cudnnBackendGetAttribute")
        status = get(self.address, attribute, kind, 1, None, memory.buffer_info()[0])
        self._library.check(status, "cudnnBackendGetAttribute")
        return int(memory[0])

    def count(self, attribute: int) -> int:
        """Return how many descriptors an attribute has.

        Raises:
            CudnnError: if the attribute cannot be read.
        """
        found: int = self._library.call("cudnnBackendGetAttribute", self.address, attribute, Type.DESCRIPTOR, 0, 0)
        return found

    def receive(self, attribute: int, receivers: "Sequence[Descriptor]") -> "Sequence[Descriptor]":
        """Read the descriptors of an attribute into descriptors of their kind, and return those that were filled.

        Raises:
            CudnnError: if the attribute cannot be read.
        """
        memory = array(_INT64, [each.address for each in receivers])
        found = self._library.call(
            "cudnnBackendGetAttribute", self.address, attribute, Type.DESCRIPTOR, len(memory), memory.buffer_info()[0]
        )
        return receivers[:found]

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the process cuDNN may be gone before its descriptors, and takes them along.
        if self.address and not finalizing():
            self._library.function("cudnnBackendDestroyDescriptor")(self.address)
