"""The database in the user's cache folder, also where there is none."""

import os
import stat

import pytest

from tests.support.other_user import needs_root, run_as_other
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.benchmarking.storage.store import default_path, open_database, open_store
from ucudnn.errors import DatabaseError


def test_the_cache_folder_is_made_for_its_user_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0o002)
    try:
        open_database(None).close()
    finally:
        os.umask(before)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (tmp_path / "cache", default_path().parent)] == [0o700] * 2


@needs_root
def test_a_user_without_a_home_plans_without_a_database(monkeypatch, tmp_path, caplog):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o777)
    assert default_path().is_absolute()  # and the modules are imported that another user may not read
    backend = CpuBackend()
    backend.machine()

    def opened():
        return open_store(None, backend), *(each.getMessage() for each in caplog.records)

    store, said = run_as_other(opened)
    assert store is None
    assert said.startswith("there is no cache folder for the database (")
    assert said.endswith("): set UCUDNN_DATABASE; going on without it")
    error = run_as_other(default_path)
    assert isinstance(error, DatabaseError)
    assert [*tmp_path.iterdir()] == []


def test_a_cache_folder_that_cannot_be_made_is_told_of(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert open_store(None, CpuBackend()) is None
    assert "going on without it" in caplog.text
    with pytest.raises(DatabaseError, match="cannot be opened"):
        open_database(None)
