"""Variants of networks: other data types, math modes and layouts than those of their tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ucudnn.errors import SettingsError
from ucudnn.networks.tables import Network
from ucudnn.problem import ConvolutionProblem, DataType, Layout, MathMode
from ucudnn.settings import parse_choice

LAYOUT_NAMES: Mapping[str, bool] = {
    "first": False,
    "last": True,
    **{layout.value: layout.channels_last for layout in sorted(Layout, key=lambda each: each.dimensions != 2)},
}
"""Names of layouts on the command line, NCHW and NHWC among them, with whether channels are the last dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The data type, the math mode and the layout in which a network computes.

    Attributes:
        dtype: data type.
        math: whether float32 may be multiplied as TF32.
        channels_last: whether channels are the last dimension, as in NHWC, instead of the first, as in NCHW.
    """

    dtype: DataType = DataType.FLOAT32
    math: MathMode = MathMode.TF32
    channels_last: bool = False

    def of(self, problem: ConvolutionProblem) -> ConvolutionProblem:
        """Return a problem in this variant."""
        layouts = (each for each in Layout if each.dimensions == len(problem.spatial))
        layout = next(each for each in layouts if each.channels_last is self.channels_last)
        return replace(problem, dtype=self.dtype, math=self.math, layout=layout)

    def of_network(self, network: Network) -> Network:
        """Return a network in this variant."""
        layers = tuple(replace(layer, forward=self.of(layer.forward)) for layer in network.layers)
        return replace(network, layers=layers)


def variants(dtypes: Sequence[str] | None, maths: Sequence[str] | None, layouts: Sequence[str] | None) -> list[Variant]:
    """Return all different combinations of data types, math modes and layouts, by their names.

    None stands for float32, for tf32, and for channels first. A SettingsError names what is not known.
    """
    found: dict[Variant, None] = {}
    for dtype in [parse_choice(DataType, each, "--dtype") for each in dtypes or ["float32"]]:
        for math in [parse_choice(MathMode, each, "--math") for each in maths or ["tf32"]]:
            for name in layouts or ["first"]:
                last = next((value for known, value in LAYOUT_NAMES.items() if known.lower() == name.lower()), None)
                if last is None:
                    raise SettingsError(f"--layout={name!r} is not known: give first or NCHW, or last or NHWC")
                plain = math if dtype is DataType.FLOAT32 else MathMode.TF32  # it makes no difference to other types
                found[Variant(dtype=dtype, math=plain, channels_last=last)] = None
    return list(found)
