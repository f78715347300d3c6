"""DenseNet-121: its convolutions.

Huang et al. 2017, 'Densely Connected Convolutional Networks', in torchvision's structure and with its names of layers,
for inputs of 224 x 224.
"""

from collections.abc import Iterator

DenseNetRow = tuple[str, int, int, int, int, int, int, int]
"""Name of the first such layer, count, channels, height = width, filters, kernel, padding and stride."""

DENSENET_BATCH = 64
"""Mini-batch size where none is given."""

_GROWTH = 32  # channels that each layer of a block adds to those it reads
_BOTTLENECK = 4 * _GROWTH
_BLOCKS = ((56, 6), (28, 12), (14, 24), (7, 16))  # height = width, layers
_STEM: DenseNetRow = ("features.conv0", 1, 3, 224, 64, 7, 3, 2)  # a pooling halves the size after it


def _rows() -> Iterator[DenseNetRow]:
    yield _STEM
    channels = _STEM[4]
    for block, (size, layers) in enumerate(_BLOCKS, 1):
        for layer in range(1, layers + 1):
            name = f"features.denseblock{block}.denselayer{layer}"
            yield f"{name}.conv1", 1, channels, size, _BOTTLENECK, 1, 0, 1
            if layer == 1:  # the others' have the same shape
                yield f"{name}.conv2", layers, _BOTTLENECK, size, _GROWTH, 3, 1, 1
            channels += _GROWTH
        if block < len(_BLOCKS):  # a pooling halves the size after it
            yield f"features.transition{block}.conv", 1, channels, size, channels // 2, 1, 0, 1
            channels //= 2


DENSENET_ROWS: tuple[DenseNetRow, ...] = tuple(_rows())
"""All convolutions, one for each shape, in torchvision's order."""
