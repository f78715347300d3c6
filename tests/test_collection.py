"""The suite itself: each process collects the same tests, so that they can be shared among processes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def collected(seed):
    """Return the names of all tests, as a new process with this seed of `hash` collects them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    process = subprocess.run([*command, "tests"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-4000:]
    return [line for line in process.stdout.splitlines() if "::" in line]


def test_processes_collect_the_same_tests_in_the_same_order():
    first, other = collected("1"), collected("2")
    assert "tests/test_collection.py::test_processes_collect_the_same_tests_in_the_same_order" in first
    assert first == other
