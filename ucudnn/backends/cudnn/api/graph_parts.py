"""The descriptors that operation graphs have in common: tensors, the convolution, and values of engines' knobs.

A finalized descriptor does not change, so graphs share it. The three kernels of a layer have the same tensors, and all
sizes of its images have the same filters and the same convolution. Most of the time that a graph takes is that of the
calls which describe them.
"""

from typing import NamedTuple, final

from ucudnn.backends.cudnn.api.descriptor import BackendDescriptor
from ucudnn.backends.cudnn.api.enums import CROSS_CORRELATION, Attribute, DescriptorType, Type
from ucudnn.backends.cudnn.api.library import Library
from ucudnn.bounded import BoundedDict

_MOST_CONVOLUTIONS, _MOST_TENSORS = 1 << 8, 1 << 10


@final
class TensorPart(NamedTuple):
    """What the descriptor of a tensor in a graph says.

    Attributes:
        identity: its unique id in the graph and in variant packs.
        strides: distance of neighbours in each dimension, in elements.
        alignment: of its address, in bytes.
        virtual: whether it has no memory, because another operation of the graph reads it at once.
    """

    identity: int
    data_type: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int
    virtual: bool = False


@final
class ConvolutionPart(NamedTuple):
    """What the descriptor of a convolution says; each of its tuples has a number for each spatial dimension."""

    compute_type: int
    padding: tuple[int, ...]
    post_padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]


@final
class GraphParts:
    """Makes parts of graphs, and keeps the latest ones; for graphs of one thread."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._tensors: BoundedDict[TensorPart, BackendDescriptor] = BoundedDict(_MOST_TENSORS)
        self._convolutions: BoundedDict[ConvolutionPart, BackendDescriptor] = BoundedDict(_MOST_CONVOLUTIONS)
        self._choices: dict[tuple[int, int], BackendDescriptor] = {}  # few: types of knobs have few values each

    def tensor(self, part: TensorPart) -> BackendDescriptor:
        """Return the descriptor of a tensor."""
        found = self._tensors.get(part)
        if found is None:
            found = (
                self._new(DescriptorType.TENSOR)
                .set(Attribute.TENSOR_DATA_TYPE, Type.DATA_TYPE, part.data_type)
                .set(Attribute.TENSOR_DIMENSIONS, Type.INT64, part.sizes)
                .set(Attribute.TENSOR_STRIDES, Type.INT64, part.strides)
                .set(Attribute.TENSOR_UNIQUE_ID, Type.INT64, part.identity)
                .set(Attribute.TENSOR_BYTE_ALIGNMENT, Type.INT64, part.alignment)
            )
            if part.virtual:
                found.set(Attribute.TENSOR_IS_VIRTUAL, Type.BOOLEAN, True)
            self._tensors[part] = found.finalize()
        return found

    def convolution(self, part: ConvolutionPart) -> BackendDescriptor:
        """Return the descriptor of a convolution."""
        found = self._convolutions.get(part)
        if found is None:
            found = (
                self._new(DescriptorType.CONVOLUTION)
                .set(Attribute.CONVOLUTION_COMP_TYPE, Type.DATA_TYPE, part.compute_type)
                .set(Attribute.CONVOLUTION_CONV_MODE, Type.CONVOLUTION_MODE, CROSS_CORRELATION)
                .set(Attribute.CONVOLUTION_SPATIAL_DIMS, Type.INT64, len(part.padding))
                .set(Attribute.CONVOLUTION_PRE_PADDINGS, Type.INT64, part.padding)
                .set(Attribute.CONVOLUTION_POST_PADDINGS, Type.INT64, part.post_padding)
                .set(Attribute.CONVOLUTION_FILTER_STRIDES, Type.INT64, part.stride)
                .set(Attribute.CONVOLUTION_DILATIONS, Type.INT64, part.dilation)
                .finalize()
            )
            self._convolutions[part] = found
        return found

    def choice(self, kind: int, value: int) -> BackendDescriptor:
        """Return the choice of a knob's value."""
        found = self._choices.get((kind, value))
        if found is None:
            found = self._new(DescriptorType.KNOB_CHOICE).set(Attribute.KNOB_CHOICE_KNOB_TYPE, Type.KNOB_TYPE, kind)
            found.set(Attribute.KNOB_CHOICE_KNOB_VALUE, Type.INT64, value).finalize()
            self._choices[kind, value] = found
        return found

    def _new(self, kind: DescriptorType) -> BackendDescriptor:
        return BackendDescriptor(self._library, kind)
