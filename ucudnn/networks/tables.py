"""Networks as tables of convolution layers: some by name, others from CSV files."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from ucudnn.bounded import named_file, read_whole
from ucudnn.errors import InvalidNetworkError, InvalidProblemError, InvalidValueError
from ucudnn.kernel import Kernel
from ucudnn.networks.inception import INCEPTION_GROUPS, INCEPTION_ROWS
from ucudnn.networks.layer import Layer, LayerRow
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.units import shortened

CSV_HEADER = "source,W,H,C_in,N,C_out,kernel_w,kernel_h,pad_w,pad_h,stride_w,stride_h"
"""Header of a table of layers. DeepBench's convolutions are published in this form."""

_MOST_BYTES = 1 << 22  # of a table: 50,000 layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The convolutions of a network.

    Attributes:
        name: its name, or the stem of the file's name.
        layers: its convolution layers: one for each shape, or all of them if there are groups.
        groups: sets of layers that may run at the same time. Each set has branches, and each branch has the names of
            layers that run one after another. A layer in no set runs alone.
    """

    name: str
    layers: tuple[Layer, ...]
    groups: tuple[tuple[tuple[str, ...], ...], ...] = ()

    @property
    def batch(self) -> int | None:
        """The mini-batch size, or None if the layers have different ones."""
        batches = {layer.forward.batch for layer in self.layers}
        return batches.pop() if len(batches) == 1 else None

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels of all layers."""
        return tuple(kernel for layer in self.layers for kernel in layer.kernels())


def load_network(name: str, batch: int | None = None) -> Network:
    """Return a network by name or from a CSV file of layers.

    Args:
        name: the name of a network in `NETWORKS`, or the path of a file with the columns of `CSV_HEADER`.
        batch: mini-batch size; None for the size in the paper or in the file.

    Raises:
        InvalidNetworkError, InvalidProblemError: if there is neither, the file is no table of layers, or a layer no
            convolution.
    """
    if name in _TABLES:
        default_batch, rows = _TABLES[name]
        batch = default_batch if batch is None else batch
        layers = tuple(Layer.of_row(row, batch, _DIMENSIONS.get(name, 2)) for row in rows)
        return Network(name=name, layers=layers, groups=_GROUPS.get(name, ()))
    neither = f"known nor a file: give one of {', '.join(NETWORKS)} or a CSV file with the header {CSV_HEADER}"
    return _read_csv(named_file("network", name, InvalidNetworkError, neither), batch)


def _read_csv(path: Path, batch: int | None) -> Network:
    try:
        reader = csv.DictReader(StringIO(read_whole(path, _MOST_BYTES).decode("utf-8-sig"), newline=""))
        missing = [column for column in CSV_HEADER.split(",") if column not in (reader.fieldnames or ())]
        if missing:
            raise InvalidNetworkError(f"{path}: column {missing[0]} is missing: the header must be {CSV_HEADER}")
        layers = [_csv_layer(path, reader.line_num, row, batch) for row in reader]
    except InvalidNetworkError:
        raise
    except (OSError, UnicodeDecodeError, csv.Error, InvalidValueError) as error:
        raise InvalidNetworkError(f"{path} cannot be read: {error}") from error
    if not layers:
        raise InvalidNetworkError(f"{path} has no layers below its header")
    return Network(name=path.stem, layers=tuple(layers))


def _csv_layer(path: Path, line: int, row: dict[str, str | None], batch: int | None) -> Layer:
    def size(column: str) -> int:
        try:
            return int(row[column] or "")
        except ValueError as error:
            raise InvalidNetworkError(f"{path}:{line}: {column} {shortened(row[column])} is no whole number") from error

    sizes = {column: size(column) for column in CSV_HEADER.split(",") if column != "source"}
    try:
        problem = ConvolutionProblem(
            operation=Operation.FORWARD,
            batch=sizes["N"] if batch is None else batch,
            channels=sizes["C_in"],
            spatial=(sizes["H"], sizes["W"]),
            filters=sizes["C_out"],
            kernel=(sizes["kernel_h"], sizes["kernel_w"]),
            padding=(sizes["pad_h"], sizes["pad_w"]),
            stride=(sizes["stride_h"], sizes["stride_w"]),
        )
    except InvalidProblemError as error:
        raise InvalidNetworkError(f"{path}:{line}: {error}") from error
    return Layer(name=f"{row['source'] or path.stem}:{line - 1}", forward=problem)


_GROWTH = 32  # channels that each layer of a block of DenseNet adds to its input
_BOTTLENECK = 4 * _GROWTH
_BLOCKS = ((56, 6), (28, 12), (14, 24), (7, 16))  # height = width, layers
_STEM_FILTERS = 64


def _densenet_rows() -> Iterator[LayerRow]:
    """Yield the convolutions of DenseNet-121, one for each shape, for inputs of 224 x 224.

    Source: Huang et al. 2017, 'Densely Connected Convolutional Networks', with torchvision's structure and names.
    """
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


_DIMENSIONS = {"unet3d": 3}
_GROUPS = {"inception3": INCEPTION_GROUPS}
_TABLES: dict[str, tuple[int, tuple[LayerRow, ...]]] = {  # each with its default mini-batch size
    "alexnet": (  # single-column, as in the paper
        256,
        (
            ("conv1", 1, 3, 224, 64, 11, 2, 4),
            ("conv2", 1, 64, 27, 192, 5, 2, 1),
            ("conv3", 1, 192, 13, 384, 3, 1, 1),
            ("conv4", 1, 384, 13, 384, 3, 1, 1),
            ("conv5", 1, 384, 13, 256, 3, 1, 1),
        ),
    ),
    "vgg16": (
        64,
        (
            ("conv1_1", 1, 3, 224, 64, 3, 1, 1),
            ("conv1_2", 1, 64, 224, 64, 3, 1, 1),
            ("conv2_1", 1, 64, 112, 128, 3, 1, 1),
            ("conv2_2", 1, 128, 112, 128, 3, 1, 1),
            ("conv3_1", 1, 128, 56, 256, 3, 1, 1),
            ("conv3_2", 2, 256, 56, 256, 3, 1, 1),
            ("conv4_1", 1, 256, 28, 512, 3, 1, 1),
            ("conv4_2", 2, 512, 28, 512, 3, 1, 1),
            ("conv5_1", 3, 512, 14, 512, 3, 1, 1),
        ),
    ),
    "resnet18": (
        128,
        (
            ("conv1", 1, 3, 224, 64, 7, 3, 2),
            ("l1.0.conv1", 4, 64, 56, 64, 3, 1, 1),
            ("l2.0.conv1", 1, 64, 56, 128, 3, 1, 2),
            ("l2.0.conv2", 3, 128, 28, 128, 3, 1, 1),
            ("l2.0.down", 1, 64, 56, 128, 1, 0, 2),
            ("l3.0.conv1", 1, 128, 28, 256, 3, 1, 2),
            ("l3.0.conv2", 3, 256, 14, 256, 3, 1, 1),
            ("l3.0.down", 1, 128, 28, 256, 1, 0, 2),
            ("l4.0.conv1", 1, 256, 14, 512, 3, 1, 2),
            ("l4.0.conv2", 3, 512, 7, 512, 3, 1, 1),
            ("l4.0.down", 1, 256, 14, 512, 1, 0, 2),
        ),
    ),
    "resnet50": (  # the stride sits in the 3x3 convolutions (v1.5)
        32,
        (
            ("conv1", 1, 3, 224, 64, 7, 3, 2),
            ("l1.0.conv1", 1, 64, 56, 64, 1, 0, 1),
            ("l1.0.conv2", 3, 64, 56, 64, 3, 1, 1),
            ("l1.0.conv3", 4, 64, 56, 256, 1, 0, 1),
            ("l1.1.conv1", 2, 256, 56, 64, 1, 0, 1),
            ("l2.0.conv1", 1, 256, 56, 128, 1, 0, 1),
            ("l2.0.conv2", 1, 128, 56, 128, 3, 1, 2),
            ("l2.0.conv3", 4, 128, 28, 512, 1, 0, 1),
            ("l2.0.down", 1, 256, 56, 512, 1, 0, 2),
            ("l2.1.conv1", 3, 512, 28, 128, 1, 0, 1),
            ("l2.1.conv2", 3, 128, 28, 128, 3, 1, 1),
            ("l3.0.conv1", 1, 512, 28, 256, 1, 0, 1),
            ("l3.0.conv2", 1, 256, 28, 256, 3, 1, 2),
            ("l3.0.conv3", 6, 256, 14, 1024, 1, 0, 1),
            ("l3.0.down", 1, 512, 28, 1024, 1, 0, 2),
            ("l3.1.conv1", 5, 1024, 14, 256, 1, 0, 1),
            ("l3.1.conv2", 5, 256, 14, 256, 3, 1, 1),
            ("l4.0.conv1", 1, 1024, 14, 512, 1, 0, 1),
            ("l4.0.conv2", 1, 512, 14, 512, 3, 1, 2),
            ("l4.0.conv3", 3, 512, 7, 2048, 1, 0, 1),
            ("l4.0.down", 1, 1024, 14, 2048, 1, 0, 2),
            ("l4.1.conv1", 2, 2048, 7, 512, 1, 0, 1),
            ("l4.1.conv2", 2, 512, 7, 512, 3, 1, 1),
        ),
    ),
    "resnet1001": (  # of bottlenecks with pre-activation, for CIFAR (He et al. 2016, "Identity Mappings")
        128,
        (
            ("conv1", 1, 3, 32, 16, 3, 1, 1),
            ("l1.0.conv1", 1, 16, 32, 16, 1, 0, 1),
            ("l1.0.conv2", 111, 16, 32, 16, 3, 1, 1),
            ("l1.0.conv3", 112, 16, 32, 64, 1, 0, 1),
            ("l1.1.conv1", 110, 64, 32, 16, 1, 0, 1),
            ("l2.0.conv1", 1, 64, 32, 32, 1, 0, 2),
            ("l2.0.conv2", 111, 32, 16, 32, 3, 1, 1),
            ("l2.0.conv3", 111, 32, 16, 128, 1, 0, 1),
            ("l2.0.down", 1, 64, 32, 128, 1, 0, 2),
            ("l2.1.conv1", 110, 128, 16, 32, 1, 0, 1),
            ("l3.0.conv1", 1, 128, 16, 64, 1, 0, 2),
            ("l3.0.conv2", 111, 64, 8, 64, 3, 1, 1),
            ("l3.0.conv3", 111, 64, 8, 256, 1, 0, 1),
            ("l3.0.down", 1, 128, 16, 256, 1, 0, 2),
            ("l3.1.conv1", 110, 256, 8, 64, 1, 0, 1),
        ),
    ),
    "densenet121": (64, tuple(_densenet_rows())),
    "unet3d": (  # Cicek et al. 2016, padded, on volumes of 64 x 64 x 64; without its transposed convolutions
        4,
        (
            ("enc1.conv1", 1, 1, 64, 32, 3, 1, 1),
            ("enc1.conv2", 1, 32, 64, 64, 3, 1, 1),
            ("enc2.conv1", 1, 64, 32, 64, 3, 1, 1),
            ("enc2.conv2", 1, 64, 32, 128, 3, 1, 1),
            ("enc3.conv1", 1, 128, 16, 128, 3, 1, 1),
            ("enc3.conv2", 1, 128, 16, 256, 3, 1, 1),
            ("enc4.conv1", 1, 256, 8, 256, 3, 1, 1),
            ("enc4.conv2", 1, 256, 8, 512, 3, 1, 1),
            ("dec3.conv1", 1, 768, 16, 256, 3, 1, 1),
            ("dec3.conv2", 1, 256, 16, 256, 3, 1, 1),
            ("dec2.conv1", 1, 384, 32, 128, 3, 1, 1),
            ("dec2.conv2", 1, 128, 32, 128, 3, 1, 1),
            ("dec1.conv1", 1, 192, 64, 64, 3, 1, 1),
            ("dec1.conv2", 1, 64, 64, 64, 3, 1, 1),
            ("head", 1, 64, 64, 3, 1, 0, 1),
        ),
    ),
    "inception3": (64, INCEPTION_ROWS),
}

NETWORKS: tuple[str, ...] = tuple(_TABLES)
"""Names of the networks that come with ucudnn."""
