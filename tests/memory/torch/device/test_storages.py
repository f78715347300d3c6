"""Tensors that are moved into one storage keep all but their place, and others are not touched."""

import pytest
import torch

from ucudnn.memory.torch.device.storages import gather, holders

LARGE = 2**18  # float32 elements of 1 MiB


def places(tensors):
    return [each.untyped_storage().data_ptr() for each in tensors]


def test_tensors_of_several_types_and_strides_move_into_one_storage_to_the_bit():
    torch.manual_seed(0)
    tensors = [
        torch.randn(LARGE + 3),
        torch.empty_strided((2, LARGE), (1, 2), dtype=torch.float64).normal_(),
        torch.randn(4, 8, 128, 130).to(memory_format=torch.channels_last),
        torch.randn(LARGE * 2).bfloat16(),
    ]
    before = [(each.clone(), each.stride(), each._version) for each in tensors]
    gather(tensors)
    assert len({*places(tensors)}) == 1
    for found, (value, stride, version) in zip(tensors, before, strict=True):
        assert torch.equal(found, value)
        assert (found.stride(), found._version) == (stride, version)
        assert found.data_ptr() % 512 == places(tensors)[0] % 512
        found.fill_(7.0)  # none overlaps another
    assert all((each == 7).all() for each in tensors)


def test_tensors_that_share_a_storage_or_are_small_stay_where_they_are():
    whole = torch.randn(2 * LARGE)
    seen = torch.randn(LARGE)
    view = seen[3:]
    asked = torch.randn(LARGE).requires_grad_()
    small, part, sparse = torch.randn(LARGE - 1), whole[:LARGE], torch.eye(3).to_sparse()
    tensors = [part, seen, small, asked, torch.randn(LARGE), torch.randn(LARGE)]
    before = places(tensors)
    gather([*tensors, sparse, torch.nn.Parameter(torch.ones(LARGE), requires_grad=False)])
    assert places(tensors)[:4] == before[:4]
    assert len({*places(tensors[4:])}) == 1
    view.fill_(5)
    assert (seen[3:] == 5).all()
    assert [holders(each.untyped_storage()) for each in (small, seen)] == [1, 2]


@pytest.mark.parametrize("count", [0, 1])
def test_less_than_two_are_left_alone(count):
    tensors = [torch.randn(LARGE) for _ in range(count)]
    before = places(tensors)
    gather(tensors)
    assert places(tensors) == before


def test_all_stay_where_there_is_no_memory_for_them(monkeypatch):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("no piece")

    tensors = [torch.full((LARGE,), 3.0) for _ in range(3)]
    before = places(tensors)
    monkeypatch.setattr(torch, "empty", refuse)
    gather(tensors)
    assert places(tensors) == before
    assert all((each == 3).all() for each in tensors)
