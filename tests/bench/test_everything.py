"""bench/everything.py: jobs have their GPUs to themselves, and a call goes on where the last one was stopped."""

import json
import sys
from importlib import import_module
from itertools import combinations
from pathlib import Path

import pytest

SCRIPT = """
import json, os, sys, time
name, seconds, code, folder = sys.argv[1:5]
begin = time.monotonic()
time.sleep(float(seconds))
told = {"name": name, "gpus": os.environ["CUDA_VISIBLE_DEVICES"].split(","), "cores": sorted(os.sched_getaffinity(0))}
told |= {"begin": begin, "end": time.monotonic(), "told": sys.argv[5:], "extra": os.environ.get("EXTRA")}
with open(f"{folder}/log", "a") as file:
    file.write(json.dumps(told) + chr(10))
sys.exit(int(code))
"""


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    yield import_module("everything")
    del sys.modules["everything"]


@pytest.fixture
def call(bench, monkeypatch, tmp_path):
    """Return what runs some jobs: whether nothing is left, and what they told."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    out = tmp_path / "out"

    def job(name, *, takes=0.2, code=0, seconds=1.0, **options):
        command = f"{script} {name} {takes} {code} {{out}}"
        return bench.Job(name=name, seconds=seconds, command=command, **options)

    def run(*jobs, options=()):
        monkeypatch.setattr(bench, "jobs", lambda gpus, *, again: list(jobs))
        monkeypatch.setattr(sys, "argv", ["everything.py", "--out", str(out), *options])
        well = bench.main()
        log = out / "log"
        told = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        log.unlink(missing_ok=True)
        return well, {each["name"]: each for each in told}

    return job, run


def test_jobs_have_their_gpus_to_themselves(call):
    job, run = call
    both = {name: job(name, takes=1.5, environment=extra) for name, extra in (("c", {}), ("d", {"EXTRA": "1"}))}
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


def test_a_call_goes_on_where_the_last_one_was(call, capsys):
    job, run = call
    well, told = run(job("good"), job("bad", code=3), job("next"))
    assert (well, set(told)) == (False, {"good", "bad", "next"})
    assert "bad: failed with 3, see bad.txt" in capsys.readouterr().err
    well, told = run(job("good"), job("bad"), job("next"), job("new"), options=["--only", "b*", "--only", "new"])
    assert (well, set(told)) == (True, {"bad", "new"})


def test_a_job_completes_what_is_there(bench, call, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    (tmp_path / "known.json").write_text("known")
    job, run = call
    jobs = [job(name, completes=("known.json", f"{name}{{gpus}}.json")) for name in "ab"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a7.json").write_text("its own")
    assert run(*jobs, job("c", completes=("missing.json", "c.json")), options=["--devices", "7"])[0]
    assert [(tmp_path / "out" / f"{name}7.json").read_text() for name in "ab"] == ["its own", "known"]
    assert not (tmp_path / "out" / "c.json").exists()


def test_nothing_is_begun_that_would_not_end_in_time(call, capsys):
    job, run = call
    jobs = [job("long", seconds=100.0), job("short"), job("resumes", seconds=100.0, resumes=True)]
    well, told = run(*jobs, options=["--seconds", "20"])
    assert (well, set(told)) == (False, {"short"})
    assert "not done: long, resumes" in capsys.readouterr().err
    well, told = run(*jobs, options=["--seconds", "160"])
    assert (well, set(told)) == (True, {"long", "resumes"})
    assert told["long"]["told"] == []
    assert told["resumes"]["told"][0] == "--seconds"
    assert 90 <= int(told["resumes"]["told"][1]) <= 100


def test_what_takes_too_long_is_stopped(bench, call, monkeypatch, capsys):
    monkeypatch.setattr(bench, "GRACE", 0.5)
    job, run = call
    well, told = run(job("endless", takes=60, seconds=0.1), job("next"))
    assert (well, set(told)) == (False, {"next"})
    assert "endless: stopped, time is up" in capsys.readouterr().err


def test_what_is_not_there_is_named(call, capsys):
    job, run = call
    for options, message in (
        (["--only", "x*"], "--only x*: there is a"),
        (["--devices", "a"], "--devices a: give num"),
    ):
        with pytest.raises(SystemExit):
            run(job("a"), options=options)
        assert message in capsys.readouterr().err


def test_all_jobs_are_scripts_that_take_their_arguments(bench, capsys):
    for gpus in (1, 2):
        names = [job.name for job in bench.jobs(gpus)]
        assert len(set(names)) == len(names)
        assert ("devices" in names) == (gpus > 1)
        again = [job.command for job in bench.jobs(gpus, again=True) if "--again" in job.command]
        assert len(again) == gpus
        assert all(command.startswith("peers.py") for command in again)
        for job in bench.jobs(gpus, again=True):
            script, *arguments = job.command.split()
            text = (bench.BENCH / script).read_text()
            text += "".join((bench.BENCH / f"{name}.py").read_text() for name in ("figures", "torch_models"))
            for each in arguments:
                assert not each.startswith("--") or f'"{each}"' in text, job
