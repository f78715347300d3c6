"""The suite itself: what CI runs, what is marked, in which order tests run, and what a run says."""

import os
import re
import signal
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import MARKED, pytest_collection_modifyitems, pytest_itemcollected
from tests.support.skips import skip_line

ROOT = Path(__file__).parents[1]


def test_processes_that_tests_start_keep_the_modules_that_they_compile():
    code = "import sys; print(sys.dont_write_bytecode)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_ci_runs_what_the_quick_tests_leave_out_or_skip():
    """The second run has PyTorch and cuDNN's headers; that CI runs README's line is tested with the documents.

    Both draw an order of the tests, and compare what their processes collect, as pytest-xdist does.
    """
    line = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert line == 'OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -n auto -m "slow or extra"'
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["test"]
    assert {"pytest-randomly", "pytest-xdist"} <= {each.partition(">=")[0] for each in wanted}
    assert ' -m pytest -q -n auto -m "not slow"\n' in (ROOT / "README.md").read_text()
    places = {mark: [ROOT / place for place in found] for mark, found in MARKED.items()}
    assert [place for place in chain(*places.values()) if not place.exists()] == []
    needs = r"(torch|nvidia[.\w]*)"
    wanting = re.compile(
        rf"importorskip\(\"{needs}\"|find_spec\(\"{needs}\"\)|^import torch$|^from torch\b|nvidia-cudnn wheels", re.M
    )
    files = {*(ROOT / "tests").rglob("test_*.py")} - {*(ROOT / "tests" / "gpu").rglob("*"), Path(__file__)}
    skipped = {file for file in files if wanting.search(file.read_text())}
    assert len(skipped) > 20
    marked = {file for file in files if any(file.is_relative_to(place) for place in chain(*places.values()))}
    assert skipped - marked == {ROOT / "tests" / "test_structure.py"}  # which runs some of its tests without PyTorch


def test_folders_have_their_marks():
    def marks(name):
        found = []
        pytest_itemcollected(SimpleNamespace(nodeid=name, add_marker=found.append))
        return found

    assert marks("tests/fuzz/test_training.py::test_any_run") == ["slow"]
    assert marks("tests/torch/gate/test_gate.py::test_one") == ["extra"]
    assert marks("tests/cudnn/test_signatures.py::test_one") == []


def test_slow_tests_come_first_where_processes_share_the_tests():
    def item(name, *marks):
        return SimpleNamespace(name=name, get_closest_marker=lambda mark: mark if mark in marks else None)

    for config, expected in ((SimpleNamespace(workerinput={}), "bdac"), (SimpleNamespace(), "abcd")):
        items = [item("a"), item("b", "slow"), item("c", "gpu"), item("d", "gpu", "slow")]
        pytest_collection_modifyitems(config, items)
        assert "".join(each.name for each in items) == expected


@pytest.mark.slow
def test_a_suite_in_the_background_takes_ctrl_c_and_says_what_it_draws_and_skips(tmp_path):
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_configure, pytest_terminal_summary\n")
    (tmp_path / "test_one.py").write_text(
        "import signal\nimport pytest\nfrom hypothesis import settings\n\n"
        "def test_one():\n    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "    pytest.skip(f'draws {settings.default.max_examples}')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", tmp_path]
    runs = {("local", ""): 15, ("ci", ""): 40, ("ci", "--hypothesis-profile=long"): 250}
    processes = [
        subprocess.Popen(
            [*command, *filter(None, [option])],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HYPOTHESIS_PROFILE": profile},
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        )
        for profile, option in runs
    ]
    for process, count in zip(processes, runs.values(), strict=True):
        lines = [line for line in process.communicate()[0].splitlines() if "draws" in line]
        assert lines == [f"skipped 1: 1 because: draws {count} (`-rs` names each)"]


def test_only_profiles_say_how_many_examples_are_drawn():
    files = (ROOT / "tests").rglob("*.py")
    named = {str(file.relative_to(ROOT / "tests")) for file in files if "max_examples" in file.read_text()}
    assert named == {"conftest.py", "support/strategies.py", "support/fuzzing.py", "test_collection.py"}


def test_one_line_says_what_was_skipped_and_why(tmp_path):
    reasons = ["Skipped: no GPU", "Skipped: no GPU", "could not import 'cupy'\nat length", *map(str, range(7))]
    line = skip_line(reasons)
    assert line.startswith("skipped 10: 2 because: no GPU; 1 because: could not import 'cupy'; 1 because: 0;")
    assert line.endswith("; 3 for other reasons (`-rs` names each)")
    assert skip_line([]) == ""
