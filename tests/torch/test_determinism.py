"""Deterministic programs of PyTorch: the same bits in every process, and plans that are saved and loaded."""

import json

import pytest
import torch

import ucudnn.torch
from tests.support.forked_ranks import run_forked_ranks
from tests.support.operands import QUICK
from tests.support.torch_cases import enable_on_cpu
from ucudnn.errors import PlanFileError
from ucudnn.planning.plan_file import read_plans
from ucudnn.torch.__main__ import main

TRAINING = """
import hashlib
import sys
import torch
import ucudnn.torch
from tests.support.operands import QUICK
from tests.support.poisoned import poison_times

poison_times()
torch.manual_seed(0)
torch.use_deterministic_algorithms(sys.argv[3] == "1")
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3, padding=1))
x = torch.randn(6, 3, 14, 14)
with ucudnn.torch.enable(backend="cpu", effort=QUICK, policy="all", **eval(sys.argv[2])) as on:
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for each in model.parameters():
                each -= 0.1 * each.grad
                each.grad = None
    if sys.argv[1] == "0" and len(sys.argv) > 4:
        on.save_plans(sys.argv[4])
summary = on.report()
assert summary.calls == 15 and not summary.left, summary
made = hashlib.sha256()
for each in model.parameters():
    made.update(each.detach().numpy().tobytes())
print(made.hexdigest(), loss.item().hex())
"""


def outcomes(world, options, *arguments):
    """Return what processes print that train a model, and in which every measurement ends with a random time."""
    ended = run_forked_ranks(TRAINING, repr(options), *arguments, world=world)
    assert [status for *_, status in ended] == [0] * world, ended
    return [output for output, *_ in ended]


def test_deterministic_processes_end_with_the_same_bits():
    assert len(set(outcomes(2, {"workspace_limit": "64KiB", "database": "off"}, 1))) == 1


def test_ranks_with_the_same_plans_end_with_the_same_bits(tmp_path):
    path = str(tmp_path / "plans.json")
    options = {"workspace_limit": "64KiB", "database": "off"}
    first, *others = outcomes(2, options, 0, path)  # each is planned by random times; the first one saves its plans
    if others == [first]:  # one pair in 200 ends with the same bits
        others += outcomes(2, options, 0)
    assert set(others) != {first}, "else the rest would show nothing"
    assert outcomes(2, {**options, "plans": path}, 0) == [first] * 2


def convolve():
    """Run one convolution forward and backward."""
    conv = torch.nn.Conv2d(3, 4, 3)
    conv(torch.ones(2, 3, 6, 6)).sum().backward()


def test_plans_of_modules_and_of_all_convolutions_are_saved_together(tmp_path):
    module = ucudnn.torch.convert(torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3)), backend="cpu", effort=QUICK)
    with enable_on_cpu():
        convolve()
        module(torch.ones(1, 3, 6, 6))
        ucudnn.torch.save_plans(tmp_path / "plans.json")
    plans = read_plans(tmp_path / "plans.json").plans
    assert sorted(each.kernel.layer for each in plans) == ["", "", "0"]
    with enable_on_cpu(plans=tmp_path / "plans.json") as on:
        convolve()
    assert {each.origin for report in on.report().reports.values() for each in report.kernels} == {"file"}


@pytest.fixture
def plans(tmp_path):
    """Return a path for a file of plans."""
    return tmp_path / "plans.json"


def test_nothing_planned_is_nothing_to_save(plans):
    with enable_on_cpu() as on, pytest.raises(PlanFileError, match="no convolution was planned yet"):
        on.save_plans(plans)


def test_a_file_that_is_none_is_refused_when_it_is_named(plans):
    plans.write_text("{}")
    with pytest.raises(PlanFileError, match="no file of plans"):
        enable_on_cpu(plans=plans)


def test_plans_of_another_device_are_an_error_and_not_left_to_pytorch(plans):
    with enable_on_cpu() as on:
        convolve()
        on.save_plans(plans)
    content = json.loads(plans.read_bytes())
    content["conditions"]["device"] = "another"
    plans.write_text(json.dumps(content))
    with enable_on_cpu(plans=plans), pytest.raises(PlanFileError, match="was made for device another"):
        convolve()


@pytest.fixture
def program(tmp_path, monkeypatch, capsys):
    """Return a function that runs a program in a folder of its own, and returns its exit status and errors."""

    def run(text, *options):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "program.py").write_text(text)
        try:
            main(["--backend", "cpu", "--database", "off", *options, "program.py"])
        except SystemExit as end:
            return end.code, capsys.readouterr().err
        return 0, capsys.readouterr().err

    return run


CONVOLVE = "import torch\ntorch.nn.functional.conv2d(torch.ones(2, 3, 6, 6), torch.ones(4, 3, 3, 3))"


def test_a_program_saves_and_loads_plans(program, plans):
    assert program(CONVOLVE, "--save-plans", str(plans)) == (0, "")
    (plan,) = read_plans(plans).plans
    assert plan.timed
    _, errors = program(CONVOLVE, "--plans", str(plans), "--report")
    assert "not measured: 1 from a file of plans" in errors


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("raise AssertionError", ("--plans", "missing.json"), "plans 'missing.json' cannot be read: No such file"),
        ("raise AssertionError", ("--save-plans", "no/f.json"), "no/f.json cannot be written: there is no folder"),
        ("", ("--save-plans", "plans.json"), "no plans to save"),
    ],
    ids=["does not begin without plans", "does not begin without a folder", "has no convolutions"],
)
def test_a_program_without_its_plans_ends_with_an_error(program, text, options, message):
    code, errors = program(text, *options)
    assert code == 2
    assert message in errors


def test_a_timed_model_saves_and_loads_plans(timed, plans):
    for options in (["--save-plans"], ["--json", "--plans"]):
        model = "tests.support.broken_models:plain"
        code, output, errors = timed(model, "--shape", "3x6x6", "--backend", "cpu", *options, str(plans))
        assert code == 0, errors
    (report,) = json.loads(output)["reports"].values()
    assert {kernel["origin"] for kernel in report["kernels"]} == {"file"}
