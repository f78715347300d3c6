"""The convolutions of Inception-v3, and the branches of its modules, which may run at the same time.

Source: Szegedy et al. 2016, 'Rethinking the Inception Architecture for Computer Vision', with the structure and the
layer names of torchvision, for inputs of 299 x 299 and without the auxiliary classifier.
"""

from collections.abc import Iterator

from ucudnn.networks.layer import LayerRow

_Layer = tuple[str, int, int, int]  # name within its module, filters, kernel height, kernel width
_Branches = tuple[tuple[_Layer, ...], ...]  # of the layers of a branch, each reads what the one before it writes

_DOUBLE_3X3: tuple[_Layer, ...] = (
    ("branch3x3dbl_1", 64, 1, 1),
    ("branch3x3dbl_2", 96, 3, 3),
    ("branch3x3dbl_3", 96, 3, 3),
)


def _module_a(pool_features: int) -> _Branches:
    return (
        (("branch1x1", 64, 1, 1),),
        (("branch5x5_1", 48, 1, 1), ("branch5x5_2", 64, 5, 5)),
        _DOUBLE_3X3,
        (("branch_pool", pool_features, 1, 1),),
    )


_MODULE_B: _Branches = ((("branch3x3", 384, 3, 3),), _DOUBLE_3X3)


def _module_c(inner: int) -> _Branches:
    return (
        (("branch1x1", 192, 1, 1),),
        (("branch7x7_1", inner, 1, 1), ("branch7x7_2", inner, 1, 7), ("branch7x7_3", 192, 7, 1)),
        (
            *(("branch7x7dbl_1", inner, 1, 1), ("branch7x7dbl_2", inner, 7, 1), ("branch7x7dbl_3", inner, 1, 7)),
            *(("branch7x7dbl_4", inner, 7, 1), ("branch7x7dbl_5", 192, 1, 7)),
        ),
        (("branch_pool", 192, 1, 1),),
    )


_MODULE_D: _Branches = (
    (("branch3x3_1", 192, 1, 1), ("branch3x3_2", 320, 3, 3)),
    (
        *(("branch7x7x3_1", 192, 1, 1), ("branch7x7x3_2", 192, 1, 7)),
        *(("branch7x7x3_3", 192, 7, 1), ("branch7x7x3_4", 192, 3, 3)),
    ),
)
_MODULE_E: _Branches = (
    # Each pair a, b reads the same tensor and could run at the same time too; as a sequence it stays one branch.
    (("branch1x1", 320, 1, 1),),
    (("branch3x3_1", 384, 1, 1), ("branch3x3_2a", 384, 1, 3), ("branch3x3_2b", 384, 3, 1)),
    (
        *(("branch3x3dbl_1", 448, 1, 1), ("branch3x3dbl_2", 384, 3, 3)),
        *(("branch3x3dbl_3a", 384, 1, 3), ("branch3x3dbl_3b", 384, 3, 1)),
    ),
    (("branch_pool", 192, 1, 1),),
)

_STEM: tuple[LayerRow, ...] = (  # a pooling layer halves the size after 2b and after 4a
    ("Conv2d_1a_3x3", 1, 3, 299, 32, 3, 0, 2),
    ("Conv2d_2a_3x3", 1, 32, 149, 32, 3, 0, 1),
    ("Conv2d_2b_3x3", 1, 32, 147, 64, 3, 1, 1),
    ("Conv2d_3b_1x1", 1, 64, 73, 80, 1, 0, 1),
    ("Conv2d_4a_3x3", 1, 80, 73, 192, 3, 0, 1),
)

# The columns: name, channels, height = width, stride of the last layer of each branch, branches.
_MODULES: tuple[tuple[str, int, int, int, _Branches], ...] = (
    ("Mixed_5b", 192, 35, 1, _module_a(pool_features=32)),
    ("Mixed_5c", 256, 35, 1, _module_a(pool_features=64)),
    ("Mixed_5d", 288, 35, 1, _module_a(pool_features=64)),
    ("Mixed_6a", 288, 35, 2, _MODULE_B),
    ("Mixed_6b", 768, 17, 1, _module_c(inner=128)),
    ("Mixed_6c", 768, 17, 1, _module_c(inner=160)),
    ("Mixed_6d", 768, 17, 1, _module_c(inner=160)),
    ("Mixed_6e", 768, 17, 1, _module_c(inner=192)),
    ("Mixed_7a", 768, 17, 2, _MODULE_D),
    ("Mixed_7b", 1280, 8, 1, _MODULE_E),
    ("Mixed_7c", 2048, 8, 1, _MODULE_E),
)


def _module_rows() -> Iterator[LayerRow]:
    for module, module_channels, size, last_stride, branches in _MODULES:
        for branch in branches:
            channels = module_channels
            for layer in branch:
                name, filters, height, width = layer
                stride = last_stride if layer is branch[-1] else 1
                padding = (height // 2, width // 2) if stride == 1 else (0, 0)
                yield f"{module}.{name}", 1, channels, size, filters, (height, width), padding, stride
                channels = filters


INCEPTION_ROWS: tuple[LayerRow, ...] = (*_STEM, *_module_rows())
"""All convolutions, in torchvision's order."""

INCEPTION_GROUPS: tuple[tuple[tuple[str, ...], ...], ...] = tuple(
    tuple(tuple(f"{module}.{layer[0]}" for layer in branch) for branch in branches) for module, *_, branches in _MODULES
)
"""The branches of each module, each with the names of layers that run one after another."""
