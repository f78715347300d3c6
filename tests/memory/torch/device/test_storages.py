"""Gradients that share a storage for a while keep all but their place, and others are not touched."""

import pytest
import torch
from torch.nn import Parameter

from ucudnn.memory.torch.device.storages import GatheredGradients, holders

LARGE = 2**18 + 1  # float32 elements of more than 1 MiB
CPU = torch.device("cpu")


def gathered(parameters, after=()):
    """Return what gathers gradients, for parameters of which some get theirs after backward has begun."""
    found = GatheredGradients(CPU)
    later = [(each, each.grad) for each in after]
    for each in after:
        each.grad = None
    found.begin(parameters)
    for each, gradient in later:
        each.grad = gradient
    found.gather(found.new())
    return found


def with_gradient(gradient):
    parameter = Parameter(torch.empty_like(gradient))
    parameter.grad = gradient
    return parameter


def places(tensors):
    return [each.untyped_storage().data_ptr() for each in tensors]


def test_gradients_of_several_types_and_strides_share_a_storage_until_backward_ends_to_the_bit():
    torch.manual_seed(0)
    gradients = [
        torch.randn(LARGE + 3),
        torch.empty_strided((2, LARGE), (1, 2), dtype=torch.float64).normal_(),
        torch.randn(4, 8, 128, 130).to(memory_format=torch.channels_last),
        torch.randn(LARGE * 2).bfloat16(),
    ]
    parameters = [with_gradient(each) for each in gradients]
    before = [(each.clone(), each.stride(), each._version) for each in gradients]
    found = gathered(parameters, parameters)
    for count in (1, 4):
        assert len({*places(gradients)}) == count
        for parameter, gradient, (value, stride, version) in zip(parameters, gradients, before, strict=True):
            assert parameter.grad is gradient
            assert torch.equal(gradient, value)
            assert (gradient.stride(), gradient._version) == (stride, version)
            assert gradient.data_ptr() % 64 == 0
        found.end()
    found.end()
    for each in gradients:
        each.fill_(7)  # none overlaps another
    assert all((each == 7).all() for each in gradients)
    assert [holders(each.untyped_storage()) for each in gradients] == [1] * 4


def test_gradients_that_others_may_know_or_that_are_small_stay_where_they_are():
    seen, asked = torch.randn(LARGE), torch.randn(LARGE).requires_grad_()
    view, whole = seen[3:], torch.randn(2 * LARGE)
    new = [seen, asked, whole[:LARGE], torch.randn(LARGE - 1), torch.randn(LARGE), torch.randn(LARGE)]
    parameters = [with_gradient(each) for each in (torch.randn(LARGE), *new)]
    sparse = Parameter(torch.eye(3))
    sparse.grad = torch.eye(3).to_sparse()
    inner = Parameter(torch.ones(LARGE)) * 2  # is no leaf
    before = places(each.grad for each in parameters)
    gathered([*parameters, sparse, inner, Parameter(torch.ones(LARGE))], parameters[1:])
    after = places(each.grad for each in parameters)
    assert after[:5] == before[:5]
    assert after[5] == after[6]
    view.fill_(5)
    assert (seen[3:] == 5).all()


def test_nothing_moves_unless_backward_has_begun_or_while_others_wait_for_this_process(monkeypatch):
    parameters = [with_gradient(torch.randn(LARGE)) for _ in range(2)]
    found = GatheredGradients(CPU)
    assert found.new() == []
    gradients = [each.grad for each in parameters]
    for each in parameters:
        each.grad = None
    found.begin(parameters)
    for each, gradient in zip(parameters, gradients, strict=True):
        each.grad = gradient
    assert len(found.new()) == 2
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert found.new() == []
    monkeypatch.undo()
    found.end()
    assert found.new() == []


@pytest.mark.parametrize("refused", ["empty", "clone"])
def test_gradients_stay_where_there_is_no_memory_for_them(monkeypatch, refused):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("no piece")

    parameters = [with_gradient(torch.full((LARGE,), 3.0)) for _ in range(3)]
    owner = torch if refused == "empty" else torch.Tensor
    monkeypatch.setattr(owner, refused, refuse)
    found = gathered(parameters, parameters)
    found.end()
    monkeypatch.undo()
    assert len({*places(each.grad for each in parameters)}) == (3 if refused == "empty" else 1)
    assert all((each.grad == 3).all() for each in parameters)
