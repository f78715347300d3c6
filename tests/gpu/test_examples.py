"""The examples run on a GPU, too."""

import re

import pytest

from tests.support.examples import run_example


def test_the_handle_is_swapped(cupy):
    printed = run_example("swap_the_handle").stdout.splitlines()
    assert printed[0].split() == ["limit", "time"]
    assert all(re.fullmatch(r" *\d+ MiB +\d+\.\d\d ms", line) for line in printed[1:3])
    assert float(printed[3].removeprefix("the outputs differ by ")) < 0.01
    assert len(printed) == 4


@pytest.mark.usefixtures("torch_gpu")
def test_workspaces_are_bounded():
    rows = re.findall(r"^(\d+)MiB +(\d+) KiB +\d+ of 5 +(\S+)$", run_example("bound_workspace").stdout, re.MULTILINE)
    assert [int(limit) for limit, *_ in rows] == [16, 4, 1]
    for limit, kib, difference in rows:
        assert int(kib) <= int(limit) * 1024
        assert float(difference) < 1e-4
