import torch

from ucudnn.memory.step.graph import Phase
from ucudnn.memory.torch.compiling.fusible_calls import is_cheap, is_fusible, out_of_place
from ucudnn.memory.torch.subject.traced_values import TracedCall, TracedTensor

aten = torch.ops.aten


def traced(storage, dtype=torch.float32):
    return TracedTensor(storage, (3, 4), (4, 1), 0, dtype)


def called(func, *args, result=None, **kwargs):
    return TracedCall(func, args, kwargs, result or traced(9), Phase.BACKWARD, "", "", None, 0, 0)


def test_an_operator_in_place_has_one_that_makes_a_tensor():
    found = out_of_place(called(aten.mul_.Tensor, traced(0), traced(1), result=traced(0)), 0, -1)
    assert (found.func, found.args, found.results) == (aten.mul.Tensor, (traced(0), traced(1)), traced(-1))
    given = {"grad_input": traced(0)}
    call = called(aten.gelu_backward.grad_input, traced(0), traced(1), result=traced(0), **given)
    found = out_of_place(call, 0, -1)
    assert (found.func, found.kwargs, found.results) == (aten.gelu_backward.default, {}, traced(-1))


def test_one_whose_result_might_have_another_type_or_is_no_operand_has_none():
    half = traced(0, torch.bfloat16)
    assert out_of_place(called(aten.mul_.Tensor, half, traced(1), result=half), 0, -1) is None
    assert out_of_place(called(aten.mul.Tensor, traced(0), traced(1)), 0, -1) is None
    assert out_of_place(called(aten.mul_.Tensor, traced(0), traced(1), result=traced(0)), 1, -1) is None


def test_products_random_numbers_and_what_is_elsewhere_lie_in_no_region():
    assert is_fusible(called(aten.gelu.default, traced(0)), 10)
    assert not is_fusible(called(aten.gelu.default, traced(10), result=traced(0)), 10)
    assert not is_fusible(called(aten.mm.default, traced(0), traced(1)), 10)
    assert not is_fusible(called(aten.bernoulli_.float, traced(0), 0.5, result=traced(0)), 10)
    assert not is_fusible(called(aten.add.Tensor, traced(0), traced(1), result=traced(9, torch.complex64)), 10)


def test_sums_are_not_cheap():
    assert is_cheap(called(aten.gelu.default, traced(0)))
    assert is_cheap(called(aten._log_softmax.default, traced(0), 1, False))
    assert not is_cheap(called(aten.sum.default, traced(0)))
    assert not is_cheap(called(aten.mean.dim, traced(0), [1]))
    assert not is_cheap(called(aten.native_layer_norm.default, traced(0)))
