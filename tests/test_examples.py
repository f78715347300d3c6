"""The examples: each is short, has its command in the handbook, and prints what the handbook shows.

`tests.support.documents.PLACES` names the tests that run their commands. What they compute on a GPU is looked at in
`tests/gpu/test_examples.py`.
"""

import importlib.util
import json
import re
import subprocess
import sys

import pytest

from tests.support.documents import HANDBOOK, README, commands
from tests.support.examples import EXAMPLES, run_example, shown
from tests.support.paths import ROOT
from tests.support.printed import assert_prints, masked


def test_every_example_is_run_by_the_command_that_the_handbook_shows():
    run = {match[1] for each in commands() if (match := re.search(r"examples/(\w+)\.py$", each.runs))}
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


@pytest.mark.extra
@pytest.mark.slow
def test_nnunets_own_commands_train_a_small_data_set_within_a_budget(tmp_path):
    for name in ("nnunetv2", "SimpleITK"):
        pytest.importorskip(name)
    program = ROOT / "examples/volumes/random_data.py"
    done = subprocess.run([sys.executable, program, tmp_path / "data"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "budget 128 MiB" in done.stdout
    (log,) = (tmp_path / "data").glob("nnUNet_results/*/*/fold_0/training_log_*.txt")
    assert re.search(r"train_loss -?\d+\.\d+", log.read_text())


@pytest.mark.extra
@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "model", "shape"),
    [("monai", "monai_bundle:network", "1x32x32x32"), ("lightning", "lightning_module:Segmentation", "1x16x16x16")],
)
def test_models_of_other_packages_are_made_by_a_callable(call, monkeypatch, tmp_path, package, model, shape):
    for name in ("torch", package):
        pytest.importorskip(name)
    configs = tmp_path / "configs"
    configs.mkdir()
    sizes = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": [4, 8], "strides": [2]}
    bundle = {"network_def": {"_target_": "monai.networks.nets.UNet", **sizes}}
    (configs / "train.json").write_text(json.dumps(bundle))
    monkeypatch.setenv("BUNDLE", str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT / "examples/volumes"))
    arguments = ("--shape", shape, "--batch", "2", "--gpu", "rtx-3090", "--json")
    arguments += ("--loss", "lightning_module:loss") if package == "lightning" else ()
    status, out, error = call("memory", "fits", model, *arguments)
    assert status == 0, error
    assert json.loads(out)["rows"][0]["batch"] > 2


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
