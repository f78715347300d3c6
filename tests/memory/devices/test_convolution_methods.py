"""Tests of algorithms: their workspaces are those that cuDNN reports, and each one knows what it can compute."""

from math import prod

import pytest

from ucudnn.memory.devices.convolution_methods import METHODS
from ucudnn.problem import ConvolutionProblem, Operation

# What cuDNN 9.19 reports for its legacy algorithms in float32 (FMA).
REPORTED = [
    ("fft", (256, 64, 27, 192, 5, 2), 338_690_048),
    ("fft", (128, 64, 27, 192, 5, 2), 196_083_712),
    ("fft", (32, 64, 27, 192, 5, 2), 89_128_960),
    ("fft", (32, 128, 28, 128, 3, 1), 106_954_752),
    ("fft", (32, 64, 56, 64, 3, 1), 53_477_376),
    ("winograd_nonfused", (256, 192, 13, 384, 3, 1), 350_355_456),
    ("winograd_nonfused", (32, 192, 13, 384, 3, 1), 53_084_160),
    ("winograd_nonfused", (32, 128, 28, 128, 3, 1), 60_162_048),
    ("winograd_nonfused", (32, 64, 56, 64, 3, 1), 116_195_328),
]


def convolution(batch, channels, side, filters, kernel, padding, operation=Operation.FORWARD, **fields):
    return ConvolutionProblem(
        operation=operation,
        batch=batch,
        channels=channels,
        spatial=(side, side),
        filters=filters,
        kernel=(kernel, kernel),
        padding=(padding, padding),
        **fields,
    )


@pytest.mark.parametrize(("method", "shape", "workspace"), REPORTED)
def test_workspaces_are_those_of_cudnn(method, shape, workspace):
    assert METHODS[method](convolution(*shape)).workspace_bytes == workspace


def test_only_the_implicit_product_needs_no_workspace():
    problem = convolution(16, 64, 28, 64, 3, 1)
    assert [name for name, method in METHODS.items() if method(problem).workspace_bytes == 0] == ["implicit_gemm"]


def test_transforms_multiply_less_than_the_direct_method():
    problem = convolution(64, 128, 28, 128, 3, 1)
    direct = 2 * problem.multiplications
    found = {name: method(problem).flops / direct for name, method in METHODS.items()}
    assert found["implicit_gemm"] == found["precomputed_gemm"] == 1
    assert found["winograd"] == pytest.approx(16 / 36, abs=0.001)
    assert found["winograd_nonfused"] == pytest.approx(36 / (16 * 9), abs=0.001)
    assert found["fft"] == pytest.approx(8 * 32 * 17 / (2 * 9 * 28**2), abs=0.001)


@pytest.mark.parametrize(
    ("problem", "names"),
    [
        (convolution(8, 16, 28, 16, 1, 0), {"implicit_gemm", "precomputed_gemm"}),
        (convolution(8, 16, 28, 16, 5, 2), {"implicit_gemm", "precomputed_gemm", "fft"}),
        (convolution(8, 16, 28, 16, 3, 1, stride=(2, 2)), {"implicit_gemm", "precomputed_gemm"}),
        (convolution(8, 16, 28, 16, 3, 1, groups=2), {"implicit_gemm", "precomputed_gemm"}),
        (convolution(8, 16, 28, 16, 3, 1), {*METHODS}),
        (convolution(8, 16, 28, 16, 3, 1, Operation.BACKWARD_FILTER), {*METHODS} - {"winograd"}),
    ],
)
def test_an_algorithm_knows_what_it_can_compute(problem, names):
    assert {name for name, method in METHODS.items() if method(problem) is not None} == names


def test_the_gradient_of_a_strided_layers_input_multiplies_zeros():
    problem = convolution(8, 16, 28, 16, 3, 1, Operation.BACKWARD_DATA, stride=(2, 2))
    assert METHODS["implicit_gemm"](problem).flops == 2 * 2 * problem.multiplications
    assert prod(problem.stride) == 4
