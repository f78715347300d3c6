"""The examples: each is short, has its command in the handbook, and prints what the handbook shows.

`tests.support.documents.PLACES` names the tests that run their commands. What they compute on a GPU is looked at in
`tests/gpu/test_examples.py`.
"""

import importlib.util
import re

import pytest

from tests.support.documents import HANDBOOK, README, commands
from tests.support.examples import EXAMPLES, run_example, shown
from tests.support.printed import assert_prints, masked


def test_every_example_is_run_by_the_command_that_the_handbook_shows():
    run = {match[1] for each in commands("examples") if (match := re.search(r"examples/(\w+)\.py$", each.runs))}
    assert set(EXAMPLES) == run


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_states_its_command(name):
    text = EXAMPLES[name].read_text()
    assert len(text.splitlines()) < 60
    command = re.search(r"^ +(python3 -m venv .*)$", text, re.M)[1]
    assert command.endswith(f".venv/bin/python examples/{name}.py")
    assert f"```sh\n{command}\n```" in HANDBOOK["examples"]
    assert "docs/examples.md" in README


def test_a_recorded_plan_prints_the_very_numbers_that_the_handbook_shows():
    assert run_example("plan_for_another_gpu").stdout.strip() == shown("plan_for_another_gpu").strip()


def test_without_cupy_an_example_for_a_gpu_says_what_to_install():
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("CuPy is installed")
    done = run_example("swap_the_handle", check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("this example needs an NVIDIA GPU: CuPy cannot be imported")
    assert "pip install 'ucudnn[cuda13]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_masks_hide_numbers_and_keep_words():
    line = "conv1  Forward  1  8x2 GEMM + 1x1 [2x16 rows FFT]  27.4  856 KiB, spare 1.25 MiB"
    assert masked(line) == ["conv# Forward # CONFIGURATION # #"]
    assert masked("executed: undivided 2,367 ms, 5e-06") == ["executed: undivided #, #"]


SHOWN = "a 1 ms\nb\n"


def test_other_numbers_are_no_difference():
    assert_prints("a  2.5 ms\nb", SHOWN)
    assert_prints("a 1 ms\nx\ny\nb", "a 1 ms\n...\nb")


@pytest.mark.parametrize("printed", ["a 1 ms", "a 1 ms\nb\nc", "x\na 1 ms\nb", "a 1 ms 2\nb", "b\na 1 ms"])
def test_other_words_columns_or_lines_are_noticed(printed):
    with pytest.raises(AssertionError):
        assert_prints(printed, SHOWN)
