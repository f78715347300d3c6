"""Standard output that is closed, full, a pipe that nobody reads, or of an encoding that lacks characters."""

import subprocess
import sys

import pytest

PLAN = [sys.executable, "-m", "ucudnn", "plan", "alexnet", "--profile", "h200"]


@pytest.mark.parametrize("extra", [[], ["--json"], ["--csv"]])
@pytest.mark.parametrize(
    ("target", "reason"),
    [("> /dev/full", "No space left on device"), (">&-", "it is closed"), ("| true", "Broken pipe")],
)
def test_an_output_that_cannot_be_written_ends_in_one_line(extra, target, reason):
    command = " ".join([*PLAN, *extra])
    shell = f"{command} {target}"
    if target == "| true":  # the reader is gone before the first line
        shell = f"(sleep 0.2; {command}; echo status $? >&2) {target}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    error, *status = done.stderr.splitlines()
    assert error == f"error: standard output cannot be written: {reason}"
    assert (status == ["status 2"]) if target == "| true" else (done.returncode == 2 and not status)


def test_characters_that_an_encoding_lacks_are_question_marks(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = subprocess.run(PLAN, capture_output=True, check=True)
    assert b"k14=0? " in done.stdout
    assert not done.stderr
