"""bench.tools.results: files of cases and of runs grow, and stay whole when several processes write them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.tools.results import RESULTS, ROOT, json_text, load, save, save_case, save_run

WRITER = """
import sys
from pathlib import Path
from bench.tools.results import save_case
for index in range(20):
    save_case(Path(sys.argv[1]), f"{sys.argv[2]} {index}", {"index": index})
"""


def test_the_text_is_json_with_a_line_for_each_flat_entry():
    value = {"conditions": {"μ": 1, "b": "x"}, "rows": [[1, 2.5], {"c": None}, {"d": [True]}], "none": [], "text": "[]"}
    text = json_text(value)
    assert json.loads(text) == value
    assert text.splitlines() == [
        "{",
        ' "conditions": {"μ": 1, "b": "x"},',
        ' "rows": [',
        "  [1, 2.5],",
        '  {"c": null},',
        "  {",
        '   "d": [true]',
        "  }",
        " ],",
        ' "none": [],',
        ' "text": "[]"',
        "}",
    ]


def test_a_file_is_whole_or_the_old_one(tmp_path):
    path = tmp_path / "folder" / "file.json"
    save(path, {"a": 1})
    with pytest.raises(TypeError):
        save(path, {"a": object()})
    assert load(path) == {"a": 1}
    save(None, {"a": 1})
    save_case(None, "a", {})
    save_run(None, {"conditions": {}})
    assert [each.name for each in path.parent.iterdir()] == ["file.json"]


def test_a_case_replaces_that_of_its_name_only(tmp_path):
    path = tmp_path / "file.json"
    save_case(path, "a", {"ms": 1})
    save_case(path, "b", {"ms": 2})
    save_case(path, "a", {"ms": 3})
    assert load(path) == {"cases": {"a": {"ms": 3}, "b": {"ms": 2}}}


def test_processes_lose_no_case_of_one_another(tmp_path):
    path = tmp_path / "file.json"
    command = [sys.executable, "-c", WRITER, str(path)]
    processes = [subprocess.Popen([*command, name], cwd=ROOT) for name in "abc"]
    assert [each.wait() for each in processes] == [0, 0, 0]
    assert set(load(path)["cases"]) == {f"{name} {index}" for name in "abc" for index in range(20)}


def test_runs_are_kept_while_their_conditions_stay(tmp_path):
    path = tmp_path / "file.json"
    for run in ({"us": 1}, {"us": 3}):
        save_run(path, {"conditions": {"torch": "1"}, **run})
    assert [each["us"] for each in load(path)["runs"]] == [1, 3]
    save_run(path, {"conditions": {"torch": "2"}, "us": 4})
    assert [each["us"] for each in load(path)["runs"]] == [4]


@pytest.mark.skipif(not (RESULTS / "gpu").exists(), reason="a source distribution leaves the results out")
def test_the_table_names_all_results_and_no_other():
    rows = [line for line in (RESULTS / "README.md").read_text().splitlines() if line.startswith("| `")]
    rows = [row for row in rows if "(Not measured yet.)" not in row]
    named = {name for row in rows for name in re.findall(r"`(\w+/\w+\.\w+)`", row.split("|")[1])}
    files = {str(path.relative_to(RESULTS)) for path in RESULTS.glob("*/*") if path.suffix != ".png"}
    assert named == files


@pytest.mark.skipif(not (RESULTS / "gpu").exists(), reason="a source distribution leaves the results out")
def test_all_results_have_the_form_in_which_scripts_write():
    for path in RESULTS.glob("*/*.json"):
        assert path.read_text(encoding="utf-8") == json_text(load(path)) + "\n", path


def test_commands_in_the_table_are_scripts():
    for name in re.findall(r"python -m (bench(?:\.\w+)+)", (RESULTS / "README.md").read_text()):
        assert Path(ROOT, *name.split(".")).with_suffix(".py").exists(), name
