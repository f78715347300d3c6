"""`ucudnn cache` and `--database` on files that are missing, damaged or no database."""

import os
from contextlib import closing

import pytest

from tests.support.databases import MACHINE, PROBLEM, fill, measurement, rows
from ucudnn.benchmarking.storage.database import Database
from ucudnn.networks.tables import CSV_HEADER, load_network

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


@pytest.mark.parametrize("more", [[], ["--problem", "16x3x224x224"], ["--network", "alexnet"], ["--older-than", "7"]])
@pytest.mark.parametrize("blank", ["", " ", "\t\n "])
def test_a_blank_text_is_refused_and_deletes_nothing(call, tmp_path, blank, more):
    path = tmp_path / "measurements.db"
    fill(path)
    before = Database(path).machines()
    result = call("cache", "prune", *more, "--problem", blank, "--database", str(path))
    assert_refused(result, "`ucudnn cache clear` deletes all measurements")
    assert Database(path).machines() == before


def test_network_and_problem_select_either_and_older_than_restricts_both(call, tmp_path):
    path = tmp_path / "measurements.db"
    layer = load_network("alexnet").layers[1].forward

    def prune(*options):
        fill(path)
        with closing(Database(path)) as database:
            database.save(MACHINE, [(layer, measurement())])
        status, out, _ = call("cache", "prune", *options, "--database", str(path))
        assert status == 0
        return int(out.split()[0])

    problem, network = ("--problem", str(PROBLEM)), ("--network", "alexnet")
    assert prune(*problem) == len(rows())
    assert prune(*network) == 1
    assert prune(*problem, *network) == len(rows()) + 1
    assert prune(*problem, *network, "--older-than", "1") == 0
