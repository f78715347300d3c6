"""Models that `ucudnn time --torch` runs."""

import json
import sys

import pytest
import torch

from ucudnn.cli.torch_model import time_model
from ucudnn.errors import BackendUnavailableError, InvalidNetworkError
from ucudnn.networks.variants import Variant
from ucudnn.profiles.measurement import Effort
from ucudnn.settings import Settings
from ucudnn.torch.model_timing import find_factory, parse_shape
from ucudnn.torch.overrides import process_overrides


def small():
    """Return a model of two convolutions, for `ucudnn time`."""
    n = torch.nn
    return n.Sequential(n.Conv2d(3, 4, 3), n.ReLU(), n.ConvTranspose2d(4, 2, 2, stride=2))


class Headed(torch.nn.Module):
    """A model whose output is a dict."""

    def __init__(self):
        super().__init__()
        self.trunk = torch.nn.Conv1d(2, 3, 3)

    def forward(self, x):
        return {"out": (self.trunk(x), "not a tensor")}


NAME = f"{__name__}:small"
ONCE = ("--backend", "cpu", "--shape", "3x8x8")


def test_a_model_is_timed(timed):
    code, out, _ = timed(NAME, *ONCE, "--batch", "4", "--workspace", "64KiB")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    kernels_of = [row[:2] for row in rows if row[1] in ("Forward", "BackwardData", "BackwardFilter")]
    # A transposed convolution is the gradient of a plain one's input, and its gradient is a plain convolution.
    assert sorted(kernels_of) == sorted(
        [["0", "Forward"], ["0", "BackwardFilter"], ["2", "BackwardData"], ["2", "Forward"], ["2", "BackwardFilter"]]
    )
    assert "convolutions through ucudnn: 5, left to PyTorch: 0" in out
    assert "PyTorch ms" not in out
    assert process_overrides.interceptor is None


def test_the_times_of_a_model_as_json_and_csv(timed):
    code, out, _ = timed(NAME, *ONCE, "--json", "--dtype", "float64", "--layout", "last")
    assert code == 0
    answer = json.loads(out)
    assert answer["calls"] == 5
    assert all(each["measured_ms"] > 0 for each in answer["layers"])
    assert all(each["problem"].endswith("float64 NHWC") for each in answer["layers"])
    code, out, _ = timed(NAME, *ONCE, "--csv")
    assert code == 0
    assert len(out.splitlines()) == 6


def test_a_models_output_may_be_nested(timed):
    code, out, _ = timed(f"{__name__}:Headed", *ONCE[:-1], "2x9")
    assert code == 0
    assert "trunk  Forward" in out


@pytest.mark.parametrize(
    ("name", "shape", "error"),
    [
        ("small", "3x8x8", "names no model: give module:callable"),
        ("nowhere:small", "3x8x8", "there is no module nowhere"),
        (f"{__name__}:nothing", "3x8x8", "no attribute 'nothing'"),
        (f"{__name__}:NAME", "3x8x8", "is a str and cannot be called"),
        (f"{__name__}:dict", "3x8x8", "no attribute 'dict'"),
        ("builtins:dict", "3x8x8", r"returns a dict, no torch\.nn\.Module"),
        (NAME, "4x8x8", "does not take 2x4x8x8"),
        (NAME, "3x8x?", "cannot be read"),
        (NAME, "3", "is none of a sample"),
    ],
)
def test_an_error_says_why_something_is_no_model(name, shape, error):
    with pytest.raises(InvalidNetworkError, match=error):
        time_model(name, shape, None, Variant(), Settings.load({}, backend="cpu"), Effort(repeats=1, time_limit_ms=1))


def test_a_module_that_fails_while_it_is_imported_is_named_with_its_line(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("\nraise RuntimeError('operator nms does not exist')\n")
    with pytest.raises(
        InvalidNetworkError,
        match=r"broken cannot be imported: RuntimeError in .*broken\.py:2: operator nms does not exist",
    ):
        find_factory("broken:net")


def test_a_package_may_keep_its_models_in_a_module_of_that_name(monkeypatch, tmp_path):
    (tmp_path / "visionlike").mkdir()
    (tmp_path / "visionlike" / "__init__.py").write_text("")
    (tmp_path / "visionlike" / "models.py").write_text("class Nets:\n    def net(): ...\n")
    monkeypatch.chdir(tmp_path)
    assert find_factory("visionlike:Nets.net").__name__ == "net"
    assert parse_shape("3, 224, 224") == (3, 224, 224)


def test_without_pytorch_time_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ucudnn.torch.model_timing", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'ucudnn\[torch\]'"):
        time_model(NAME, "3x8x8", None, Variant(), Settings(), Effort())


@pytest.mark.parametrize("batch", ["0", "-1", "2147483648", "9" * 30])
def test_a_batch_that_is_no_size_is_refused(timed, batch):
    code, out, error = timed(NAME, *ONCE, "--batch", batch)
    assert (code, out) == (2, "")
    assert "is no mini-batch size: give 1 to 2147483647" in error


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("Refusing", (), "Refusing does not take 2x3x8x8: "),
        ("Leaving", (), "Leaving does not take 2x3x8x8: "),
        ("Backwards", (), "Backwards fails: KeyError in "),
        ("plain", ("--batch", "2147483647"), "error: this machine has too little memory: "),
        ("vast", (), "error: this machine has too little memory: "),
        ("plain", ("--shape", "3x2147483647x2147483647"), "an input of 2x3x2147483647x2147483647 fails: "),
    ],
)
def test_whatever_a_model_raises_ends_in_one_line_and_status_2(timed, name, arguments, message):
    code, out, error = timed(f"tests.support.broken_models:{name}", *ONCE, *arguments)
    assert (code, out) == (2, "")
    assert message in error
    assert error.count("\n") == 1


def test_what_a_model_prints_is_not_among_the_data(timed):
    code, out, error = timed("tests.support.broken_models:Printing", *ONCE, "--json")
    assert code == 0, error
    assert json.loads(out)["reports"]
    assert "a model's own words" in error
