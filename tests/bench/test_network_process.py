"""bench.torch.network_process: a process that waits, answers, and is not waited for; and what is read before it."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.tools.read_ahead import libraries, read_ahead
from bench.tools.results import ROOT
from bench.torch.network_order import Cell
from bench.torch.network_process import CellProcess

CELL = Cell("small", "nchw", "stock", 0)
MOST_S = 300.0


@pytest.fixture
def started():
    found = []

    def start(*lines):
        code = "\n".join(("import json, sys, time", *lines))
        found.append(CellProcess(CELL, [sys.executable, "-c", code], os.environ))
        return found[-1]

    yield start
    for each in found:
        each.kill()
        each.reap()


def is_running(pid):
    return (Path("/proc") / str(pid)).exists()


def test_an_answer_is_there_while_its_process_is_still_ending(started):
    process = started(
        "sys.stdin.readline()",
        "print('a line of a library')",
        "print(3)",
        "print(json.dumps({'step_ms': 2.5, 'samples_ms': [2.5] * 50000}), flush=True)",  # more than a pipe holds
        "sys.stdin.read()",  # until the pipe is closed
    )
    answer = process.measure(MOST_S)
    assert answer == {"step_ms": 2.5, "samples_ms": [2.5] * 50000, "warnings": []}
    assert is_running(process.pid)
    process.kill()
    process.reap()
    assert not is_running(process.pid)


def test_nothing_is_measured_before_its_turn(started, tmp_path):
    file = tmp_path / "begun"
    process = started("print('ready', flush=True)", "sys.stdin.readline()", f"open({str(file)!r}, 'w')", "print('{}')")
    assert os.read(process._stdout, 5) == b"ready"
    assert not file.exists()
    assert process.measure(MOST_S) == {"warnings": []}
    assert file.exists()


def test_what_a_process_says_blocks_nothing_and_names_no_folder_of_the_machine(started):
    process = started(
        "sys.stdin.readline()",
        "for _ in range(20_000): print('a warning', file=sys.stderr)",
        "print('  File \"/home/someone/torch/nn.py\", line 1', file=sys.stderr, flush=True)",
        "print(json.dumps({'error': 'no memory'}))",
    )
    answer = process.measure(MOST_S)
    assert answer["error"] == "no memory"
    assert answer["warnings"] == ["a warning"] * 11 + ['  File "torch/nn.py", line 1']


def test_a_process_that_ends_without_an_answer_is_an_error(started):
    process = started("sys.stdin.readline()", "print('{\"step_ms\"', flush=True)", "sys.exit(3)")
    assert process.measure(MOST_S) == {"error": "exit status 3", "warnings": []}
    ended = started("sys.exit(4)")
    ended._popen.wait(MOST_S)
    assert ended.measure(MOST_S) == {"error": "exit status 4", "warnings": []}


def test_a_process_that_does_not_answer_in_time_gives_none(started):
    process = started("sys.stdin.readline()", "sys.stdin.readline()")
    assert process.measure(0.1) is None
    assert is_running(process.pid)


def test_the_lock_is_held_to_the_end_of_the_process_and_given_back_after_other_files(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "gpu.lock"
    code = f"""
import os, sys
from pathlib import Path
from bench.torch.network_cell import lock
lock(Path({str(path)!r}))
later = os.open(os.devnull, os.O_RDONLY)
mine = [int(each) for each in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + each)
        and os.path.samefile("/proc/self/fd/" + each, {str(path)!r})]
print(max(mine) > later, flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "True\n"
        with path.open() as other:
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            process.communicate()
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_libraries_are_read_the_largest_first(tmp_path, monkeypatch):
    package = tmp_path / "torch"
    sizes = {"torch/lib/libtorch.so": 10, "nvidia/cu13/lib/libcudnn.so.9": 30, "nvidia/cu13/lib/libcublas.so.13": 20}
    for name, size in {**sizes, "torch/lib/note.txt": 99, "numpy/lib/other.so": 99}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    (package / "lib" / "libtorch.so.1").symlink_to("libtorch.so")
    found = list(libraries(package))
    expected = ["libcudnn.so.9", "libcublas.so.13", "libtorch.so"]
    assert [path.name for path in found] == expected
    read = []
    real = Path.open

    def opened(path, *arguments, **options):
        read.append(path.name)
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", opened)
    read_ahead([found[0], tmp_path / "gone.so", *found[1:]]).join()
    assert read == [expected[0], "gone.so", *expected[1:]]
