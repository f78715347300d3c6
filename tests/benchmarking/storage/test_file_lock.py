"""The lock beside a database: files of others at its place stay as they are, and cost no plan."""

import os
import stat
from contextlib import closing

import pytest

from tests.support.databases import MACHINE, fill
from tests.support.other_user import OTHER, needs_root
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.benchmarking.storage.database import Database
from ucudnn.benchmarking.storage.file_lock import LOCK, beside, distrust, exclusive, make_private
from ucudnn.benchmarking.storage.store import open_store
from ucudnn.errors import DatabaseError

PRECIOUS = "[[package]]\n" * 50


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ucudnn" / "measurements.db"


@pytest.fixture
def precious(tmp_path):
    """Return a file of another program, whose content is as before after the test."""
    path = tmp_path / "elsewhere" / "precious"
    path.parent.mkdir()
    path.write_text(PRECIOUS)
    yield path
    assert path.read_text() == PRECIOUS
    assert list(path.parent.iterdir()) == [path]


def test_the_lock_of_another_program_beside_a_database_stays(tmp_path):
    (tmp_path / "poetry.lock").write_text(PRECIOUS)
    fill(tmp_path / "poetry")
    assert (tmp_path / "poetry.lock").read_text() == PRECIOUS


# What is no lock of ours, put at a place.
FOREIGN = {
    "content": lambda place, precious: place.write_text(PRECIOUS),
    "begins as a lock": lambda place, precious: place.write_text(f"ucudnn {PRECIOUS}"),
    "symbolic link": lambda place, precious: place.symlink_to(precious),
    "link to nothing": lambda place, precious: place.symlink_to(precious.with_name("nothing")),
    "hard link": lambda place, precious: os.link(precious, place),
    "folder": lambda place, precious: place.mkdir(),
    "pipe": lambda place, precious: os.mkfifo(place),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_lock_is_refused_and_stays_but_stops_no_plan_in_the_cache_folder(
    tmp_path, path, precious, kind, monkeypatch, caplog
):
    path.parent.mkdir()
    lock = beside(path, LOCK)
    FOREIGN[kind](lock, precious)

    def state():
        found = lock.lstat()
        return found.st_ino, found.st_mode, found.st_size, "content" in kind and lock.read_text()

    before = state()
    with pytest.raises(DatabaseError, match=r"measurements\.db\.ucudnn-lock"):
        Database(path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert open_store(None, CpuBackend()) is None
    assert "measurements.db.ucudnn-lock" in caplog.text
    assert "going on without it" in caplog.text
    assert state() == before
    assert not path.exists()


@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal"])
@pytest.mark.parametrize("kind", ["symbolic link", "hard link"])
@pytest.mark.parametrize("exists", [True, False])
def test_links_at_the_places_of_sqlites_logs_are_refused(path, precious, suffix, kind, exists):
    path.parent.mkdir()
    if exists:
        fill(path)
        assert not beside(path, suffix).exists()
    FOREIGN[kind](beside(path, suffix), precious)
    with pytest.raises(DatabaseError, match=f"{suffix} is a link or no regular file.*UCUDNN_DATABASE"):
        fill(path)
    assert beside(path, suffix).lstat().st_ino


@pytest.mark.parametrize("content", ["", "\0" * 20, "ucudnn 12\n", "ucudnn 12\n3456789\n", "ucudnn "])
def test_what_a_process_that_was_killed_left_is_a_lock(path, content):
    path.parent.mkdir()
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


def test_who_may_write_a_database_may_lock_it(path):
    fill(path)
    path.chmod(0o660)
    fill(path)
    assert stat.S_IMODE(beside(path, LOCK).stat().st_mode) == 0o660


@needs_root
def test_root_leaves_the_lock_to_the_owner_of_the_database(path):
    fill(path)
    beside(path, LOCK).unlink()
    os.chown(path, OTHER, OTHER)
    fill(path)
    found = beside(path, LOCK).stat()
    assert (found.st_uid, found.st_gid) == (OTHER, OTHER)


@needs_root
def test_the_lock_of_another_user_is_refused_in_a_folder_for_all(path):
    fill(path)
    beside(path, LOCK).write_text(f"ucudnn {path.stat().st_ino + 1}\n")  # "delete the logs, they are of another file"
    os.chown(beside(path, LOCK), OTHER, OTHER)
    path.parent.chmod(0o1777)
    with pytest.raises(DatabaseError, match=rf"ucudnn-lock.*(another user, of number {OTHER}|Permission denied)"):
        Database(path)
    path.parent.chmod(0o755)  # nobody else can have put it there
    fill(path)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cache" / "ucudnn" / "gate" / "library.so"
    make_private(path.parent)
    path.write_text("code")
    path.chmod(0o700)
    return path


def test_new_folders_are_for_their_user_alone_whatever_the_umask_is(tmp_path):
    (tmp_path / "a").mkdir(mode=0o755)
    before = os.umask(0)
    try:
        make_private(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / each).stat().st_mode) for each in ("a", "a/b", "a/b/c")]
    assert modes == [0o755, 0o700, 0o700]
    make_private(tmp_path / "a" / "b" / "c")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        make_private(tmp_path / "file" / "b")


@pytest.mark.parametrize("level", range(4))
def test_what_others_can_change_is_named(file, level):
    top = file.parents[2]
    changed = (file, *file.parents)[level]
    assert distrust(file, top) is None
    changed.chmod(0o707)
    assert distrust(file, top) == f"{changed} can be changed by other users: `chmod go-w {changed}` ends that"
    assert distrust(file, file) == (None if level else distrust(file, top))
    changed.chmod(0o755)
    assert distrust(file, top) is None


@needs_root
@pytest.mark.parametrize("level", range(4))
def test_what_belongs_to_another_user_is_named(file, level):
    changed = (file, *file.parents)[level]
    os.chown(changed, OTHER, -1)
    assert distrust(file, file.parents[2]) == f"{changed} belongs to another user, of number {OTHER}"


@needs_root
def test_a_group_with_others_in_it_is_told_from_that_of_one_user(file):
    file.chmod(0o770)
    assert distrust(file, file) is None  # that of root alone, as other users have one, too
    os.chown(file, -1, OTHER)
    assert "can be changed by other users" in distrust(file, file)


def test_in_a_sticky_folder_others_cannot_replace_a_file(file):
    file.parents[2].chmod(0o1777)
    assert distrust(file, file.parents[2]) is None
    file.chmod(0o1707)
    assert "can be changed by other users" in distrust(file, file.parents[2])


@needs_root
def test_a_link_is_as_good_as_its_owner_and_what_it_names(file, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(file)
    assert distrust(link, link) is None
    for owner, target in ((OTHER, 0), (0, OTHER)):
        os.chown(link, owner, -1, follow_symlinks=False)
        os.chown(file, target, -1)
        assert distrust(link, link) == f"{link} belongs to another user, of number {OTHER}"


def test_what_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        distrust(tmp_path / "nothing", tmp_path)
