"""README is true: its commands exist, its example runs, its plan is what the command prints."""

import subprocess
import sys

from tests.support.documents import blocks


def test_there_are_two_command_lines_for_newcomers():
    commands = [block for block in blocks("sh") if "venv" in block and "cuda" not in block]
    assert len(commands) == 2
    assert all(len(command.strip().splitlines()) == 1 for command in commands)


def test_the_example_runs(capsys):
    (example,) = [block for block in blocks("python") if "import numpy" in block]  # the others need a GPU: tests/gpu
    exec(compile(example, "README.md", "exec"), {})
    assert "WR, 4 MiB for each kernel" in capsys.readouterr().out


def test_the_plan_is_what_the_command_prints():
    (shown,) = [block for block in blocks("text") if "NVIDIA H200" in block]
    command = [sys.executable, "-m", "ucudnn"]
    result = subprocess.run(
        [*command, *["plan", "alexnet", "--profile", "h200", "--workspace", "64MiB"]],
        capture_output=True,
        text=True,
        check=True,
    )

    def stable(text):
        return [line.rstrip() for line in text.strip().splitlines() if not line.startswith("decided in")]

    assert stable(result.stdout) == stable(shown)
