"""bench.memory.attention: both layers are compared, and the largest mini-batch is the largest one that fits."""

import pytest

torch = pytest.importorskip("torch")

from bench.memory.attention import Sizes, Trainer, compare_layers  # noqa: E402

SIZES = Sizes(width=8, batch=2, layers=1, words=20, limit=1 << 17, steps=(8,))
CPU = torch.device("cpu")


def test_both_layers_are_compared():
    case = compare_layers(8, SIZES, CPU)
    assert case["equal"]
    assert case["largest_difference"] == 0
    assert case["plain"]["peak_bytes"] > case["ucudnn"]["peak_bytes"] > 0


def test_the_largest_mini_batch_fits_and_the_next_one_does_not():
    trainer = Trainer("ucudnn", 8, SIZES, CPU)
    batch, peak = trainer.largest()
    assert trainer.peak(batch) == peak <= SIZES.limit < trainer.peak(batch + 1)
    assert batch > 2
