"""The examples for PyTorch print what the handbook shows."""

import pytest

torch = pytest.importorskip("torch")

from tests.support.examples import run_example, shown  # noqa: E402
from tests.support.printed import assert_prints  # noqa: E402


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, another backend's names are printed")
@pytest.mark.parametrize("name", ["bound_workspace"])
def test_an_example_prints_what_the_handbook_shows(name):
    assert_prints(run_example(name).stdout, shown(name))
