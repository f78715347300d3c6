"""Operators of backward that write over an operand on a GPU: small steps, and the bits of operators at full size."""

import pytest
import torch

from tests.support.in_place import KINDS, race, written_over
from ucudnn.memory.torch.tracing import in_place

aten = torch.ops.aten


@pytest.mark.parametrize("kind", KINDS)
def test_an_operator_writes_over_the_gradient_that_it_is_given(kind):
    found = race(KINDS[kind], device="cuda")
    assert kind in written_over(found.program.graph)
    found.check(found.fitted("spill"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2048, 50257), (300001, 17), (64, 512, 1024), (3, 1021, 2053)])
@pytest.mark.parametrize(
    ("func", "rest"),
    [
        (aten._log_softmax_backward_data.default, [-1]),
        (aten._softmax_backward_data.default, [-1]),
        (aten._log_softmax_backward_data.default, [0]),
        (aten._softmax_backward_data.default, [0]),
        (aten.threshold_backward.default, [0]),
        (aten.gelu_backward.default, []),
        (aten.silu_backward.default, []),
        (aten.add.Tensor, []),
        (aten.mul.Tensor, []),
    ],
)
def test_an_operator_at_full_size_has_the_same_bits_in_place(func, rest, shape, dtype):
    grad, other = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
    given = [*rest, dtype] if "softmax" in func._opname else rest
    apart = func(grad, other, *given)
    written, out = in_place._form(func, "cuda")
    written(grad, other, *given, **{out: grad})
    assert torch.equal(apart.view(torch.uint8), grad.view(torch.uint8))


@pytest.mark.parametrize(
    ("shape", "form"), [((2, 32, 64, 96, 80), torch.contiguous_format), ((2, 33, 31, 64, 65), torch.channels_last_3d)]
)
def test_prelu_in_pieces_has_the_same_bits(shape, form):
    grad, own = (torch.randn(shape, device="cuda").to(memory_format=form) for _ in range(2))
    weight = torch.rand(shape[1], device="cuda").view(1, -1, 1, 1, 1)
    first, second = aten._prelu_kernel_backward(grad, own, weight)
    for written in (grad, own):
        given = grad.clone(), own.clone()
        products = torch.ops.ucudnn.prelu_backward(*given, weight, written=given[written is own])
        assert torch.equal(given[written is own], first)
        assert torch.equal(products, second)
