"""Turns on a GPU: tests share it, one that is alone waits for all others, and others wait for it."""

import os
import sys
import textwrap
from pathlib import Path
from subprocess import PIPE, Popen, run
from threading import Event, Thread

import pytest

from tests.support.gpu_turns import gpu_turn

ROOT = Path(__file__).parents[1]
WAITING_S = 0.3  # long enough for one who waits to take a lock that is free


class Other(Thread):
    """Somebody else who wants a turn: files that are opened anew are locked against each other in one process, too."""

    def __init__(self, kind, folder):
        super().__init__(daemon=True)
        self._kind, self._folder, self._in, self._end = kind, folder, Event(), Event()
        self.start()

    def run(self):
        with gpu_turn(alone=self._kind == "alone", folder=self._folder):
            self._in.set()
            self._end.wait()

    def is_in(self, within_s):
        """Return whether it has its turn, after some time at most."""
        return self._in.wait(within_s)

    def leave(self):
        """End its turn, or its wish for one."""
        self._end.set()


@pytest.fixture
def others(tmp_path):
    """Return a function that starts somebody who wants a turn."""
    made = []

    def start(kind):
        made.append(Other(kind, tmp_path))
        return made[-1]

    yield start
    for each in made:
        each.leave()


def test_others_share_and_one_that_is_alone_waits_for_them_and_goes_before_those_that_come_later(others):
    first, second = others("shared"), others("shared")
    assert first.is_in(60)
    assert second.is_in(60)
    alone = others("alone")
    assert not alone.is_in(WAITING_S)
    later = others("shared")
    assert not later.is_in(WAITING_S)
    first.leave()
    assert not alone.is_in(WAITING_S)
    second.leave()
    assert alone.is_in(60)
    assert not later.is_in(WAITING_S)
    alone.leave()
    assert later.is_in(60)


def test_a_turn_ends_with_an_error_and_with_a_killed_process(others, tmp_path):
    with pytest.raises(ValueError, match="in a test"), gpu_turn(alone=True, folder=tmp_path):
        raise ValueError("in a test")
    code = "import sys, pathlib, time; from tests.support.gpu_turns import gpu_turn\n"
    code += "with gpu_turn(alone=True, folder=pathlib.Path(sys.argv[1])): print('in', flush=True), time.sleep(600)"
    with Popen([sys.executable, "-c", code, tmp_path], stdout=PIPE, cwd=ROOT) as killed:
        assert killed.stdout.readline() == b"in\n"
        waiting = others("alone")
        assert not waiting.is_in(WAITING_S)
        killed.kill()
    assert waiting.is_in(60)


TESTS = """
    import fcntl
    import pytest
    from tests.support.gpu_turns import turns_folder

    def is_free(kind):
        with (turns_folder() / "room").open("a") as room:
            try:
                fcntl.flock(room, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    @pytest.fixture(scope="module")
    def prepared():
        return is_free(fcntl.LOCK_SH), is_free(fcntl.LOCK_EX)

    @pytest.mark.gpu
    @pytest.mark.alone
    def test_alone(prepared):
        assert prepared == (False, False)

    @pytest.mark.gpu
    def test_shared():
        assert is_free(fcntl.LOCK_SH)
        assert not is_free(fcntl.LOCK_EX)

    def test_without_a_gpu():
        assert is_free(fcntl.LOCK_EX)
"""


@pytest.mark.slow
def test_the_suite_gives_turns_to_tests_that_need_a_gpu(tmp_path):
    (tmp_path / "test_one.py").write_text(textwrap.dedent(TESTS))
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_runtest_protocol\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-c"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = run([*command, ROOT / "pyproject.toml", tmp_path], cwd=tmp_path, env=environment, stdout=PIPE, text=True)
    assert "3 passed" in done.stdout, done.stdout
