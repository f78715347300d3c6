"""`ucudnn memory` with models in PyTorch: recorded into a file, or explained at once."""

import json
import os
import sys
from functools import partial
from importlib.util import find_spec
from math import inf

import pytest

from tests.support.paths import ROOT
from ucudnn.cli.app import main
from ucudnn.memory.reports.fits import BOUNDS
from ucudnn.memory.step.shipped import open_measured_step, open_step

UNET = ("tests.support.training_steps:small_unet", "--shape", "3x16x16")
BROKEN = "tests.support.broken_models"
SMALL = ("--shape", "3x8x8", "--batch", "4")
LITTLE = "error: this machine has too little memory: "


@pytest.fixture
def memory(call):
    """Run `ucudnn memory`; return exit status, standard output and standard error."""
    return partial(call, "memory")


def test_a_recorded_model_is_planned_for_at_any_mini_batch(memory, tmp_path):
    path = tmp_path / "unet.json.gz"
    status, out, error = memory("record", *UNET, "--batch", "4", "--measure", "none", "--out", str(path))
    assert status == 0, error
    assert "small_unet at a mini-batch of 4 are in" in out
    graph = open_step(str(path))
    assert graph.recorded == (4, 8, 12)
    assert graph.conditions["optimizer"] == "sgd"
    status, out, error = memory("plan", str(path), "--batch", "32", "--policy", "stock", "--json")
    assert status == 0, error
    assert json.loads(out)["batch"] == 32


def test_a_model_is_measured_on_the_cpu(memory, tmp_path):
    path = tmp_path / "unet.json"
    status, out, error = memory("record", *UNET, "--batch", "4", "--measure", "cpu", "--out", str(path))
    assert status == 0, error
    assert "ms on cpu are in" in out
    graph, costs = open_measured_step(str(path))
    assert len(costs.time_ms) == len(graph.operations)
    status, out, error = memory("plan", str(path), "--policy", "stock", "--json")
    assert status == 0, error
    assert json.loads(out)["device"] == "cpu"


def test_a_model_is_explained_at_once(memory):
    status, out, error = memory("why", *UNET, "--batch", "4", "--optimizer", "adam", "--json", "--budget", "1GiB")
    assert status == 0, error
    found = json.loads(out)
    assert any(each["name"].startswith("bench/memory/models.py:") for each in found["peak"]["by"]["source"])
    assert {"parameters", "optimizer state"} <= {each["name"] for each in found["peak"]["by"]["what"]}


def test_a_divided_step_fits_a_larger_mini_batch_and_says_what_it_costs(memory):
    layers = ("tests.support.training_steps:two_layers", "--shape", "3x2x2")
    arguments = (*layers, "--gpu", "rtx-3060", "--budget", "1028MiB", "--json")
    found = json.loads(memory("fits", *arguments, "--divide")[1])
    rows, whole = found["rows"], found["rows"][:4]
    for fitted, divided, bound in zip(whole[1:], rows[4:], (*BOUNDS, inf), strict=True):
        assert divided["way"] == fitted["way"].replace("with fit", "with fit, divided")
        assert divided["batch"] >= fitted["batch"]
        assert divided["peak_bytes"] <= found["budget_bytes"] == 4 * 2**20
        assert divided["time_ms"] <= bound * divided["batch"] * found["own_sample_ms"]
    assert rows[-1]["batch"] > 1.2 * whole[-1]["batch"]
    why = json.loads(memory("why", *layers, "--batch", str(rows[-1]["batch"]), "--gpu", "rtx-3060", "--json")[1])
    assert why["floor"]["bytes"] > 4 * 2**20  # so that no plan keeps the budget without a division
    assert rows[-2]["batch"] > 1.2 * whole[-2]["batch"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench.memory.models:resnet19", *SMALL), "resnet19"),
        (("resnet18", *SMALL), "names no model: give module:callable"),
        (("builtins:dict", *SMALL), "returns a dict, no torch.nn.Module"),
        ((*UNET, "--loss", "hinge"), "--loss='hinge' is not known: give cross-entropy"),
        ((*UNET, "--optimizer", "lion"), "--optimizer='lion' is not known: give sgd, adam, adamw, none"),
        ((*UNET, "--measure", "tpu"), "--measure='tpu' is not known: give auto, cuda, cpu or none"),
        ((*UNET, "--autocast", "int8"), "--autocast='int8' is not known: give float16 or bfloat16"),
        ((*UNET, "--autocast", "float32"), "--autocast='float32' is not known: give float16 or bfloat16"),
        ((*UNET, "--autocast", "float64"), "--autocast='float64' is not known: give float16 or bfloat16"),
        (("tests.support.training_steps:small_unet", "--shape", "3"), "small_unet does not take 32x3: "),
        (("tests.support.training_steps:none",), "has no attribute 'none'"),
        (("tests.support.training_steps:small_net",), "has no attribute 'small_net': did you mean small_unet"),
        (("no_such_module:model",), "no module no_such_module: no no_such_module.py in this folder or on PYTHONPATH"),
        (("no_such_module:x:model",), "error: no_such_module:x:model: there is no module no_such_module"),  # no emoji
        ((f"{BROKEN}:ready", *SMALL), "ready is a model that exists: name a function or a class that makes one"),
        (("json:loads",), "json:loads: missing a required argument: 's': name a function without arguments that makes"),
        (("sys:exit",), "error: sys:exit fails: SystemExit in "),
        ((*UNET, "--loss", "math:sqrt"), "small_unet with the loss math:sqrt fails: TypeError in "),
        ((*UNET, "--loss", "torch:add"), "fails: RuntimeError in "),  # no scalar, so that backward fails
        ((*UNET, "--loss", "torch:add", "--measure", "cpu"), "fails: RuntimeError in "),
        ((UNET[0], "--shape", "3x" + "9" * 30 + "x8"), "is none of a sample: give channels and one to three sizes"),
        ((UNET[0], "--shape", "9" * 5000), "give channels and sizes, as 3x224x224"),
        ((f"{BROKEN}:Refusing", *SMALL), "Refusing does not take 4x3x8x8: "),
        ((f"{BROKEN}:Leaving", *SMALL), "Leaving does not take 4x3x8x8: "),
        ((f"{BROKEN}:Backwards", *SMALL), "Backwards with the loss cross-entropy fails: KeyError in "),
        ((f"{BROKEN}:Untrained", *SMALL), "Untrained has no parameter that needs a gradient: there is nothing to t"),
        ((f"{BROKEN}:OfOneBatch", *SMALL), "OfOneBatch with the loss cross-entropy fails: RuntimeError in "),
        ((f"{BROKEN}:Empty", *SMALL), "Empty with the loss cross-entropy fails: ValueError in "),
        ((f"{BROKEN}:plain", "--shape", "3x2147483647x2147483647"), "an input of 32x3x2147483647x2147483647 fails: "),
        ((f"{BROKEN}:plain", *SMALL, "--batch", "2147483647", "--measure", "cpu"), LITTLE),
        ((f"{BROKEN}:vast", "--shape", "2", "--measure", "cpu"), LITTLE),
    ],
)
def test_what_cannot_be_recorded_ends_in_one_line_and_status_2(memory, tmp_path, arguments, message):
    status, out, error = memory("record", *arguments, "--out", str(tmp_path / "step.json"))
    assert (status, out) == (2, "")
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "step.json").exists()


def test_what_a_model_prints_is_not_among_the_data(memory):
    given = (f"{BROKEN}:Printing", *SMALL, "--loss", f"{BROKEN}:printing_loss", "--json")
    status, out, error = memory("why", *given)
    assert status == 0, error
    assert json.loads(out)["batch"] == 4
    assert "a model's own words" in error
    assert "a loss's own words" in error


@pytest.mark.parametrize("command", [("why",), ("record", "--out", "step.json", "--measure", "none")])
def test_what_a_library_prints_past_python_is_not_among_the_data(capfd, monkeypatch, tmp_path, command):
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ucudnn", "memory", command[0], f"{BROKEN}:Writing", *SMALL, *command[1:]])
    with pytest.raises(SystemExit) as ended:
        main()
    out, error = capfd.readouterr()
    assert ended.value.code == 0, error
    assert "Writing" in out
    assert "own words" not in out
    for words in ("a library's own words", "a library's own words, kept in C"):
        assert f"{words}\n" in error
    os.write(1, b"again")
    assert capfd.readouterr().out == "again"


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_without_torchvision_one_line_says_so(memory, tmp_path):
    status, _, error = memory("record", "torchvision:resnet50", "--out", str(tmp_path / "r50.json"))
    assert status == 2
    assert "torchvision:resnet50: torchvision is not installed: pip install torchvision" in error


@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")
def test_torchvisions_model_is_the_shipped_one(memory, tmp_path):
    path = tmp_path / "r50.json"
    assert memory("record", "torchvision:resnet50", "--batch", "2", "--measure", "none", "--out", str(path))[0] == 0
    ours, theirs = open_step("resnet50").with_batch(2), open_step(str(path))
    assert [each.kind for each in ours.operations] == [each.kind for each in theirs.operations]
    assert sorted(ours.sizes) == sorted(theirs.sizes)
