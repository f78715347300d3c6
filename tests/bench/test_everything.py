"""bench.tools.everything: no two jobs share a GPU, and a call continues where the last one stopped."""

import json
import sys
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path

import pytest

from bench.tools import everything

SCRIPT = """
import json, os, sys, time
name, seconds, code, folder = sys.argv[1:5]
begin = time.monotonic()
open(f"{folder}/{name} runs", "w").close()
while (other := os.environ.get("MEETS")) and not os.path.exists(f"{folder}/{other} runs"):
    time.sleep(0.01)
time.sleep(float(seconds))
told = {"name": name, "gpus": os.environ["CUDA_VISIBLE_DEVICES"].split(","), "cores": sorted(os.sched_getaffinity(0))}
told |= {"begin": begin, "end": time.monotonic(), "told": sys.argv[5:], "extra": os.environ.get("EXTRA")}
with open(f"{folder}/log", "a") as file:
    file.write(json.dumps(told) + chr(10))
sys.exit(int(code))
"""


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Return functions that make a job and run jobs; the second returns whether no job is left, and the jobs' logs."""
    (tmp_path / "script_of_a_job.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = tmp_path / "out"

    def job(name, *, takes=0.2, code=0, seconds=1.0, **options):
        command = f"script_of_a_job {name} {takes} {code} {{out}}"
        return everything.Job(name=name, seconds=seconds, command=command, **options)

    def run(*jobs, options=()):
        monkeypatch.setattr(everything, "jobs", lambda gpus, *, again: list(jobs))
        monkeypatch.setattr(sys, "argv", ["everything", "--out", str(out), *options])
        well = everything.main()
        log = out / "log"
        told = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        log.unlink(missing_ok=True)
        return well, {each["name"]: each for each in told}

    return job, run


def test_no_two_jobs_share_a_gpu_at_a_time(call):
    job, run = call
    extra = {"c": {"MEETS": "d"}, "d": {"MEETS": "c", "EXTRA": "1"}}
    both = {name: job(name, seconds=100.0, environment=each) for name, each in extra.items()}
    jobs = [job("a"), job("b", gpus=2), *both.values(), job("e")]
    well, told = run(*jobs, options=["--devices", "2,5"])
    assert well
    assert set(told) == set("abcde")
    assert told["b"]["gpus"] == ["2", "5"]
    assert {each["gpus"][0] for each in told.values()} == {"2", "5"}
    for one, other in combinations(told.values(), 2):
        if set(one["gpus"]) & set(other["gpus"]):
            assert one["end"] <= other["begin"] or other["end"] <= one["begin"]
    assert told["c"]["begin"] < told["d"]["end"]
    assert told["d"]["begin"] < told["c"]["end"], "on two GPUs, two at once"
    assert [told[name]["extra"] for name in "cd"] == [None, "1"]
    assert set(told["c"]["cores"]) | set(told["d"]["cores"]) == set(told["b"]["cores"])


def test_a_call_runs_the_jobs_that_earlier_calls_left(call, capsys):
    job, run = call
    well, told = run(job("good"), job("bad", code=3), job("next"))
    assert (well, set(told)) == (False, {"good", "bad", "next"})
    assert "bad: failed with 3, see bad.txt" in capsys.readouterr().err
    well, told = run(job("good"), job("bad"), job("next"), job("new"), options=["--only", "b*", "--only", "new"])
    assert (well, set(told)) == (True, {"bad", "new"})


def test_a_job_starts_from_the_known_results(call, monkeypatch, tmp_path):
    monkeypatch.setattr(everything, "RESULTS", tmp_path)
    (tmp_path / "known.json").write_text("known")
    job, run = call
    jobs = [job(name, completes=("known.json", f"folder/{name}{{gpus}}.json")) for name in "ab"]
    (tmp_path / "out" / "folder").mkdir(parents=True)
    (tmp_path / "out" / "folder" / "a7.json").write_text("its own")
    assert run(*jobs, job("c", completes=("missing.json", "c.json")), options=["--devices", "7"])[0]
    assert [(tmp_path / "out" / "folder" / f"{name}7.json").read_text() for name in "ab"] == ["its own", "known"]
    assert not (tmp_path / "out" / "c.json").exists()


def test_a_job_that_would_not_end_in_time_is_not_started(call, monkeypatch, capsys):
    monkeypatch.setattr(everything, "monotonic", lambda: 1000.0)
    job, run = call
    jobs = [job("long", seconds=100.0), job("short"), job("resumes", seconds=100.0, resumes=True)]
    well, told = run(*jobs, options=["--seconds", "20"])
    assert (well, set(told)) == (False, {"short"})
    assert "not done: long, resumes" in capsys.readouterr().err
    well, told = run(*jobs, options=["--seconds", "160"])
    assert (well, set(told)) == (True, {"long", "resumes"})
    assert told["long"]["told"] == []
    assert told["resumes"]["told"] == ["--seconds", "100"]


def test_a_job_that_takes_too_long_is_stopped(call, monkeypatch, capsys):
    monkeypatch.setattr(everything, "GRACE_S", 0.5)
    job, run = call
    well, told = run(job("endless", takes=600, seconds=0.1), job("next", seconds=300.0))
    assert (well, set(told)) == (False, {"next"})
    assert "endless: stopped, time is up" in capsys.readouterr().err


def test_an_unknown_job_or_device_is_named(call, capsys):
    job, run = call
    for options, message in (
        (["--only", "x*"], "--only x*: there is a"),
        (["--devices", "a"], "--devices a: give num"),
    ):
        with pytest.raises(SystemExit):
            run(job("a"), options=options)
        assert message in capsys.readouterr().err


def test_all_jobs_are_scripts_that_take_their_arguments():
    for gpus in (1, 2):
        names = [job.name for job in everything.jobs(gpus)]
        assert len(set(names)) == len(names)
        assert ("devices" in names) == (gpus > 1)
        again = [job.command for job in everything.jobs(gpus, again=True) if "--again" in job.command]
        assert len(again) == gpus
        assert all(command.startswith("bench.peers.compare ") for command in again)
        for job in everything.jobs(gpus, again=True):
            module, *arguments = job.command.split()
            text = "".join(
                source(name) for name in (module, "bench.paper.figures", "bench.torch.measuring", "bench.tools.script")
            )
            for each in arguments:
                assert not each.startswith("--") or f'"{each}"' in text, job


def test_results_of_jobs_lie_as_in_the_folder_of_results():
    for job in everything.jobs(2):
        module, *arguments = job.command.split()
        out = Path(arguments[arguments.index("--out") + 1])
        assert out.parts[:2] == ("{out}", module.split(".")[1])
        for path in job.completes or ():
            assert path.partition("/")[0] == out.parts[1]


def source(module):
    return Path(find_spec(module).origin).read_text()
