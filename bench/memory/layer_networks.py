"""The networks of the memory papers as steps of cuDNN's layers: see `layer_step`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bench.memory.layer_step import FeatureMap, LayerRules, LayerStep
from ucudnn.memory.step.graph import StepGraph

CLASSES = 1000


def alexnet(rules: LayerRules) -> StepGraph:
    """Return AlexNet in one column (Krizhevsky, 2014), of convnet-benchmarks, which the papers' prototypes take."""
    net = LayerStep("alexnet", rules, 3, 224, 224)
    x = net.image
    rows = ((64, 11, 4, 2), (192, 5, 1, 2), (384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1))
    for index, (filters, kernel, stride, padding) in enumerate(rows):
        x = net.relu(net.convolve(x, filters, kernel, stride, padding))
        x = net.pool(x, 3, 2) if index in (0, 1, 4) else x
    for width in (4096, 4096):
        x = net.relu(net.connect(net.drop(x), width))
    return net.step(net.connect(x, CLASSES))


def alexnet_2012(rules: LayerRules, *, normalized: bool = True) -> StepGraph:
    """Return the AlexNet of 2012 in one column without groups, with or without its local response normalization."""
    net = LayerStep("alexnet_2012", rules, 3, 227, 227)
    x = net.image
    rows = ((96, 11, 4, 0), (256, 5, 1, 2), (384, 3, 1, 1), (384, 3, 1, 1), (256, 3, 1, 1))
    for index, (filters, kernel, stride, padding) in enumerate(rows):
        x = net.relu(net.convolve(x, filters, kernel, stride, padding))
        x = net.respond(x) if normalized and index < 2 else x
        x = net.pool(x, 3, 2) if index in (0, 1, 4) else x
    for width in (4096, 4096):
        x = net.drop(net.relu(net.connect(x, width)))
    return net.step(net.connect(x, CLASSES))


def vgg16(rules: LayerRules) -> StepGraph:
    """Return VGG-16 (Simonyan and Zisserman, 2014, column D)."""
    net = LayerStep("vgg16", rules, 3, 224, 224)
    x = net.image
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            x = net.relu(net.convolve(x, width, 3))
        x = net.pool(x, 2, 2)
    for width in (4096, 4096):
        x = net.drop(net.relu(net.connect(x, width)))
    return net.step(net.connect(x, CLASSES))


def resnet(rules: LayerRules, counts: Sequence[int], name: str) -> StepGraph:
    """Return a residual network of bottlenecks for images of 224 x 224 (He et al., 2016)."""
    net = LayerStep(name, rules, 3, 224, 224)
    x = net.pool(net.relu(net.normalize(net.convolve(net.image, 64, 7, 2))), 3, 2, 1)
    for stage, count in enumerate(counts):
        for index in range(count):
            x = _bottleneck(net, x, 64 * 2**stage, 2 if stage and not index else 1)
    return net.step(net.connect(net.average(x), CLASSES))


def _bottleneck(net: LayerStep, x: FeatureMap, width: int, stride: int) -> FeatureMap:
    y = net.relu(net.normalize(net.convolve(x, width, 1)))
    y = net.relu(net.normalize(net.convolve(y, width, 3, stride)))
    y = net.normalize(net.convolve(y, 4 * width, 1))
    if stride > 1 or x.channels != 4 * width:
        x = net.normalize(net.convolve(x, 4 * width, 1, stride))
    return net.relu(net.add(y, x))


def residual_stages(rules: LayerRules, side: int, blocks: int, *, normalized: bool = False) -> StepGraph:
    """Return the residual network of three stages for small images (He et al., 2016), with basic blocks.

    Args:
        rules: what the program leaves open.
        side: of the images.
        blocks: of each stage; 5 make ResNet-32.
        normalized: whether convolutions have batch normalization; Dymem's figure 15 is without.
    """
    net = LayerStep(f"resnet{6 * blocks + 2}", rules, 3, side, side)

    def unit(x: FeatureMap, width: int, kernel: int, stride: int) -> FeatureMap:
        y = net.convolve(x, width, kernel, stride)
        return net.normalize(y) if normalized else y

    x = net.relu(unit(net.image, 16, 3, 1))
    for stage in range(3):
        for index in range(blocks):
            width, stride = 16 * 2**stage, 2 if stage and not index else 1
            y = unit(net.relu(unit(x, width, 3, stride)), width, 3, 1)
            x = net.relu(net.add(y, x if stride == 1 else unit(x, width, 1, stride)))
    return net.step(net.connect(net.average(x), 10))


def pre_activated(rules: LayerRules, counts: Sequence[int], name: str, side: int = 224) -> StepGraph:
    """Return a residual network of bottlenecks with pre-activation (He et al., "Identity Mappings", 2016).

    Four counts give a network for ImageNet, three one of the form for CIFAR, whose widths are 16, 32 and 64.
    """
    net = LayerStep(name, rules, 3, side, side)
    if len(counts) == 4:
        x, first = net.pool(net.convolve(net.image, 64, 7, 2), 3, 2, 1), 64
    else:
        x, first = net.convolve(net.image, 16, 3), 16
    for stage, count in enumerate(counts):
        for index in range(count):
            width, stride = first * 2**stage, 2 if stage and not index else 1
            before = net.relu(net.normalize(x))
            same = stride == 1 and x.channels == 4 * width
            y = net.relu(net.normalize(net.convolve(before, width, 1)))
            y = net.relu(net.normalize(net.convolve(y, width, 3, stride)))
            y = net.convolve(y, 4 * width, 1)
            x = net.add(y, x if same else net.convolve(before, 4 * width, 1, stride))
    return net.step(net.connect(net.average(net.relu(net.normalize(x))), CLASSES))


def inception_v4(rules: LayerRules) -> StepGraph:
    """Return Inception-v4 (Szegedy et al., 2017) for images of 299 x 299, without an auxiliary classifier."""
    net = LayerStep("inception_v4", rules, 3, 299, 299)

    def unit(
        x: FeatureMap, filters: int, kernel: int | tuple[int, int], stride: int = 1, padding: int | None = None
    ) -> FeatureMap:
        return net.relu(net.normalize(net.convolve(x, filters, kernel, stride, padding)))

    def chain(x: FeatureMap, *rows: tuple[Any, ...]) -> FeatureMap:
        for row in rows:
            x = unit(x, *row)
        return x

    row, column = (1, 7), (7, 1)
    x = chain(net.image, (32, 3, 2, 0), (32, 3, 1, 0), (64, 3))
    x = net.join([net.pool(x, 3, 2), unit(x, 96, 3, 2, 0)])
    x = net.join([
        chain(x, (64, 1), (96, 3, 1, 0)),
        chain(x, (64, 1), (64, column), (64, row), (96, 3, 1, 0)),
    ])  # fmt: skip
    x = net.join([unit(x, 192, 3, 2, 0), net.pool(x, 3, 2)])

    def smoothed(x: FeatureMap, filters: int) -> FeatureMap:
        return unit(net.pool(x, 3, 1, 1, maximum=False), filters, 1)

    for _ in range(4):
        branches = [smoothed(x, 96), unit(x, 96, 1), chain(x, (64, 1), (96, 3)), chain(x, (64, 1), (96, 3), (96, 3))]
        x = net.join(branches)
    x = net.join([net.pool(x, 3, 2), unit(x, 384, 3, 2, 0), chain(x, (192, 1), (224, 3), (256, 3, 2, 0))])
    for _ in range(7):
        long = ((192, 1), (192, row), (224, column), (224, row), (256, column))
        x = net.join(
            [smoothed(x, 128), unit(x, 384, 1), chain(x, (192, 1), (224, row), (256, column)), chain(x, *long)]
        )
    wide = chain(x, (256, 1), (256, row), (320, column), (320, 3, 2, 0))
    x = net.join([net.pool(x, 3, 2), chain(x, (192, 1), (192, 3, 2, 0)), wide])
    for _ in range(3):
        low = unit(x, 384, 1)
        high = chain(x, (384, 1), (448, (1, 3)), (512, (3, 1)))
        ends = [unit(low, 256, (1, 3)), unit(low, 256, (3, 1)), unit(high, 256, (3, 1)), unit(high, 256, (1, 3))]
        x = net.join([smoothed(x, 256), unit(x, 256, 1), *ends])
    return net.step(net.connect(net.drop(net.average(x)), CLASSES))


def dcgan(rules: LayerRules, side: int) -> StepGraph:
    """Return a generator and a discriminator of DCGAN (Radford et al., 2016), trained at once, for images of a side.

    Widths halve from level to level of the generator, from 1024 at 4 x 4 but at least 64.
    """
    net = LayerStep(f"dcgan{side}", rules, 100, 1, 1)
    x = net.raise_sides(net.convolve(net.image, 100, 1), 1024, 4, 1, 0)
    width = 1024
    while x.spatial[0] < side // 2:
        width = max(64, width // 2)
        x = net.raise_sides(net.relu(net.normalize(x)), width, 4, 2, 1)
    x = net.raise_sides(net.relu(net.normalize(x)), 3, 4, 2, 1)
    width = 64
    while x.spatial[0] > 4:
        y = net.convolve(x, width, 4, 2, 1)
        x = net.relu(y if x.channels == 3 else net.normalize(y))
        width = min(1024, 2 * width)
    return net.step(net.connect(x, 1))


NETWORKS: Mapping[str, Callable[[LayerRules], StepGraph]] = {
    "alexnet": alexnet,
    "alexnet_2012": alexnet_2012,
    "alexnet_2012_plain": partial(alexnet_2012, normalized=False),
    "vgg16": vgg16,
    "resnet32_32": partial(residual_stages, side=32, blocks=5),
    "resnet32_224": partial(residual_stages, side=224, blocks=5),
    "resnet32_299": partial(residual_stages, side=299, blocks=5),
    "resnet50": partial(resnet, counts=(3, 4, 6, 3), name="resnet50"),
    "resnet101": partial(resnet, counts=(3, 4, 23, 3), name="resnet101"),
    "resnet152": partial(resnet, counts=(3, 8, 36, 3), name="resnet152"),
    "resnet200": partial(pre_activated, counts=(3, 24, 36, 3), name="resnet200"),
    "resnet1001": partial(pre_activated, counts=(3, 24, 303, 3), name="resnet1001"),
    "resnet2000": partial(pre_activated, counts=(3, 24, 636, 3), name="resnet2000"),
    "resnet1001_cifar": partial(pre_activated, counts=(111, 111, 111), name="resnet1001_cifar"),
    "inception_v4": inception_v4,
    "dcgan512": partial(dcgan, side=512),
    "dcgan1024": partial(dcgan, side=1024),
}
"""Steps by name, at a mini-batch of 1."""
