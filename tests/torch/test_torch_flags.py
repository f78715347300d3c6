"""Tests leave PyTorch's flags as they were."""

import pytest
import torch

from tests.support.torch_flags import kept_torch_flags


def flags():
    backends, cudnn = torch.backends, torch.backends.cudnn
    precisions = cudnn.allow_tf32, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    precisions += torch.get_float32_matmul_precision(), backends.cuda.matmul.fp32_precision
    return precisions, cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    "change",
    [
        lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
        lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: setattr(torch.backends.cudnn, "deterministic", True),
        lambda: torch.use_deterministic_algorithms(True),
    ],
)
def test_flags_are_restored_whichever_way_they_were_set(change):
    before = flags()
    with kept_torch_flags():
        change()
    assert flags() == before
