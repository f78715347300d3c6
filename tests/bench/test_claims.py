"""bench.tools.claims: a piece of work belongs to one process, until that process leaves it or ends."""

import json
import subprocess
import sys

import pytest

from bench.tools.claims import Claims
from bench.tools.results import ROOT

PROGRAM = """
import sys, time
from pathlib import Path
from bench.tools.claims import Claims
claims = Claims(Path(sys.argv[1]))
taken = []
for index in range(200):
    if claims.take(f"piece/{index}"):
        taken.append(index)
        claims.finish(f"piece/{index}", done=True)
print(taken)
"""


def test_nobody_else_takes_a_piece_until_it_is_left(tmp_path):
    one, other = Claims(tmp_path / "claims"), Claims(tmp_path / "claims")
    assert one.take("a/b")
    assert not other.take("a/b")
    one.finish("a/b", done=False)
    assert other.take("a/b")
    other.finish("a/b", done=True)
    assert not one.take("a/b")
    assert Claims(None).take("a/b")
    Claims(None).finish("a/b", done=True)


@pytest.mark.parametrize("left", ["", "gone"])
def test_a_piece_of_a_process_that_has_ended_is_taken(tmp_path, left):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / "a").write_text(str(ended.pid) if left else "")
    assert Claims(tmp_path).take("a")
    assert not Claims(tmp_path).take("a")


def test_processes_take_each_piece_once(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "claims")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(3)]
    taken = [index for each in processes for index in json.loads(each.communicate()[0])]
    assert sorted(taken) == list(range(200))
