"""The buckets in which DistributedDataParallel averages gradients."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ucudnn.memory.torch.tracing import averaging

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("unused", [False, True])
def test_buckets_hold_what_is_trained_and_not_ignored(unused):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.bias", "2.weight"])
    parallel = DistributedDataParallel(model, find_unused_parameters=unused)
    buckets = averaging._buckets(None, parallel, ())
    averaged = [id(each) for bucket in buckets for each in bucket]
    assert sorted(averaged) == sorted(id(each) for each in (model[1].weight, model[1].bias, model[2].bias))
    assert sorted(averaged) == sorted(map(id, parallel._build_params_for_reducer()[0])), "it averages others itself"
