"""The suite itself: each process collects the same tests, so that they can be shared among processes."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.support.skips import skip_line

ROOT = Path(__file__).parents[1]


def collected(*seeds):
    """Return the names of all tests for each seed of `hash`, as new processes collect them at the same time."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"]
    processes = [
        subprocess.Popen(
            [*command, "tests"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for seed in seeds
    ]
    found = []
    for process in processes:
        printed, _ = process.communicate()
        assert process.returncode == 0, printed[-4000:]
        found.append([line for line in printed.splitlines() if "::" in line])
    return found


@pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ,
    reason="pytest-xdist compares what its processes collect",
)
def test_processes_collect_the_same_tests_in_the_same_order():
    first, other = collected("1", "2")
    assert "tests/test_collection.py::test_processes_collect_the_same_tests_in_the_same_order" in first
    assert first == other


def test_processes_that_tests_start_keep_the_modules_that_they_compile():
    code = "import sys; print(sys.dont_write_bytecode)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_long_tests_come_first_where_processes_share_the_tests():
    def item(name, *marks):
        return SimpleNamespace(name=name, get_closest_marker=lambda mark: mark if mark in marks else None)

    for config, expected in ((SimpleNamespace(workerinput={}), "bdac"), (SimpleNamespace(), "abcd")):
        items = [item("a"), item("b", "long"), item("c", "gpu"), item("d", "gpu", "long")]
        pytest_collection_modifyitems(config, items)
        assert "".join(each.name for each in items) == expected


def test_one_line_says_what_was_skipped_and_why(tmp_path):
    reasons = ["Skipped: no GPU", "Skipped: no GPU", "could not import 'cupy'\nat length", *map(str, range(7))]
    line = skip_line(reasons)
    assert line.startswith("skipped 10: 2 because: no GPU; 1 because: could not import 'cupy'; 1 because: 0;")
    assert line.endswith("; 3 for other reasons (`-rs` names each)")
    assert skip_line([]) == ""


def test_the_suite_prints_that_line(tmp_path):
    (tmp_path / "test_one.py").write_text("import pytest\n\ndef test_one():\n    pytest.skip('it rains')\n")
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_terminal_summary\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if "it rains" in line]
    assert lines == ["skipped 1: 1 because: it rains (`-rs` names each)"]
