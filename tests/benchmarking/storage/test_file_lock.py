"""The lock beside a database: files of others at its place stay as they are, and cost no plan."""

import os
import stat
from contextlib import closing

import pytest

from tests.support.databases import MACHINE, fill
from tests.support.other_user import OTHER, needs_root
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.benchmarking.storage.database import Database
from ucudnn.benchmarking.storage.file_lock import LOCK, beside, exclusive
from ucudnn.benchmarking.storage.store import open_store
from ucudnn.errors import DatabaseError

PRECIOUS = "[[package]]\n" * 50


@pytest.fixture
def precious(tmp_path):
    """Return a file of another program, whose content is as before after the test."""
    path = tmp_path / "elsewhere" / "precious"
    path.parent.mkdir()
    path.write_text(PRECIOUS)
    yield path
    assert path.read_text() == PRECIOUS


def test_the_lock_of_another_program_beside_a_database_stays(tmp_path):
    (tmp_path / "poetry.lock").write_text(PRECIOUS)
    with closing(Database(tmp_path / "poetry")) as database:
        assert database.machines() == []
    fill(tmp_path / "poetry")
    assert (tmp_path / "poetry.lock").read_text() == PRECIOUS


def put(kind, place, precious):
    """Put what is no lock of ours at a place."""
    if kind == "content":
        place.write_text(PRECIOUS)
    elif kind == "begins as a lock":
        place.write_text(f"ucudnn {PRECIOUS}")
    elif kind == "symbolic link":
        place.symlink_to(precious)
    elif kind == "link to nothing":
        place.symlink_to(precious.with_name("nothing"))
    elif kind == "hard link":
        os.link(precious, place)
    elif kind == "folder":
        place.mkdir()
    else:
        os.mkfifo(place)


KINDS = ["content", "begins as a lock", "symbolic link", "link to nothing", "hard link", "folder", "pipe"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_lock_is_refused_and_stays(tmp_path, precious, kind):
    path = tmp_path / "measurements.db"
    lock = beside(path, LOCK)
    put(kind, lock, precious)
    before = lock.lstat(), lock.read_text() if kind in KINDS[:2] else None
    with pytest.raises(DatabaseError, match=r"measurements\.db\.ucudnn-lock"):
        Database(path)
    after = lock.lstat(), lock.read_text() if kind in KINDS[:2] else None
    assert (after[0].st_mode, after[0].st_size, after[1]) == (before[0].st_mode, before[0].st_size, before[1])
    assert not path.exists()
    assert not precious.with_name("nothing").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_lock_in_the_cache_folder_stops_no_plan(tmp_path, precious, kind, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "ucudnn").mkdir()
    put(kind, tmp_path / "ucudnn" / "measurements.db.ucudnn-lock", precious)
    assert open_store(None, CpuBackend()) is None
    assert "measurements.db.ucudnn-lock" in caplog.text
    assert "going on without it" in caplog.text


@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal"])
@pytest.mark.parametrize("kind", ["symbolic link", "hard link"])
@pytest.mark.parametrize("exists", [True, False])
def test_links_at_the_places_of_sqlites_logs_are_refused(tmp_path, precious, suffix, kind, exists):
    path = tmp_path / "measurements.db"
    if exists:
        fill(path)
        assert not beside(path, suffix).exists()
    put(kind, beside(path, suffix), precious)
    with pytest.raises(DatabaseError, match=f"{suffix} is a link or no regular file.*UCUDNN_DATABASE"):
        fill(path)
    assert beside(path, suffix).lstat().st_ino


@pytest.mark.parametrize("content", ["", "\0" * 20, "ucudnn 12\n", "ucudnn 12\n3456789\n", "ucudnn "])
def test_what_a_process_that_was_killed_left_is_a_lock(tmp_path, content):
    path = tmp_path / "measurements.db"
    beside(path, LOCK).write_text(content)
    fill(path)
    with closing(Database(path)) as database:
        assert database.machines()[0].conditions == MACHINE
    assert beside(path, LOCK).read_text() == f"ucudnn {path.stat().st_ino}\n"


def test_a_lock_that_another_keeps_is_awaited_for_some_time_only(tmp_path):
    path = tmp_path / "measurements.db"
    kept = pytest.raises(TimeoutError, match=r"kept .*measurements\.db\.ucudnn-lock locked for 0\.05 seconds")
    with exclusive(path), kept, exclusive(path, 0.05):
        pass
    with exclusive(path, 0.05) as file:
        assert file is not None


def test_who_may_write_a_database_may_lock_it(tmp_path):
    path = tmp_path / "measurements.db"
    fill(path)
    path.chmod(0o660)
    fill(path)
    assert stat.S_IMODE(beside(path, LOCK).stat().st_mode) == 0o660


@needs_root
def test_root_leaves_the_lock_to_the_owner_of_the_database(tmp_path):
    path = tmp_path / "measurements.db"
    fill(path)
    beside(path, LOCK).unlink()
    os.chown(path, OTHER, OTHER)
    fill(path)
    found = beside(path, LOCK).stat()
    assert (found.st_uid, found.st_gid) == (OTHER, OTHER)


@needs_root
def test_the_lock_of_another_user_is_refused_in_a_folder_for_all(tmp_path):
    path = tmp_path / "folder" / "measurements.db"
    fill(path)
    beside(path, LOCK).write_text(f"ucudnn {path.stat().st_ino + 1}\n")  # "delete the logs, they are of another file"
    os.chown(beside(path, LOCK), OTHER, OTHER)
    path.parent.chmod(0o1777)
    with pytest.raises(DatabaseError, match=rf"ucudnn-lock.*(another user, of number {OTHER}|Permission denied)"):
        Database(path)
    path.parent.chmod(0o755)  # nobody else can have put it there
    fill(path)
