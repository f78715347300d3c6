"""Standard output that is closed, full, a pipe that nobody reads, or of an encoding that lacks characters."""

import os
import subprocess
import sys
from io import StringIO

import pytest

from ucudnn.reporting.terminal import (
    ProgressLines,
    print_error,
    print_lines,
    print_note,
    print_table,
    print_text,
    progress,
)

PLAN = [sys.executable, "-m", "ucudnn", "plan", "alexnet", "--profile", "h200"]


FULL = ("> /dev/full", "No space left on device")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "target", "reason"),
    [
        ("", *FULL),
        ("--json", *FULL),
        ("--csv", ">&-", "it is closed"),
        ("", ">&-", "it is closed"),
        ("", "| true", "Broken pipe"),
        ("--json", "| true", "Broken pipe"),
    ],
)
def test_an_output_that_cannot_be_written_ends_in_one_line(extra, target, reason):
    command = " ".join([*PLAN, extra])
    shell = f"{command} {target}"
    if target == "| true":  # the reader is gone before the first line
        shell = f"(sleep 0.2; {command}; echo status $? >&2) {target}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    error, *status = done.stderr.splitlines()
    assert error == f"error: standard output cannot be written: {reason}"
    assert (status == ["status 2"]) if target == "| true" else (done.returncode == 2 and not status)


@pytest.mark.parametrize("arguments", ["memory plan --help", "--show-completion bash"])
def test_help_that_cannot_be_written_ends_in_one_line_too(arguments):
    command = f"{sys.executable} -m ucudnn {arguments} > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == "error: standard output cannot be written: No space left on device\n"
    assert done.returncode == 2


def test_a_completion_without_a_home_to_write_into_ends_in_one_line(tmp_path):
    home = tmp_path / "home"
    home.touch()
    command = [sys.executable, "-m", "ucudnn", "--install-completion", "bash"]
    environment = {**os.environ, "HOME": str(home), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stderr == f"error: completion cannot be installed: [Errno 17] File exists: '{home}'\n"
    assert done.returncode == 2


def test_characters_that_an_encoding_lacks_are_question_marks(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = subprocess.run(PLAN, capture_output=True, check=True)
    assert b"k14=0? " in done.stdout
    assert not done.stderr


def test_what_looks_like_an_emoji_or_markup_is_printed_as_it_is(capsys):
    text = "a:x:b [bold] :smile:"
    print_error(text)
    print_note(text)
    print_table(text, ["layer"], [[text]], [text], text=["layer"])
    print_lines([text])
    out, error = capsys.readouterr()
    assert error == f"error: {text}\n{text}\n"
    assert out.count(text) == 4


def test_an_error_is_one_line_whatever_names_it_has(capsys):
    print_error("step a\nb\x1b[2J\ud800 ö cannot be read")
    assert capsys.readouterr().err == "error: step a\\nb\\x1b[2J\\ud800 ö cannot be read\n"


class Terminal(StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self):
        return True


@pytest.mark.parametrize("where", ["terminal", "pipe"])
def test_names_with_control_characters_command_no_terminal(monkeypatch, where):
    out, error = (Terminal(), Terminal()) if where == "terminal" else (StringIO(), StringIO())
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", error)
    name = "a\x1b[2Jb\x07\x9bc\ud800"
    print_table(name, ["layer", name], [["x", name], [name, "y" * 200]], [name], text=["layer", name], cut=name)
    print_lines([name] * 3)
    print_note(name)
    with progress(name, 1) as step:
        step(1, name)
    printed = out.getvalue() + error.getvalue()
    assert printed.count("a\\x1b[2Jb\\x07\\x9bc\\ud800") >= 9
    for each in ("\x1b[2Jb", "\x07", "\x9b", "\ud800"):
        assert each not in printed
    assert ("\x1b[" in printed) == (where == "terminal")  # our own colors stay


def test_data_are_changed_on_a_terminal_only(monkeypatch, capsys):
    data = "name,time\n\x1b[2Jconv\t1,2\n"
    print_text(data)
    assert capsys.readouterr().out == data
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    print_text(data)
    assert terminal.getvalue() == "name,time\n\\x1b[2Jconv\t1,2\n"


def test_without_a_terminal_there_is_a_line_now_and_then(capsys):
    seconds = iter([0, 1, 9.9, 10, 11, 19, 25])
    step = ProgressLines("benchmarking", 15, lambda: next(seconds))
    for advance, what in ((0, "conv1"), (1, ""), (0, "conv2 [x]"), (1, ""), (1, ""), (1, "")):
        step(advance, what)
    out, error = capsys.readouterr()
    assert out == ""
    assert error == "benchmarking 1 of 15, 10 s: conv2 [x]\nbenchmarking 4 of 15, 25 s\n"


def test_steps_that_come_on_top_count_in_the_total(capsys):
    seconds = iter([0, 100, 200])
    step = ProgressLines("executing", 1, lambda: next(seconds))
    step(1, "")
    step(1, "")
    assert capsys.readouterr().err == "executing 1 of 1, 100 s\nexecuting 2 of 2, 200 s\n"


def test_lines_of_progress_go_nowhere_if_standard_error_is_closed(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    seconds = iter([0, 100])
    ProgressLines("benchmarking", 15, lambda: next(seconds))(1, "")


def test_progress_prints_lines_where_there_is_no_terminal():
    with progress("benchmarking", 3) as step:
        assert isinstance(step, ProgressLines)
