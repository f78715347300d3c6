"""The database as plans use it: nothing that happens to the file stops one, and what is lost is measured again."""

import os
import sqlite3
import stat
import time
from contextlib import closing

import numpy as np
import pytest

from tests.support.databases import edit
from tests.support.operands import QUICK
from tests.support.other_user import needs_root, run_as_other
from tests.support.problems import make_problem
from ucudnn import Handle
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.backends.replay import ReplayBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import Request
from ucudnn.benchmarking.storage import sqlite_file
from ucudnn.benchmarking.storage.database import Database
from ucudnn.benchmarking.storage.sqlite_file import DatabaseFile
from ucudnn.benchmarking.storage.store import MachineStore, default_path, open_database, open_store
from ucudnn.errors import DatabaseError
from ucudnn.profiles.format import load_profile

REQUEST = Request(problem=make_problem(batch=4), sizes=(1, 2, 4), limit_bytes=1 << 20)
PARTS = [REQUEST.problem.part(size) for size in REQUEST.sizes]
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
TEXTS = ("api", "algorithm", "notes", "status", "reason")
NUMBERS = ("compiles", "time_ms", "spread_ms", "samples", "complete", "workspace_bytes")
DAMAGE = [
    *(f"UPDATE OR IGNORE measurements SET {column} = x'ff00'" for column in (*TEXTS, *NUMBERS)),
    *(f"UPDATE measurements SET {column} = {value}" for column in NUMBERS for value in ("'much'", "-1", "9e999")),
    *(f"UPDATE explorations SET {column} = x'ff'" for column in ("names", "sizes", "divisions")),
    "UPDATE explorations SET sizes = '[' || hex(zeroblob(9999)) || ']'",
    f"UPDATE explorations SET divisions = '[{','.join(['[1,1]'] * 10)}]'",
    "UPDATE measurements SET reason = CAST(x'ff' AS TEXT)",
    "UPDATE measurements SET reason = hex(zeroblob(1000000))",
    "DELETE FROM measurements",
    "DELETE FROM measurements WHERE problem = (SELECT min(problem) FROM measurements)",
    "DELETE FROM machines",
    "UPDATE problems SET problem = '{'",
    "DROP TABLE measurements",
    "DROP TABLE explorations",
    "ALTER TABLE measurements RENAME COLUMN time_ms TO t",
    "ALTER TABLE explorations RENAME TO other",
    f"ALTER TABLE measurements RENAME TO m; CREATE VIEW measurements AS SELECT m.* FROM m, ({ENDLESS} SELECT i FROM n)",
    f"CREATE TRIGGER t BEFORE INSERT ON measurements BEGIN SELECT count(*) FROM ({ENDLESS} SELECT i FROM n); END",
    f"CREATE TRIGGER t BEFORE DELETE ON measurements BEGIN SELECT count(*) FROM ({ENDLESS} SELECT i FROM n); END",
    "ALTER TABLE measurements RENAME TO m; CREATE TABLE measurements AS SELECT * FROM m UNION ALL SELECT * FROM m;"
    "DROP TABLE m",
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "measurements.db"
    assert planned(path) > 0
    return path.read_bytes()


@pytest.fixture
def path(tmp_path, sound):
    path = tmp_path / "measurements.db"
    path.write_bytes(sound)
    return path


def planned(path):
    """Plan in a process of its own, as far as the file is concerned, and return how much was measured."""
    handle = Handle(backend="cpu", database=str(path), effort=QUICK)
    with closing(handle._benchmark._findings.storage._database):
        y = np.empty((4, 3, 6, 6), np.float32)
        handle.forward(np.ones((4, 2, 8, 8), np.float32), np.ones((3, 2, 3, 3), np.float32), y)
        assert np.allclose(y, 18)
        return handle._benchmark.measured


@pytest.mark.parametrize("statement", DAMAGE)
def test_no_content_of_a_file_stops_a_plan_and_the_next_plans_measure_nothing(path, statement):
    edit(path, statement)
    start = time.monotonic()
    planned(path)
    planned(path)
    assert planned(path) == 0
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("damage", ["no rows " * 1000, "random", "cut off"])
def test_a_damaged_file_is_set_aside_and_replaced_and_stops_no_plan(path, damage, caplog):
    content = path.read_bytes()
    changed = content[:100] + (damage.encode() if len(damage) > 10 else os.urandom(len(content) - 100))
    path.write_bytes(content[: len(content) // 2] if damage == "cut off" else changed)
    before = path.read_bytes()
    assert planned(path) > 0
    assert "is damaged" in caplog.text
    assert "set aside as" in caplog.text
    (aside,) = (file for file in path.parent.iterdir() if "damaged" in file.name)
    assert aside.read_bytes() == before
    assert planned(path) == 0


@pytest.mark.parametrize("failing", range(2))
def test_a_read_that_fails_once_stops_no_plan(path, failing, monkeypatch):
    read, reads = DatabaseFile.read, []

    def fail_once(self, *arguments):
        reads.append(arguments)
        if len(reads) == 1 + failing:
            raise DatabaseError("database is locked")
        return read(self, *arguments)

    store = open_store(str(path), CpuBackend())
    Benchmark(CpuBackend(), effort=QUICK, storage=store).explore([REQUEST])
    monkeypatch.setattr(DatabaseFile, "read", fail_once)
    benchmark = Benchmark(CpuBackend(), effort=QUICK, storage=store)
    for _ in range(2):
        assert benchmark.micro_configurations(REQUEST)
    assert len(reads) > failing


def test_a_locked_file_stops_no_plan_and_is_written_once_it_is_free(path, monkeypatch):
    monkeypatch.setattr(sqlite_file, "BUSY_MS", 100)
    other = REQUEST.problem.with_batch(8)
    store = open_store(str(path), CpuBackend())
    benchmark = Benchmark(CpuBackend(), effort=QUICK, storage=store)
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        assert benchmark.micro_configurations(REQUEST)
        late = Handle(backend="cpu", database=str(path), effort=QUICK)
        late.get_algorithm(other)
        late.optimize()
        holder.execute("ROLLBACK")
    assert not Database(path).load(CpuBackend().machine(), PARTS)
    assert benchmark.micro_configurations(Request(problem=other, sizes=(8,), limit_bytes=1 << 20))
    assert Database(path).load(CpuBackend().machine(), PARTS)


@pytest.mark.parametrize("pragma", ["query_only = ON", "max_page_count = 1"])
def test_what_cannot_be_written_or_forgotten_is_reported_once_and_measured_all_the_same(path, pragma, caplog):
    """The file can only be read, or the disk is full."""
    with closing(Database(path)) as database:
        store = MachineStore(database, CpuBackend().machine(), "cpu")
        Benchmark(CpuBackend(), effort=QUICK, storage=store).explore([REQUEST])
        database._open().execute(f"PRAGMA {pragma}")
        second = Benchmark(CpuBackend(), effort=QUICK, storage=store)
        assert second.micro_configurations(REQUEST)
        assert second.measured == 0
        second.remeasure([REQUEST])
        assert second.measured > 0
        large = [make_problem(batch=4, filters=filters) for filters in range(4, 80, 4)]
        requests = [Request(problem=problem, sizes=(1, 4), limit_bytes=1 << 20) for problem in large]
        second.explore(requests)
        assert all(second.micro_configurations(request) for request in requests)
    warned = [each for each in caplog.records if each.levelname == "WARNING" and "going on without" in each.message]
    assert len(warned) == 1


def test_the_default_path_is_in_the_users_cache_in_a_folder_for_this_user_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_path() == tmp_path / "cache" / "ucudnn" / "measurements.db"
    monkeypatch.delenv("UCUDNN_DATABASE")
    before = os.umask(0o002)
    try:
        handle = Handle(backend="cpu", effort=QUICK)
        handle.get_algorithm(make_problem())
        handle.optimize()
    finally:
        os.umask(before)
    assert default_path().is_file()
    assert [stat.S_IMODE(each.stat().st_mode) for each in (tmp_path / "cache", default_path().parent)] == [0o700] * 2


def test_nothing_is_kept_if_the_database_is_off_or_a_profile_is_replayed(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("UCUDNN_DATABASE")
    assert open_store("off", CpuBackend()) is None
    assert open_store(None, ReplayBackend(load_profile("h200"))) is None
    assert list(tmp_path.iterdir()) == []


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
    assert isinstance(run_as_other(default_path), DatabaseError)
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_cannot_be_made_is_an_error_or_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DatabaseError, match="cannot be opened"):
        Handle(backend="cpu", database=str(tmp_path / "file" / "measurements.db"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert open_store(None, CpuBackend()) is None
    assert "going on without it" in caplog.text
    with pytest.raises(DatabaseError, match="cannot be opened"):
        open_database(None)
