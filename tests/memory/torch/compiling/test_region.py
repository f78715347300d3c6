import random

import pytest
import torch

from ucudnn.memory.torch.compiling.region import view_calls
from ucudnn.memory.torch.subject.traced_values import TracedTensor

aten = torch.ops.aten


def traced(tensor):
    return TracedTensor(0, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)


def random_view(tensor, dice):
    """Return a tensor seen through one more operator."""
    dims = tensor.dim()
    choice = dice.choice(["permute", "slice", "reshape", "unsqueeze", "expand", "select"])
    dim = dice.randrange(dims) if dims else 0
    if choice == "permute":
        return tensor.permute(dice.sample(range(dims), dims))
    if choice == "slice" and dims and tensor.shape[dim] > 1:
        return tensor.narrow(dim, dice.randrange(2), tensor.shape[dim] - 1)
    if choice == "select" and dims > 1:
        return tensor.select(dim, dice.randrange(tensor.shape[dim]))
    if choice == "reshape" and tensor.is_contiguous() and tensor.numel() % 2 == 0:
        return tensor.view(2, -1)
    if choice == "expand" and dims < 5:
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    return tensor.unsqueeze(dim) if dims < 5 else tensor


@pytest.mark.parametrize("form", ["contiguous", "channels_last", "transposed"])
def test_views_show_the_elements_and_have_the_strides_of_what_they_stand_for(form):
    dice, known = random.Random(form), 0
    base = torch.arange(2 * 3 * 4 * 6).reshape(2, 3, 4, 6)
    if form == "channels_last":
        base = base.contiguous(memory_format=torch.channels_last)
    elif form == "transposed":
        base = base.transpose(1, 3)
    for _ in range(300):
        wanted = base
        for _ in range(dice.randint(1, 4)):
            wanted = random_view(wanted, dice)
        calls = view_calls(traced(base), traced(wanted))
        if calls is None:
            continue
        known += 1
        found = base
        for function, args in calls:
            found = function(found, *args)
        assert torch.equal(found, wanted)
        assert found.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        strides = zip(found.stride(), wanted.stride(), wanted.shape, strict=True)
        assert all(ours == own for ours, own, size in strides if size > 1)
        assert found.storage_offset() == wanted.storage_offset()
    assert known > 200


def test_a_view_in_another_type_and_one_of_overlapping_elements_are_not_known():
    base = torch.zeros(4, 6)
    assert view_calls(traced(base), traced(base.view(torch.int32))) is None
    assert view_calls(traced(base), traced(base.as_strided((3, 4), (1, 1)))) is None
    assert view_calls(traced(base[:, :4]), traced(base[:, :2])) is None
