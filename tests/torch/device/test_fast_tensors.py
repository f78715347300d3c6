"""Tensors that are made past PyTorch's dispatcher."""

import pytest
import torch

from ucudnn.torch.device.gpu import empty_of


@pytest.mark.parametrize("device_type", ["cpu", "meta"])  # PyTorch has a fast function for the first only
def test_a_new_tensor_has_the_sizes_strides_and_type_that_were_asked_for(device_type):
    made = empty_of(device_type)((3, 4, 5), (20, 1, 4), torch.bfloat16)
    assert (made.shape, made.stride(), made.dtype) == ((3, 4, 5), (20, 1, 4), torch.bfloat16)
    assert made.device.type == device_type
