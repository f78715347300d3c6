"""Variants of problems and networks."""

from dataclasses import replace

import pytest

from ucudnn.errors import SettingsError
from ucudnn.networks.tables import load_network
from ucudnn.networks.variants import Variant, variants
from ucudnn.problem import DataType, Layout, MathMode


def test_variants_are_all_different_combinations():
    assert variants(None, None, None) == [Variant()]
    found = variants(["float32", "float16"], ["tf32", "fma"], ["first", "last"])
    assert len(found) == len(set(found)) == 6
    assert Variant(dtype=DataType.FLOAT16, math=MathMode.FMA) not in found
    assert variants(None, None, ["NHWC", "ndhwc", "last"]) == [Variant(channels_last=True)]
    assert variants(None, None, ["nchw", "first"]) == [Variant()]
    with pytest.raises(SettingsError, match="--layout='CHWN' is not known: give first or NCHW, or last or NHWC"):
        variants(None, None, ["CHWN"])
    with pytest.raises(SettingsError, match="--dtype"):
        variants(["int8"], None, None)


def test_a_variant_sets_the_layout():
    problem = load_network("unet3d").kernels()[0].problem
    assert Variant(channels_last=True).of(problem).layout is Layout.NDHWC
    assert Variant().of(replace(problem, math=MathMode.FMA)) == problem


def test_a_variant_of_a_network_changes_every_kernel():
    variant = Variant(dtype=DataType.FLOAT16, channels_last=True)
    plain, network = load_network("resnet18"), variant.of_network(load_network("resnet18"))
    assert [kernel.count for kernel in network.kernels()] == [kernel.count for kernel in plain.kernels()]
    problems = [kernel.problem for kernel in network.kernels()]
    assert {(problem.dtype, problem.layout) for problem in problems} == {(DataType.FLOAT16, Layout.NHWC)}
    assert [problem.spatial for problem in problems] == [kernel.problem.spatial for kernel in plain.kernels()]
