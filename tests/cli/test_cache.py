"""`ucudnn cache` and `--database` on files that are missing, damaged or no database."""

import os
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.databases import MACHINE, PROBLEM, fill, measurement
from ucudnn.benchmarking.storage.database import Database
from ucudnn.benchmarking.storage.step_files import StepFiles
from ucudnn.networks.tables import CSV_HEADER

COMMANDS = [["show"], ["show", "--json"], ["check"], ["prune"], ["clear", "--yes"]]


def assert_refused(result, message):
    status, out, error = result
    assert status == 2
    assert out == ""
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_missing_file_is_not_created(call, tmp_path, command):
    path = tmp_path / "folder" / "missing.db"
    assert_refused(call("cache", *command, "--database", str(path)), f"there is no database at {path}: ")
    assert not list(tmp_path.iterdir())


def test_an_export_from_a_missing_file_does_not_create_it(call, tmp_path):
    arguments = ["profile", "--export", str(tmp_path / "mine.json"), "--backend", "cpu"]
    assert_refused(call(*arguments, "--database", str(tmp_path / "missing.db")), "there is no database at")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [["plan"], ["time"], *(["cache", *command] for command in COMMANDS)], ids=" ".join)
def test_a_text_file_is_refused_and_stays(call, tmp_path, command):
    path = tmp_path / "notes.txt"
    path.write_text("what I have to buy\n")
    layers = tmp_path / "layers.csv"
    layers.write_text(f"{CSV_HEADER}\nonly,6,6,2,4,3,3,3,1,1,1,1\n")
    before = set(tmp_path.iterdir())
    arguments = [*command, *([] if command[0] == "cache" else [str(layers), "--backend", "cpu"])]
    assert_refused(call(*arguments, "--database", str(path)), "notes.txt is not an SQLite database")
    assert path.read_text() == "what I have to buy\n"
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_damaged_file_stays_as_it_is(call, tmp_path, command):
    path = tmp_path / "measurements.db"
    fill(path)
    content = path.read_bytes()
    content = content[:4096] + os.urandom(len(content) - 4096)
    path.write_bytes(content)
    before = set(tmp_path.iterdir())
    result = call("cache", *command, "--database", str(path))
    if command == ["check"]:
        status, out, error = result
        assert status == 1
        assert "sound" not in out
        assert out
        assert error == ""
    else:
        assert_refused(result, "is damaged")
    assert path.read_bytes() == content
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("options", "gone"), [((), 0), (("--older-than", "7"), 1), (("--older-than", "9"), 0)])
def test_prune_deletes_measurements_by_their_age(call, tmp_path, options, gone):
    path = tmp_path / "measurements.db"
    fill(path)
    week_ago = (datetime.now(UTC) - timedelta(days=8)).isoformat()
    with closing(Database(path)) as database:
        database.save(MACHINE, [(PROBLEM, measurement("eng3"))], week_ago)
    assert call("cache", "prune", *options, "--database", str(path)) == (
        0,
        f"{gone} measurements deleted from {path}\n",
        "",
    )


def test_what_is_kept_of_training_steps_is_deleted_by_its_age_with_a_database_or_without(call, tmp_path):
    path = tmp_path / "measurements.db"
    files, other = StepFiles(str(path)), tmp_path / "measurements.db-steps" / "notes.json"
    for name in ("old", "new"):
        assert files.found(name, dict, dict, dict) == ({}, False)
    other.touch()
    old = min(files.folder.glob("[0-9a-f]*.json"))
    week_ago = (datetime.now(UTC) - timedelta(days=8)).timestamp()
    os.utime(old, (week_ago, week_ago))
    deleted = f"1 files of training steps deleted from {files.folder}\n"
    assert call("cache", "prune", "--older-than", "7", "--database", str(path)) == (0, deleted, "")
    assert not old.exists()
    fill(path)
    status, out, _ = call("cache", "clear", "--yes", "--database", str(path))
    assert (status, out) == (0, f"{deleted}6 measurements deleted from {path}\n")
    assert [*files.folder.iterdir()] == [other]
    assert_refused(call("cache", "clear", "--yes", "--database", str(tmp_path / "none.db")), "there is no database at")
