"""The file of a database: other files are refused, and a file that is replaced, deleted or cut off is noticed."""

import gc
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.databases import MACHINE, PARTS, PROBLEM, files_set_aside, fill, measurement
from ucudnn.benchmarking.storage import sqlite_file
from ucudnn.benchmarking.storage.database import Database
from ucudnn.errors import DatabaseError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path):
    fill(tmp_path / "measurements.db")
    return tmp_path / "measurements.db"


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    """Let SQLite wait longer for a lock than a test may take, however busy this machine is."""
    monkeypatch.setattr(sqlite_file, "BUSY_MS", 100_000)
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 90


def times(database):
    return {each.time_ms for _, each in database.load(MACHINE, PARTS) if each.measured}


def add(database, name, time_ms):
    database.save(MACHINE, [(PARTS[0], measurement(name, time_ms))])


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("content", ["\n", "notes", "notes of mine\n" * 100, "SQLite format", "\0" * 4096])
def test_a_file_that_is_not_sqlite_is_refused_and_stays(tmp_path, content, read_only):
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(DatabaseError, match=r"notes\.txt is not an SQLite database, and stays as it is: give .* path"):
        Database(path, read_only=read_only)
    assert path.read_text() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("read_only", [False, True])
def test_a_pipe_is_refused(tmp_path, read_only):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DatabaseError, match="is no regular file"):
        Database(tmp_path / "pipe", read_only=read_only)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_database_of_another_program_is_refused_and_stays(path, damaged):
    content = bytearray(path.read_bytes())
    content[68:72] = b"cook"
    if damaged:
        content[200:] = os.urandom(len(content) - 200)
    path.write_bytes(content)
    before = set(path.parent.iterdir())
    with pytest.raises(DatabaseError, match="is a database of another program"):
        Database(path)
    assert path.read_bytes() == content
    assert set(path.parent.iterdir()) == before


def test_an_empty_file_becomes_a_database_that_says_whose_it_is_before_its_log_is_written_back(tmp_path):
    path = tmp_path / "measurements.db"
    path.touch()
    with closing(Database(path)) as database:
        database.save(MACHINE, [(PARTS[0], measurement())])
        assert path.read_bytes()[68:72] == b"ucud"
        assert times(database) == {1.25}


def test_reading_changes_nothing_while_another_writes(path):
    with closing(Database(path)) as writer, closing(Database(path, read_only=True)) as reader:
        add(writer, "eng9", 7.0)
        with closing(Database(path, read_only=True)) as late:
            assert times(late) == {1.25, 7.0}
            assert late.check() == []
        with pytest.raises(DatabaseError):
            reader.prune(None)
        assert times(writer) == {1.25, 7.0}


def test_a_file_that_is_moved_over_it_is_used_from_then_on(path, tmp_path):
    fill(tmp_path / "second.db", 3.5)
    with closing(Database(path)) as database, closing(Database(path)) as other:
        assert times(other) == {1.25}
        add(database, "eng9", 7.0)  # which stays in the log of the first file
        with path.open("rb") as old:
            (tmp_path / "second.db").replace(path)
            before = old.read()
            assert times(database) == {3.5}
            add(database, "eng8", 8.0)
            assert times(other) == {3.5, 8.0}
            add(other, "eng7", 9.0)
            assert times(database) == {3.5, 8.0, 9.0}
            assert database.check() == []
            old.seek(0)
            assert old.read() == before
    assert not files_set_aside(path)


def test_a_log_of_a_killed_process_does_not_enter_another_file(path, tmp_path):
    code = (
        "import sys, time; from tests.support.databases import *; database = Database(sys.argv[1]);"
        "database.save(MACHINE, [(PROBLEM, measurement('eng9', 7.0))]); print('saved', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "saved\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert path.with_name(path.name + "-wal").stat().st_size
    fill(tmp_path / "second.db", 3.5)
    (tmp_path / "second.db").replace(path)
    with closing(Database(path)) as database:
        assert times(database) == {3.5}
        assert database.check() == []


def test_a_deleted_file_is_begun_anew(path):
    with closing(Database(path)) as database, closing(Database(path)) as other:
        assert times(other) == {1.25}
        path.unlink()
        assert times(database) == set()
        add(database, "eng1", 1.5)
        assert times(other) == {1.5}
        add(other, "eng2", 2.5)
        assert times(database) == {1.5, 2.5}
    assert not files_set_aside(path)


@pytest.mark.parametrize("size", [0, 10, 100, 4096, 5000])
@pytest.mark.parametrize("others", [False, True])
def test_a_file_that_is_cut_off_while_open_is_set_aside_at_once(path, size, others, caplog):
    with closing(Database(path)) as database, closing(Database(path)) as other:
        if others:
            assert times(other) == {1.25}
        else:
            other.close()
        os.truncate(path, size)
        with caplog.at_level(logging.WARNING):
            assert times(database) == set()
        assert "is damaged (it is shorter than before): it is set aside as" in caplog.text
        add(database, "eng1", 2.5)
        assert times(other) == {2.5}
        assert database.check() == []
    assert [file.stat().st_size for file in files_set_aside(path)] == [size]


def test_a_file_that_is_emptied_while_others_use_it_is_set_aside(path):
    with closing(Database(path)) as user:
        add(user, "eng1", 1.5)
        os.truncate(path, 0)
        with closing(Database(path)) as newcomer:
            assert times(newcomer) == set()
            add(newcomer, "eng1", 2.5)
            assert times(user) == {2.5}
    assert files_set_aside(path)


def test_a_file_that_becomes_shorter_because_rows_were_deleted_is_no_damage(path):
    with closing(Database(path)) as database, closing(Database(path)) as cleaner:
        database.save(MACHINE, [(PROBLEM.with_batch(size), measurement()) for size in range(1, 500)])
        cleaner.read("PRAGMA wal_checkpoint(TRUNCATE)")
        assert times(database) == {1.25}
        size = path.stat().st_size
        assert cleaner.prune(None) > 499
        cleaner.read("PRAGMA wal_checkpoint(TRUNCATE)")
        assert path.stat().st_size < size
        assert times(database) == set()
        assert cleaner.machines() == []
    assert not files_set_aside(path)


def test_a_database_that_is_dropped_closes_its_file_without_a_warning(path, monkeypatch):
    """Since Python 3.13, sqlite3 warns of connections that nobody closed."""
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)

    def opened():
        return [link for link in Path("/proc/self/fd").iterdir() if link.exists() and link.samefile(path)]

    database = Database(path)
    add(database, "eng1", 1.5)
    assert opened()
    del database
    gc.collect()
    assert not opened()
    with pytest.raises(DatabaseError, match="cannot be"):
        Database(path / "below")
    gc.collect()
    assert told == []
