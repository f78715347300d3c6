"""`ucudnn memory run`: policies train a model and stand in one table."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from ucudnn.cli import memory_run
from ucudnn.cli.app import main
from ucudnn.errors import OutputError
from ucudnn.memory.torch.comparison import trial, trial_table
from ucudnn.memory.torch.compiling import compiled_regions

UNET = ("tests.support.training_steps:small_unet", "--shape", "3x16x16", "--batch", "4", "--on", "cpu", "--steps", "1")


@pytest.fixture
def run(call):
    """Run `ucudnn memory run`; return exit status, standard output and standard error."""
    return partial(call, "memory", "run")


@pytest.fixture
def here(monkeypatch):
    """Let trials run in this process: what the command makes of their results does not depend on that."""
    monkeypatch.setattr(trial_table, "compare_trials", partial(trial_table.compare_trials, run=trial.run_trial))


@pytest.mark.usefixtures("here")
def test_policies_are_compared_and_what_does_not_fit_has_its_reason(run):
    status, out, error = run(*UNET, "--policy", "stock,checkpoint", "--budget", "300KB")
    assert status == 0, error
    assert "small_unet, mini-batch 4, measured on cpu" in out
    assert "checkpoint" in out
    assert "stock: policy stock needs" in out


@pytest.mark.usefixtures("here")
def test_json_has_all_figures_plans_choose_convolutions_and_the_picture_has_measured_lanes(run, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("UCUDNN_DATABASE", "off")
    path = tmp_path / "queues.svg"
    given = ("--policy", "vdnn-all-m", "--convolutions", "UNDIVIDED", "--json", "--timeline", str(path))
    status, out, error = run(*UNET, *given)
    assert status == 0, error
    (row,) = json.loads(out)["policies"]
    assert row["policy"] == "vdnn-all-m"
    assert row["configured"] > 10
    assert row["offloaded"] > 0
    assert row["allocated"] > 0
    assert "picture" not in row
    text = path.read_text()
    assert text.count("D2H, measured") == text.count("compute, measured") > 0
    assert "from the host" in text


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("policy", ["stock", "checkpoint", "auto"])
def test_regions_are_compiled_where_that_is_asked_for(run, monkeypatch, policy):
    found = []
    monkeypatch.setattr(compiled_regions, "compiled", lambda graph, *_: found.append(graph) or graph.forward)
    for option, least in ((), 0), (("--compile",), 5):
        status, out, error = run(*UNET, "--policy", policy, "--json", *option)
        assert status == 0, error
        (row,) = json.loads(out)["policies"]
        assert row["step_ms"] > 0
        assert len(found) >= least
        assert bool(found) is bool(option)


def test_an_unknown_policy_runs_nothing(run):
    status, _, error = run(*UNET, "--policy", "stock,magic")
    assert status == 2
    assert "'magic' is not known" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cap", "--budget", "1GiB"), "--cap has no effect with --on cpu: leave it out"),
        (("--cap", "--on", "auto"), "--cap has no effect without --budget: add that, or leave it out"),
        (("--policy", "pytorch", "--plan-seconds", "1"), "--plan-seconds has no effect with --policy pytorch"),
        (("--policy", "pytorch", "--compile"), "--compile has no effect with --policy pytorch"),
        (("--policy", "pytorch", "--timeline", "x.png"), "--timeline has no effect with --policy pytorch"),
        (("--policy", "pytorch", "--convolutions", "all"), "--convolutions has no effect with --policy pytorch"),
        (("--batch", "0"), "--batch 0 is no mini-batch size: give 1 to 2147483647"),
        (("--batch", "2147483648"), "--batch 2147483648 is no mini-batch size"),
        (("--batch", "9" * 30), "is no mini-batch size"),
        (("no_such_module:net",), "there is no module no_such_module: no no_such_module.py in this folder"),
        (("tests.support.training_steps:no_such_net",), "no_such_net"),
        (("tests.support.training_steps",), "give module:callable"),
        (("--loss", "hinge"), "--loss='hinge' is not known: give cross-entropy"),
        (("--loss", "math:hinge"), "math:hinge"),
        (("--optimizer", "lion"), "--optimizer='lion' is not known: give sgd"),
        (("--autocast", "float32"), "--autocast='float32' is not known: give float16 or bfloat16"),
        (("--policy", "vdnn-all-m", "--convolutions", "halved"), "--convolutions='halved' is not known"),
    ],
    ids=lambda given: " ".join(given)[:40],
)
def test_an_option_without_effect_is_refused_before_a_process_starts(run, monkeypatch, arguments, message):
    """So is what no policy can train."""
    monkeypatch.setattr(trial, "process_of", lambda *_: pytest.fail("a process was started"))
    whole = arguments if ":" in arguments[0] or "." in arguments[0] else (*UNET, *arguments)
    status, out, error = run(*whole, *(() if "--on" in whole else ("--on", "cpu")))
    assert (status, out) == (2, "")
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.usefixtures("here")
def test_what_was_measured_is_not_lost_with_its_picture(run, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")

    def full(*_, **__):
        raise OutputError("queues.svg cannot be written: No space left on device")

    monkeypatch.setattr(memory_run, "draw_queues", full)
    monkeypatch.chdir(tmp_path)
    status, out, error = run(*UNET, "--policy", "stock", "--json", "--timeline", "queues.svg")
    assert status == 2
    assert "cannot be written" in error
    assert json.loads(out)["policies"]


def test_a_picture_shows_one_policy(run):
    pytest.importorskip("matplotlib")
    status, _, error = run(*UNET, "--policy", "stock,checkpoint", "--timeline", "queues.svg")
    assert status == 2
    assert "--timeline draws the step of one policy" in error


@pytest.mark.usefixtures("here")
def test_if_no_policy_ran_the_status_says_so(run):
    status, out, _ = run(*UNET, "--policy", "checkpoint", "--budget", "1KiB")
    assert status == 2
    assert "checkpoint: " in out
    assert "below the floor" in out


def test_what_a_model_prints_is_not_among_the_data(monkeypatch, capfd):
    model = "tests.support.broken_models:Writing"
    given = ("--shape", "3x8x8", "--batch", "4", "--on", "cpu", "--steps", "1", "--policy", "stock", "--json")
    monkeypatch.setattr(sys, "argv", ["ucudnn", "memory", "run", model, *given])
    with pytest.raises(SystemExit) as ended:
        main()
    out, error = capfd.readouterr()  # of the policy's own process, too
    assert ended.value.code == 0, error
    assert [each["policy"] for each in json.loads(out)["policies"]] == ["stock"]
    assert "a model's own words" in error
    assert "a library's own words" in error


@pytest.fixture
def sleeping(tmp_path):
    """Return a command whose policy sleeps in its own process, and the number of that process."""
    written = tmp_path / "process"
    process = subprocess.Popen(
        [*_UCUDNN, "memory", "run", "tests.support.broken_models:Sleeping", "--shape", "3x8x8", "--on", "cpu"],
        env=os.environ | {"SLEEPING_PROCESS": str(written)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=_ROOT,
        text=True,
        start_new_session=True,
    )
    while not written.exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.1)
    yield process, int(written.read_text())
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


_ROOT = Path(__file__).parents[4]
_UCUDNN = (sys.executable, "-m", "ucudnn")


def _running(process):
    """Return whether a process is there and no zombie, which nobody has waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("ending", ["Ctrl-C of a terminal", "Ctrl-C of the command alone", "killed"])
def test_no_process_of_a_policy_survives_its_command(sleeping, ending):
    process, worker = sleeping
    assert _running(worker)
    if ending == "killed":
        process.kill()
        process.wait()
    else:
        (os.killpg if "terminal" in ending else os.kill)(process.pid, signal.SIGINT)
        out, error = process.communicate(timeout=300)  # the model would sleep for twice as long
        assert (process.returncode, out, error) == (130, "", "")
    ends = time.monotonic() + (300 if ending == "killed" else 0)
    while _running(worker) and time.monotonic() < ends:
        time.sleep(0.1)
    assert not _running(worker)


@pytest.mark.parametrize(
    "command",
    [
        ("memory", "record", "json:model", "--out", "step.json"),
        ("memory", "run", "json:model"),
        ("time", "--torch", "json:model"),
    ],
    ids=" ".join,
)
def test_ctrl_c_while_pytorch_is_imported_is_no_error_of_pytorch(tmp_path, command):
    (tmp_path / "torch.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    raise ImportError('this is no PyTorch')\n"
        "except KeyboardInterrupt:\n"
        "    raise ImportError('Ctrl-C') from None\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(_ROOT)])
    done = subprocess.run(
        [*_UCUDNN, *command],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
