"""What a convolution takes while it runs, as it is known before, and what the guard itself takes the host."""

import pytest
import torch

from ucudnn.memory import budget
from ucudnn.memory.torch.hooks.guard import convolution_bytes

aten = torch.ops.aten
CASES = {  # sizes of x and w, and stride, padding, dilation, whether it is transposed, added padding and groups
    "plane": ((2, 3, 9, 7), (5, 3, 3, 2), [2, 1], [1, 0], [1, 2], False, [0, 0], 1),
    "grouped": ((2, 4, 9), (6, 2, 3), [2], [1], [2], False, [0], 2),
    "volume": ((1, 3, 4, 5, 6), (2, 3, 1, 3, 2), [1, 1, 1], [0, 1, 1], [1, 1, 1], False, [0, 0, 0], 1),
    "transposed": ((2, 4, 5, 6), (4, 3, 3, 2), [2, 3], [1, 0], [2, 1], True, [1, 2], 2),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_copies_of_x_and_y_count(case, dtype):
    x_size, w_size, *how = CASES[case]
    x, w = torch.randn(x_size, dtype=dtype), torch.randn(w_size, dtype=dtype)
    given = x, w, None, *how
    y = aten.convolution(*given)
    assert convolution_bytes(aten.convolution.default, given) == x.nbytes + 2 * y.nbytes
    given = y, x, w, None, *how, [True, True, False]
    made = aten.convolution_backward(*given)
    taken = sum(each.nbytes for each in made[:2]) + x.nbytes + y.nbytes
    assert convolution_bytes(aten.convolution_backward.default, given) == taken


def test_one_value_counts_for_each_dimension():
    x, w = torch.randn(2, 3, 9, 7), torch.randn(5, 3, 3, 3)
    given = x, w, None, [2], [1], [1], False, [0], 1
    y = aten.convolution(*given)
    assert convolution_bytes(aten.convolution.default, given) == x.nbytes + 2 * y.nbytes


def test_channels_that_come_last_are_not_copied():
    x = torch.randn(2, 3, 9, 7).to(memory_format=torch.channels_last)
    how = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    assert convolution_bytes(aten.convolution.default, (x, torch.randn(5, 3, 3, 2), None, *how)) == 0


def test_the_time_of_the_guard_grows_with_the_operations_that_it_guards():
    with budget("1GiB", device="cpu") as within:
        guard = within._begun.guard
        assert guard.host_s() >= 0
        before, counted = guard.host_s(), guard._operations
        for _ in range(100):
            torch.ones(2).sin()
        assert guard._operations == counted + 200
        assert guard.host_s() == pytest.approx(before * guard._operations / counted)
        assert 0 < guard.host_s() / guard._operations < 1e-3
