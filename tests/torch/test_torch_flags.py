"""Tests leave PyTorch's flags as they were."""

import pytest

torch = pytest.importorskip("torch")

from tests.support.torch_flags import kept_torch_flags  # noqa: E402


def precisions():
    backends = torch.backends
    return {
        "allow_tf32": backends.cudnn.allow_tf32,
        "conv": backends.cudnn.conv.fp32_precision,
        "rnn": backends.cudnn.rnn.fp32_precision,
        "matmul": torch.get_float32_matmul_precision(),
        "cuda matmul": backends.cuda.matmul.fp32_precision,
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
        lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    ],
    ids=["cudnn.allow_tf32", "conv.fp32_precision", "float32_matmul_precision", "matmul.allow_tf32"],
)
def test_precisions_are_restored_whichever_way_they_were_set(change):
    before = precisions()
    with kept_torch_flags():
        change()
    assert precisions() == before


def test_determinism_and_benchmarks_are_restored():
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled()
    with kept_torch_flags():
        cudnn.benchmark, cudnn.deterministic = True, True
        torch.use_deterministic_algorithms(True)
    assert (cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled()) == before
