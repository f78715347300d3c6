"""The convolutions of Inception-v3, and the branches of its modules, which may run at the same time.

Source: Szegedy et al. 2016, 'Rethinking the Inception Architecture for Computer Vision', with the structure and the
layer names of torchvision, for inputs of 299 x 299 and without the auxiliary classifier.
"""

from collections.abc import Iterator

from ucudnn.networks.layer import LayerRow

_Layer = tuple[str, int, int, int, int]  # name within its module, channels, filters, kernel height, kernel width
_Branches = tuple[tuple[_Layer, ...], ...]

INCEPTION_BATCH = 64
"""The default mini-batch size."""


def _module_a(channels: int, pool_features: int) -> _Branches:
    return (
        (("branch1x1", channels, 64, 1, 1),),
        (("branch5x5_1", channels, 48, 1, 1), ("branch5x5_2", 48, 64, 5, 5)),
        (
            ("branch3x3dbl_1", channels, 64, 1, 1),
            ("branch3x3dbl_2", 64, 96, 3, 3),
            ("branch3x3dbl_3", 96, 96, 3, 3),
        ),
        (("branch_pool", channels, pool_features, 1, 1),),
    )


def _module_b(channels: int) -> _Branches:
    return (
        (("branch3x3", channels, 384, 3, 3),),
        (
            ("branch3x3dbl_1", channels, 64, 1, 1),
            ("branch3x3dbl_2", 64, 96, 3, 3),
            ("branch3x3dbl_3", 96, 96, 3, 3),
        ),
    )


def _module_c(channels: int, inner: int) -> _Branches:
    return (
        (("branch1x1", channels, 192, 1, 1),),
        (
            ("branch7x7_1", channels, inner, 1, 1),
            ("branch7x7_2", inner, inner, 1, 7),
            ("branch7x7_3", inner, 192, 7, 1),
        ),
        (
            ("branch7x7dbl_1", channels, inner, 1, 1),
            ("branch7x7dbl_2", inner, inner, 7, 1),
            ("branch7x7dbl_3", inner, inner, 1, 7),
            ("branch7x7dbl_4", inner, inner, 7, 1),
            ("branch7x7dbl_5", inner, 192, 1, 7),
        ),
        (("branch_pool", channels, 192, 1, 1),),
    )


def _module_d(channels: int) -> _Branches:
    return (
        (("branch3x3_1", channels, 192, 1, 1), ("branch3x3_2", 192, 320, 3, 3)),
        (
            ("branch7x7x3_1", channels, 192, 1, 1),
            ("branch7x7x3_2", 192, 192, 1, 7),
            ("branch7x7x3_3", 192, 192, 7, 1),
            ("branch7x7x3_4", 192, 192, 3, 3),
        ),
    )


def _module_e(channels: int) -> _Branches:
    # Each pair a, b reads the same tensor and could run at the same time too; as a sequence it stays one branch.
    return (
        (("branch1x1", channels, 320, 1, 1),),
        (
            ("branch3x3_1", channels, 384, 1, 1),
            ("branch3x3_2a", 384, 384, 1, 3),
            ("branch3x3_2b", 384, 384, 3, 1),
        ),
        (
            ("branch3x3dbl_1", channels, 448, 1, 1),
            ("branch3x3dbl_2", 448, 384, 3, 3),
            ("branch3x3dbl_3a", 384, 384, 1, 3),
            ("branch3x3dbl_3b", 384, 384, 3, 1),
        ),
        (("branch_pool", channels, 192, 1, 1),),
    )


_STEM: tuple[LayerRow, ...] = (  # a pooling layer halves the size after 2b and after 4a
    ("Conv2d_1a_3x3", 1, 3, 299, 32, 3, 0, 2),
    ("Conv2d_2a_3x3", 1, 32, 149, 32, 3, 0, 1),
    ("Conv2d_2b_3x3", 1, 32, 147, 64, 3, 1, 1),
    ("Conv2d_3b_1x1", 1, 64, 73, 80, 1, 0, 1),
    ("Conv2d_4a_3x3", 1, 80, 73, 192, 3, 0, 1),
)

# The columns: name, height = width, stride of the last layer of each branch, branches.
_MODULES: tuple[tuple[str, int, int, _Branches], ...] = (
    ("Mixed_5b", 35, 1, _module_a(192, pool_features=32)),
    ("Mixed_5c", 35, 1, _module_a(256, pool_features=64)),
    ("Mixed_5d", 35, 1, _module_a(288, pool_features=64)),
    ("Mixed_6a", 35, 2, _module_b(288)),
    ("Mixed_6b", 17, 1, _module_c(768, inner=128)),
    ("Mixed_6c", 17, 1, _module_c(768, inner=160)),
    ("Mixed_6d", 17, 1, _module_c(768, inner=160)),
    ("Mixed_6e", 17, 1, _module_c(768, inner=192)),
    ("Mixed_7a", 17, 2, _module_d(768)),
    ("Mixed_7b", 8, 1, _module_e(1280)),
    ("Mixed_7c", 8, 1, _module_e(2048)),
)


def _module_rows() -> Iterator[LayerRow]:
    for module, size, last_stride, branches in _MODULES:
        for branch in branches:
            for layer in branch:
                name, channels, filters, height, width = layer
                stride = last_stride if layer is branch[-1] else 1
                padding = (height // 2, width // 2) if stride == 1 else (0, 0)
                yield f"{module}.{name}", 1, channels, size, filters, (height, width), padding, stride


INCEPTION_ROWS: tuple[LayerRow, ...] = (*_STEM, *_module_rows())
"""All convolutions, in torchvision's order."""

INCEPTION_GROUPS: tuple[tuple[tuple[str, ...], ...], ...] = tuple(
    tuple(tuple(f"{module}.{layer[0]}" for layer in branch) for branch in branches)
    for module, _, _, branches in _MODULES
)
"""The branches of each module, each with the names of layers that run one after another."""
