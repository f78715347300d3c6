"""The descriptors that operation graphs have in common: tensors, the convolution, and values of engines' knobs.

A finalized descriptor does not change, so graphs share it. The three kernels of a layer have the same tensors, and all
sizes of its images have the same filters and the same convolution. Most of the time that a graph takes is that of the
calls which describe them.
"""

from typing import final

from ucudnn.backends.cudnn.api.descriptor import BackendDescriptor
from ucudnn.backends.cudnn.api.enums import Attribute, DescriptorType, Type
from ucudnn.backends.cudnn.api.library import Library
from ucudnn.bounded import BoundedDict

_MOST_PARTS = 1 << 11

Given = tuple[Attribute, Type, int | tuple[int, ...]]
"""An attribute of a descriptor with its type and its value or values."""


@final
class GraphParts:
    """Makes parts of graphs, and keeps the latest ones; for graphs of one thread."""

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
