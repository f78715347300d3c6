"""bench/claims.py: what is done or in hand is nobody else's, what was left behind is."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
from pathlib import Path
from claims import Claims
claims = Claims(Path(sys.argv[1]))
taken = []
for index in range(200):
    if claims.take(f"piece/{index}"):
        taken.append(index)
        claims.finish(f"piece/{index}", done=True)
print(taken)
"""


@pytest.fixture
def claims(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    yield import_module("claims").Claims
    del sys.modules["claims"]


def test_what_is_taken_is_nobody_elses_until_it_is_left(claims, tmp_path):
    one, other = claims(tmp_path / "claims"), claims(tmp_path / "claims")
    assert one.take("a/b")
    assert not other.take("a/b")
    one.finish("a/b", done=False)
    assert other.take("a/b")
    other.finish("a/b", done=True)
    assert not one.take("a/b")
    assert claims(None).take("a/b")
    claims(None).finish("a/b", done=True)


@pytest.mark.parametrize("left", ["", "gone"])
def test_what_a_process_left_behind_that_has_ended_is_taken(claims, tmp_path, left):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / "a").write_text(str(ended.pid) if left else "")
    assert claims(tmp_path).take("a")
    assert not claims(tmp_path).take("a")


def test_processes_share_all_and_nothing_twice(tmp_path):
    environment = {"PYTHONPATH": str(Path(__file__).parents[2] / "bench"), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "claims")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)]
    taken = [index for each in processes for index in json.loads(each.communicate()[0])]
    assert sorted(taken) == list(range(200))
