"""Every script of bench/ runs as a module from the repository's root, and its help says so."""

import json
import re
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.tools import script
from bench.tools.results import ROOT, load
from bench.tools.script import add_names, command_line, out_of, run_main, verdict
from ucudnn.errors import UcudnnError

SCRIPTS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "bench").glob("*/*.py")
    if '__name__ == "__main__"' in path.read_text()
)


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs a script in this process, which has imported PyTorch; its trials have their own."""

    def main(module, *given):
        monkeypatch.setattr(sys, "argv", [module, *given])
        return import_module(module).main()

    return main


@pytest.mark.parametrize("module", SCRIPTS)
def test_the_help_of_a_script_names_its_module_and_no_file(module, run, capsys):
    if ".torch." in module or ".memory." in module:
        pytest.importorskip("torch")
    if module == "bench.paper.solvers":
        pytest.importorskip("swiglpk")
    with pytest.raises(SystemExit) as ended:
        run(module, "--help")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: python -m {module} " in re.sub(r"\s+", " ", text)
    assert f"python -m {module}" in import_module(module).__doc__
    assert not re.search(r"bench/(?!data/|results)[\w/]*\.py", text)


def test_a_trial_on_the_cpu_writes_no_results_unless_a_file_is_named(monkeypatch):
    parser = command_line("What it does.", "bench.gpu.slabs", "gpu/slabs.json")
    parser.add_argument("--backend", default="cudnn")
    for options, out in (
        ([], ROOT / "bench/results/gpu/slabs.json"),
        (["--backend", "cpu"], None),
        (["--backend", "cpu", "--out", "own.json"], Path("own.json")),
    ):
        assert out_of(parser.parse_args(options)) == out


@pytest.mark.parametrize(("answer", "code"), [(None, 0), (True, 0), (False, 1)])
def test_a_script_ends_with_1_if_something_failed(answer, code):
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: answer)
    assert ended.value.code == code


def test_an_error_of_ucudnn_ends_a_script_in_one_line():
    def main():
        raise UcudnnError("no GPU")

    with pytest.raises(SystemExit, match=r"^error: no GPU$"):
        run_main(main)


def test_names_are_any_that_are_known(capsys):
    parser = command_line("", "x")
    add_names(parser, {"one": 1, "two": 2})
    assert parser.parse_args([]).names == []
    assert parser.parse_args(["two", "one"]).names == ["two", "one"]
    with pytest.raises(SystemExit):
        parser.parse_args(["one", "three"])
    assert "three: give some of one, two" in capsys.readouterr().err


def test_a_verdict_names_the_figure_and_its_bound(capsys):
    assert verdict("steps", 1.02, 1.03)["met"]
    assert not verdict("steps", 1.04, 1.03, " s")["met"]
    assert capsys.readouterr().out == "met    steps: 1.02, at most 1.03\nMISSED steps: 1.04 s, at most 1.03 s\n"


@pytest.fixture
def here(run, capsys):
    """Return a function that runs a script in this process, in the place of one of its own, and returns what it prints.

    One of them imports PyTorch for seconds.
    """

    def printed(module, *options):
        pytest.importorskip("torch")
        from ucudnn.torch.overrides import process_overrides

        capsys.readouterr()
        run(module, *options)
        process_overrides.use(None)
        return capsys.readouterr().out

    return printed


def test_all_ways_under_caps_are_tried_in_one_run(run, here, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from bench.torch import memory

    apart, out = subprocess.run, tmp_path / "memory.json"

    def started(command, **how):
        """Run the first trial in a process of its own, and others here."""
        if "ucudnn" in command:
            return apart(command, **how)
        return SimpleNamespace(returncode=0, stdout=here(*command[2:]))

    monkeypatch.setattr(memory.subprocess, "run", started)
    command = ["bench.torch.memory", "--backend", "cpu", "--cap", "0", "--out", str(out)]
    run(*command)
    found = load(out)
    run(*command)
    assert load(out) == found, "what is there is kept"
    ways = ("ucudnn", "undivided", "pytorch")
    assert set(found["trials"]) == {f"{way} batch 2 cap 0" for way in ways}
    assert found["caps"] == [0]
    for name, trial in found["trials"].items():
        assert trial["trains"]
        assert len(trial["samples_ms"]) == 1
        assert ("calls" in trial) == (not name.startswith("pytorch"))
        plans = [text for _, text in trial.get("configurations", ())]
        assert all(re.match(r"1x2 \w+$", text) for text in plans) or not name.startswith("undivided")


def test_networks_are_measured_once_each_in_a_process_of_its_own(run, here, capsys, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from bench.torch import networks

    out = tmp_path / "networks.json"
    command = ["bench.torch.networks", "--backend", "cpu", "--network", "small", "--form", "nchw"]
    command += ["--steps", "1", "--tuning-seconds", "0", "--setting", "stock", "--out", str(out)]
    run(*command, "--setting", "unknown")
    before = load(out)["cases"]
    assert before["small nchw stock 0"]["step_ms"] > 0
    assert "unknown" in before["small nchw unknown 0"]["error"]
    capsys.readouterr()
    monkeypatch.setattr(networks, "apart", lambda module, options: last_line(here(module, "--here", *options)))
    run(*command, "--setting", "64KiB")
    cases = load(out)["cases"]
    assert cases["small nchw stock 0"] == before["small nchw stock 0"], "it is kept"
    assert cases["small nchw 64KiB 0"]["by_turns"]["step"] > 0
    assert cases["small nchw 64KiB 0"]["loss"] == pytest.approx(cases["small nchw stock 0"]["loss"], rel=1e-3)
    assert capsys.readouterr().err.count("small nchw") == 1


def last_line(printed):
    return json.loads(printed.splitlines()[-1])


def test_image_sizes_are_the_same_for_all_settings(run, here, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from bench.torch import image_sizes

    monkeypatch.setattr(image_sizes, "apart", lambda module, options: last_line(here(module, "--here", *options)))
    out = tmp_path / "image_sizes.json"
    command = ["bench.torch.image_sizes", "--backend", "cpu", "--network", "small", "--batch", "2", "--sizes", "2"]
    run(*command, "--steps", "3", "--setting", "64KiB-off", "--out", str(out))  # NumPy is slower, which it says
    case = load(out)["cases"]["small 2 x 2 sizes"]
    assert set(case["runs"]) == {"stock-off", "64KiB-off"}
    assert all(each["seconds"] * 1e3 >= each["late_ms"] > 0 for each in case["runs"].values())
    assert case["runs"]["64KiB-off"]["kinds"]
    assert [each["what"] for each in case["claims"]] == ["64KiB-off: all steps", "64KiB-off: later steps"]


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_results_name_the_commit_that_is_given_or_that_of_the_working_tree(tmp_path, monkeypatch):
    parser = ArgumentParser()
    script.add_commit(parser)
    assert script.commit_of(parser.parse_args(["--commit", "0d8580f"])) == "0d8580f"
    monkeypatch.setattr(script, "ROOT", tmp_path)
    assert script.commit_of(parser.parse_args([])) == "", "there is no repository"
    for command in (["init"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
    assert re.fullmatch("[0-9a-f]{12}", script.commit_of(parser.parse_args([])))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert script.commit_of(parser.parse_args([])) == "", "there is no git"
