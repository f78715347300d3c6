"""Every script of bench/ runs as a module from the repository's root, and its help says so."""

import re
import shutil
import subprocess
import sys
from argparse import ArgumentParser, ArgumentTypeError
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.tools import script
from bench.tools.results import ROOT, load, save_case
from bench.tools.script import add_names, command_line, out_of, run_main, verdict
from tests.support.problems import make_problem
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.errors import UcudnnError

SCRIPTS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "bench").glob("*/*.py")
    if '__name__ == "__main__"' in path.read_text()
)


@pytest.mark.parametrize("module", SCRIPTS)
def test_the_help_of_a_script_names_its_module_and_no_file(module, monkeypatch, capsys):
    if ".torch." in module or ".memory." in module:
        pytest.importorskip("torch")
    if module == "bench.paper.solvers":
        pytest.importorskip("swiglpk")
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        import_module(module).main()
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: python -m {module} " in re.sub(r"\s+", " ", text)
    assert f"python -m {module}" in import_module(module).__doc__
    assert not re.search(r"bench/(?!data/|results)[\w/]*\.py", text)


def test_a_script_runs_as_a_module(tmp_path):
    out = tmp_path / "volume.json"
    trial = ["--backend", "cpu", "--batch", "2", "--side", "4", "--repeats", "1", "--workspace", "1MiB", "--out"]
    subprocess.run([sys.executable, "-m", "bench.gpu.volume", *trial, str(out)], cwd=ROOT, check=True)
    assert {row["operation"] for row in load(out)["rows"]} == {"Forward", "BackwardData", "BackwardFilter"}


def test_a_trial_on_the_cpu_writes_no_results_unless_a_file_is_named(monkeypatch):
    parser = command_line("What it does.", "bench.gpu.volume", "gpu/volume.json")
    parser.add_argument("--backend", default="cudnn")
    for options, out in (
        ([], ROOT / "bench/results/gpu/volume.json"),
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


def test_peaks_of_training_steps_are_compared_without_a_gpu(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "peaks.json"
    command = [
        sys.executable,
        "-m",
        "bench.memory.peaks",
        "--backend",
        "cpu",
        "--steps",
        "1",
        "unet3d",
        "--out",
        str(out),
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    case = load(out)["cases"]["unet3d"]
    assert abs(case["recorded"]["error"]) < 1e-3
    assert case["recorded"]["operator"] == case["pytorch"]["operator"] == "convolution_backward"
    assert case["recorded"]["source"] == case["pytorch"]["source"]


def test_all_ways_under_caps_are_tried_in_one_run(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "memory.json"
    command = [sys.executable, "-m", "bench.torch.memory", "--backend", "cpu", "--cap", "0", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True)
    found = load(out)
    ways = ("ucudnn", "undivided", "pytorch")
    assert set(found["trials"]) == {f"{way} batch 2 cap 0" for way in ways}
    assert found["caps"] == [0]
    for name, trial in found["trials"].items():
        assert trial["trains"]
        assert len(trial["samples_ms"]) == 1
        assert ("calls" in trial) == (not name.startswith("pytorch"))
        plans = [text for _, text in trial.get("configurations", ())]
        assert all(re.match(r"1x2 \w+$", text) for text in plans) or not name.startswith("undivided")


def run_small(program, out, *options):
    """Run a program of bench.torch.programs with a small network on the CPU, and return what it said."""
    command = [sys.executable, "-m", f"bench.torch.programs.{program}", "--backend", "cpu", "--network", "small"]
    command += [*options, "--out", str(out)]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)


def test_predicted_times_stand_beside_those_in_a_program_without_a_gpu(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "whereabouts.json"
    done = run_small("whereabouts", out, "--steps", "2", "--repeats", "1", "--way", "stock", "--way", "64KiB")
    cases = load(out)["cases"]
    stock, ours = cases["small nchw stock"]["places"], cases["small nchw 64KiB"]["places"]
    assert set(stock) == set(ours)
    assert {text.split()[0] for text in ours} == {"Forward", "BackwardData", "BackwardFilter"}
    assert sum(place["calls"] for place in ours.values()) == 3 * 9 - 1, "nine convolutions; images need no gradient"
    assert all(place["predicted_ms"] > 0 and place["alone_ms"] > 0 and place["ms"] > 0 for place in ours.values())
    assert not any("plan" in place for place in stock.values())
    assert "| Forward dense 3x3 | 5 |" in done.stdout


def test_plans_of_a_program_are_replaced_without_a_gpu_and_none_twice(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "replacements.json"
    options = "--workspace", "256KiB", "--kernels", "2", "--worth", "1"
    done = run_small("replacements", out, *options, "--limit-seconds", "0")
    assert '"complete": false' in done.stdout, "time is over before the first plan"
    plans = tmp_path / "replacements.small.plans.json"
    before = plans.read_bytes()
    done = run_small("replacements", out, *options)
    assert '"complete": true' in done.stdout
    cases = load(tmp_path / "replacements.small.nchw.256KiB.json")["cases"]
    assert len(cases) == 2
    for case in cases.values():
        assert len(case["tried"]) > 4, "undivided and in micro-batches"
        assert {plan.partition("x")[0] for plan in case["tried"]} == {"1", "2", "4"}
        assert any(ms is not None for ms in case["tried"].values())
    shared = run_small("replacements", out, *options, "--share", "2/2")
    assert plans.read_bytes() == before
    assert "1 kernels, 0 plans to try" in shared.stderr


def test_shares_of_kernels_that_are_timed_anew_have_each_kernel_once(tmp_path):
    pytest.importorskip("torch")
    from bench.torch.programs.replacements import costliest

    plans = tmp_path / "plans.json"
    assert costliest({"a": 3.0, "b": 2.0, "c": 1.9, "d": 0.1}, plans, 3) == ["a", "b", "c"]
    later = {"a": 3.0, "b": 1.9, "c": 2.0, "d": 2.5}
    assert costliest(later, plans, 3)[0::2] + costliest(later, plans, 3)[1::2] == ["a", "c", "b"]
    assert costliest(later, plans, 2) == ["a", "b"]
    assert costliest(later, plans, 4) == ["a", "d", "c", "b"], "the file has too few"
    assert costliest({"a": 1.0, "e": 2.0, "f": 3.0, "g": 4.0}, plans, 4) == ["g", "f", "e", "a"], "of another program"


def test_first_plans_of_a_program_that_is_still_tuned_are_not_replaced(run_case, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from bench.torch.programs import replacements

    monkeypatch.setattr(replacements, "is_settled", lambda on: False)
    plans = tmp_path / "plans.json"
    options = "--backend", "cpu", "--network", "small", "--workspace", "256KiB", "--plans", str(plans)
    with pytest.raises(SystemExit, match="not settled after --tuning-seconds 0: give more"):
        run_case(replacements, *options, "--tuning-seconds", "0")
    assert not plans.exists()


def test_what_was_tried_at_another_commit_or_beside_another_plan_is_tried_again(tmp_path):
    pytest.importorskip("torch")
    from bench.torch.programs.replacements import Search

    problem, begun, out = make_problem(), [], tmp_path / "replacements.json"
    builders = SimpleNamespace(begin=lambda *each: begun.append(each))
    program = SimpleNamespace(backend=CpuBackend(), costs={problem: 1.0}, own={problem: "1x8 GEMM"}, limit_bytes=2**20)

    def waiting(commit):
        (kernel,) = Search(program, builders, out, commit).kernels.values()
        save_case(out, str(problem), kernel.case | {"tried": {str(each): 1.0 for each in list(kernel.waiting)[:3]}})
        return len(kernel.waiting), kernel.case["commit"]

    count, _ = waiting("one")
    assert count > 3
    assert waiting("one") == (count - 3, "one")
    assert waiting("other") == (count, "other")
    program.own[problem] = "1x8 FFT"
    assert waiting("other") == (count, "other")
    assert len(begun) == 4 * count - 3


@pytest.mark.parametrize(("seconds", "rounds"), [(8.0, 2), (1e9, None)])
def test_time_is_left_to_compare_the_plans_that_promise_most(tmp_path, monkeypatch, seconds, rounds):
    pytest.importorskip("torch")
    from bench.torch.programs import replacements

    now, compared, ran = [0.0], [], []
    problems = [make_problem(channels=channels, groups=1) for channels in (4, 6)]

    def gain(problem, plan):
        now[0] += 0.5
        compared.append((problem, str(plan)))
        return 0.9

    def one_round(plans):
        """Let each plan take less time than those before, and save more of the second kernel's."""
        now[0] += 2.0
        ran.append(plans)
        return {problem: 9 - len(ran) / 10 - problems.index(problem) for problem in plans}

    program = SimpleNamespace(
        backend=CpuBackend(), costs=dict.fromkeys(problems, 10.0), own=dict.fromkeys(problems, "1x8 GEMM"),
        limit_bytes=2**20, step_seconds=0.5 / 36, round=one_round, gain=gain,
    )  # fmt: skip
    monkeypatch.setattr(replacements, "monotonic", lambda: now[0])
    builders = SimpleNamespace(begin=lambda *each: None, take=lambda *each: [])
    search = replacements.Search(program, builders, None, "one")
    count = max(len(each.waiting) for each in search.kernels.values())
    assert count > 4
    assert search.run(seconds) == (rounds is None)
    assert len(ran) == (rounds or count)
    assert [problem for problem, _ in compared] == [problems[1]] * 2 + [problems[0]] * 2
    fastest = {str(plans[problems[1]]) for plans in ran[-2:]}
    assert {name for _, name in compared[:2]} == fastest, "the latest ones take least"
    assert now[0] <= seconds


@pytest.mark.parametrize(
    ("text", "share"), [("1/4", (0, 4)), ("4/4", (3, 4)), ("0/4", None), ("5/4", None), ("2", None), ("-1/2", None)]
)
def test_kernels_are_shared_among_calls(text, share):
    pytest.importorskip("torch")
    from bench.torch.programs.replacements import _share

    if share is None:
        with pytest.raises(ArgumentTypeError, match=f"{text!r} is no share"):
            _share(text)
    else:
        assert _share(text) == share


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


def test_a_program_that_is_left_alone_is_compared_with_itself_before_beside_one_that_was_never_tuned(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "left_alone.json"
    done = run_small("left_alone", out, "--form", "nchw", "--setting", "64KiB", "--seconds", "0", "--repeats", "1")
    case = load(out)["cases"]["small nchw 64KiB"]
    assert {setting: len(found) for setting, found in case["runs"].items()} == {"stock": 1, "64KiB": 1}
    for found in [each for every in case["runs"].values() for each in every]:
        assert found["settled"]
        assert all(len(found[part]["steps_ms"]) == 20 for part in ("before", "within", "after"))
        assert all(len(found[part]["hosts_ms"]) == 1 for part in ("before", "within", "after"))
    assert re.search(r"64KiB +within +step +\d\.\d{3}\n", done.stdout)
    assert re.findall(r"^(stock|64KiB): before", done.stderr, re.MULTILINE) == ["stock", "64KiB"]


def test_processes_of_both_kinds_take_turns_and_their_spread_is_told(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    from bench.torch.programs import left_alone

    order = []

    def trained(module, arguments, setting, names):
        order.append(setting)
        later = {"steps_ms": [2.0 + len(order)], "hosts_ms": [1.0]}
        return {
            "before": {"steps_ms": [2.0], "hosts_ms": [1.0]},
            "within": later,
            "after": later,
            "settled": 1,
            "steps": 9,
        }

    monkeypatch.setattr(left_alone, "trained", trained)
    options = ["--setting", "64KiB", "--repeats", "2", "--out", str(tmp_path / "left_alone.json")]
    left_alone.compare(left_alone._parser().parse_args(options))
    assert order == ["stock", "64KiB", "64KiB", "stock"]
    assert re.search(r"64KiB +within +step +\d\.\d{3}, standard error \d\.\d{3}\n", capsys.readouterr().out)


def test_what_was_timed_before_a_process_failed_is_kept(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from bench.torch.programs import left_alone

    times = {part: {"steps_ms": [2.0], "hosts_ms": [1.0]} for part in ("before", "within", "after")}

    def trained(module, arguments, setting, names):
        if setting != "stock":
            raise SystemExit(f"{setting}: out of memory")
        return {**times, "settled": True, "steps": 100}

    out = tmp_path / "left_alone.json"
    monkeypatch.setattr(left_alone, "trained", trained)
    with pytest.raises(SystemExit, match="out of memory"):
        left_alone.compare(left_alone._parser().parse_args(["--setting", "64KiB", "--out", str(out)]))
    case = load(out)["cases"]["mobilenetv3_large_100 bf16 64KiB"]
    assert {setting: len(found) for setting, found in case["runs"].items()} == {"stock": 1, "64KiB": 0}
    assert len(case["ratios"]) == 4
