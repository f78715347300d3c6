"""Additive attention on a GPU: the bits of the step-by-step layer, and a peak that does not grow with T squared."""

import pytest

torch = pytest.importorskip("torch")

from bench.memory.attention import Sizes, compare_layers  # noqa: E402


@pytest.mark.parametrize("steps", [50, 200])
def test_bits_are_equal_and_the_peak_is_linear_in_the_decoder_steps(steps):
    sizes = Sizes(width=256, batch=8, layers=1, words=2, limit=0, steps=(steps,))
    found = compare_layers(steps, sizes, torch.device("cuda"))
    assert found["equal"], found["largest_difference"]
    row, scores = 4 * sizes.batch * steps * sizes.width, 4 * sizes.batch * steps * steps
    assert found["plain"]["peak_bytes"] > steps * row
    assert found["ucudnn"]["peak_bytes"] < 12 * row + 6 * scores + (64 << 20)  # cuBLAS keeps a workspace
