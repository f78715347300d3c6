"""The convolutions of DenseNet-121.

Source: Huang et al. 2017, 'Densely Connected Convolutional Networks', with the structure and the layer names of
torchvision, for inputs of 224 x 224.
"""

from collections.abc import Iterator

from ucudnn.networks.layer import LayerRow

_GROWTH = 32  # channels that each layer of a block adds to its input
_BOTTLENECK = 4 * _GROWTH
_BLOCKS = ((56, 6), (28, 12), (14, 24), (7, 16))  # height = width, layers
_STEM_FILTERS = 64


def _rows() -> Iterator[LayerRow]:
    channels = _STEM_FILTERS
    yield "features.conv0", 1, 3, 224, channels, 7, 3, 2  # a pooling layer halves the size after it
    for block, (size, layers) in enumerate(_BLOCKS, 1):
        for layer in range(1, layers + 1):
            name = f"features.denseblock{block}.denselayer{layer}"
            yield f"{name}.conv1", 1, channels, size, _BOTTLENECK, 1, 0, 1
            if layer == 1:  # the other layers of the block have the same shape
                yield f"{name}.conv2", layers, _BOTTLENECK, size, _GROWTH, 3, 1, 1
            channels += _GROWTH
        if block < len(_BLOCKS):  # a pooling layer halves the size after it
            yield f"features.transition{block}.conv", 1, channels, size, channels // 2, 1, 0, 1
            channels //= 2


DENSENET_ROWS: tuple[LayerRow, ...] = tuple(_rows())
"""All convolutions in torchvision's order, one for each shape."""
