"""The database: saved rows are loaded again, many processes share a file, and damage never stops a plan.

UCUDNN_SHARED_SECONDS says how long processes share a file; without it, 8 s.
"""

import gc
import logging
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import database_worker
from tests.support.operands import QUICK
from tests.support.problems import make_problem
from tests.support.saved_files import save_profile
from ucudnn import Handle
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.backends.replay import ReplayBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import Exploration, Request
from ucudnn.benchmarking.storage.database import Database
from ucudnn.benchmarking.storage.schema import SCHEMA_VERSION
from ucudnn.benchmarking.storage.store import MachineStore, default_path, open_store
from ucudnn.errors import DatabaseError, DatabaseVersionError
from ucudnn.problem import DataType, Layout, MathMode, Operation
from ucudnn.profiles.format import load_profile
from ucudnn.profiles.measurement import Algorithm, Measurement, MeasurementStatus

ROOT = Path(__file__).parents[3]
SHARED_SECONDS = float(os.environ.get("UCUDNN_SHARED_SECONDS", "8"))
MACHINE = {"device": "a GPU", "cudnn": "9.19.0"}


def result(name="eng1_k2=3", workspace=512, time_ms=1.25, **options):
    algorithm = Algorithm(
        name=name, workspace_bytes=workspace, api="graph", notes=("TENSOR_CORE", "NONDETERMINISTIC"), compiles=True
    )
    return Measurement(
        algorithm=algorithm,
        status=MeasurementStatus.MEASURED,
        time_ms=time_ms,
        **{"spread_ms": 0.01, "samples": 6} | options,
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "measurements.db"


@pytest.fixture
def database(path):
    return Database(path)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_restored_after_loading(database, monkeypatch, enabled):
    states = []
    monkeypatch.setattr(
        "ucudnn.benchmarking.storage.database.decode_measurement", lambda row: states.append(gc.isenabled())
    )
    part = make_problem(batch=4)
    database.save(MACHINE, [(part, result())])
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        database.load(MACHINE, [part])
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()
    assert states == [False]


def test_loaded_measurements_equal_the_saved_ones(database, path):
    failed = Measurement(
        algorithm=Algorithm(name="eng2", workspace_bytes=0, api="graph"),
        status=MeasurementStatus.FAILED,
        reason="CUDNN_STATUS_NOT_SUPPORTED; a 'quoted' text\nof two lines",
    )
    part = make_problem()
    items = [(part, result()), (part, failed), (part.with_batch(3), result(time_ms=0.5))]
    database.save(MACHINE, items)
    for reader in (database, Database(path)):
        found = reader.load(MACHINE, [part, part.with_batch(3), part.with_batch(4)])
        assert sorted(found, key=str) == sorted(items, key=str)
    assert database.load({**MACHINE, "cudnn": "9.20.0"}, [part]) == []
    assert database.load(MACHINE, []) == []


@pytest.mark.parametrize(
    "change",
    [
        {"groups": 1},
        {"dilation": (2, 1)},
        {"stride": (2, 1)},
        {"padding": (1, 0)},
        {"layout": Layout.NHWC},
        {"dtype": DataType.FLOAT64},
        {"math": MathMode.FMA},
        {"deterministic": True},
        {"alignment": 4},
        {"x_batch_stride": 10_000},
        {"y_batch_stride": 10_000},
        {"operation": Operation.BACKWARD_DATA},
        {"batch": 7},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_whole_problem_is_the_key(database, change):
    part = make_problem(padding=(1, 1))
    database.save(MACHINE, [(part, result())])
    other = replace(part, **change)
    assert other != part
    assert database.load(MACHINE, [other]) == []
    database.save(MACHINE, [(other, result(time_ms=9.0))])
    assert [each.time_ms for _, each in database.load(MACHINE, [part])] == [1.25]
    assert database.load(MACHINE, [other]) == [(other, result(time_ms=9.0))]


def test_many_parts_are_loaded_at_once(database):
    parts = [make_problem().with_batch(size) for size in range(1, 1201)]
    database.save(MACHINE, [(part, result(time_ms=part.batch)) for part in parts])
    assert {each.time_ms for _, each in database.load(MACHINE, parts)} == set(range(1, 1201))


def test_an_incomplete_measurement_does_not_replace_a_complete_one(database):
    part = make_problem()
    database.save(MACHINE, [(part, result())])
    database.save(MACHINE, [(part, result(time_ms=3.0, complete=False))])
    assert database.load(MACHINE, [part])[0][1].time_ms == 1.25
    database.save(MACHINE, [(part, result(time_ms=1.5))])
    assert database.load(MACHINE, [part])[0][1].time_ms == 1.5


def test_several_measurements_are_saved_together_or_not_at_all(database):
    part = make_problem()
    with pytest.raises(DatabaseError):
        database.save(MACHINE, [(part, result("eng1")), (part, result("eng2", workspace=None))])
    assert database.load(MACHINE, [part]) == []


def test_explorations_come_back_for_the_same_request_only(database):
    request = Request(problem=make_problem(), sizes=(1, 2, 4, 8), limit_bytes=1000)
    exploration = Exploration(names=("eng1", "eng2_k2=1"), sizes=(1, 2, 4, 8))
    database.save_exploration(MACHINE, "cudnn", request, exploration)
    assert database.load_exploration(MACHINE, "cudnn", request) == exploration
    for other in (
        replace(request, limit_bytes=1001),
        replace(request, sizes=(1, 8)),
        replace(request, whole=False),
        replace(request, adaptive=True),
        replace(request, problem=make_problem(batch=16)),
        replace(request, least_size=2),
    ):
        assert database.load_exploration(MACHINE, "cudnn", other) is None
    assert database.load_exploration(MACHINE, "cudnn:legacy", request) is None
    assert database.load_exploration({"device": "another"}, "cudnn", request) is None


def test_explorations_with_slabs_come_back_in_another_process(path):
    request = Request(problem=make_problem(), sizes=(1, 2), limit_bytes=5, rows=(4, 2))
    divided = Exploration(names=("A",), sizes=(1, 2), divisions=((1, 4), (2, 3)))
    with closing(Database(path)) as writer, closing(Database(path)) as reader:
        writer.save_exploration({}, "cpu", request, divided)
        assert reader.load_exploration({}, "cpu", request) == divided
        assert reader.load_exploration({}, "cpu", replace(request, rows=())) is None
        assert reader.check() == []


def test_a_process_plans_from_what_another_measured(path):
    problem = make_problem(batch=8)
    first = Handle(backend="cpu", database=str(path), effort=QUICK, workspace_limit="1MiB")
    first.get_algorithm(problem)
    first.optimize()
    assert first._benchmark.measured > 0
    second = Handle(backend="cpu", database=str(path), effort=QUICK, workspace_limit="1MiB")
    second.get_algorithm(problem)
    second.optimize()
    assert second._benchmark.measured == 0
    assert second.report().kernels == first.report().kernels
    # A smaller limit and a larger mini-batch measure only what is not known yet.
    third = Handle(backend="cpu", database=str(path), effort=QUICK, workspace_limit="64KiB")
    third.get_algorithm(problem.with_batch(16))
    third.optimize()
    sizes = {part.batch for part, _ in third._benchmark.results(next(iter(third._benchmark._findings.explored)))}
    assert {1, 2, 4, 8, 16} >= sizes
    database = Database(path)
    rows = database.load(CpuBackend().machine(), [problem.part(size) for size in (1, 2, 4)])
    assert third._benchmark.measured < len(rows) + 12


def test_the_default_path_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "ucudnn" / "measurements.db"
    monkeypatch.delenv("UCUDNN_DATABASE")
    handle = Handle(backend="cpu", effort=QUICK)
    handle.get_algorithm(make_problem())
    handle.optimize()
    assert default_path().is_file()


def test_nothing_is_kept_if_the_database_is_off_or_a_profile_is_replayed(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("UCUDNN_DATABASE")
    assert open_store("off", CpuBackend()) is None
    assert open_store(None, ReplayBackend(load_profile("h200"))) is None
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_set_aside_and_replaced(path, caplog):
    database = Database(path)
    database.save(MACHINE, [(make_problem(), result())])
    for damage in (b"these are no rows at all, are they?" * 100, None):
        database.close()
        before = set(path.parent.iterdir())
        content = path.read_bytes()
        path.write_bytes(content[:100] + (damage or os.urandom(len(content) - 100)))
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        caplog.clear()
        database = Database(path)
        with caplog.at_level(logging.WARNING):
            assert database.load(MACHINE, [make_problem()]) == []
        database.save(MACHINE, [(make_problem(), result())])
        assert "is damaged" in caplog.text
        assert "set aside as" in caplog.text
        assert len(Database(path).load(MACHINE, [make_problem()])) == 1
        found = {file for file in path.parent.iterdir() if "damaged" in file.name} - before
        (aside,) = (file for file in found if not file.name.endswith(("-wal", "-shm")))
        assert aside.stat().st_size


def test_a_truncated_file_does_not_stop_a_plan(path):
    problem = make_problem(batch=8)
    for _ in range(2):
        handle = Handle(backend="cpu", database=str(path), effort=QUICK)
        handle.get_algorithm(problem)
        handle.optimize()
        assert handle.report().kernels
        handle._benchmark._findings.storage._database.close()
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    Handle(backend="cpu", database=str(path), effort=QUICK)


@pytest.mark.parametrize(
    ("version", "way_out"), [(1, "delete the file"), (SCHEMA_VERSION - 1, "delete the file"), (99, "upgrade ucudnn")]
)
def test_another_schema_version_is_refused_with_a_way_out(path, version, way_out, caplog):
    with closing(Database(path)) as database:
        database.save(MACHINE, [(make_problem(), result())])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    before = path.read_bytes()
    message = rf"measurements\.db has schema version {version}, .* {way_out}, or give UCUDNN_DATABASE another path"
    with pytest.raises(DatabaseVersionError, match=message):
        Database(path)
    handle = Handle(backend="cpu", database=str(path), effort=QUICK)  # which goes on without it
    handle.get_algorithm(make_problem(batch=2))
    handle.optimize()
    assert re.search(message, caplog.text)
    assert path.read_bytes() == before
    assert not [file for file in path.parent.iterdir() if "damaged" in file.name]


def test_a_database_of_another_program_is_not_changed(path):
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match="is a database of another program"):
        Database(path)
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_written_is_an_error_or_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DatabaseError, match="cannot be opened"):
        Handle(backend="cpu", database=str(tmp_path / "file" / "measurements.db"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert open_store(None, CpuBackend()) is None
    assert "going on without it" in caplog.text


def test_a_failing_database_is_reported_once_and_stops_no_plan(path, caplog):
    database = Database(path)
    database._file._open().execute("PRAGMA query_only = ON")
    store = MachineStore(database, MACHINE, "cpu")
    benchmark = Benchmark(CpuBackend(), effort=QUICK, storage=store)
    request = Request(problem=make_problem(batch=4), sizes=(1, 2, 4), limit_bytes=1 << 20)
    assert benchmark.micro_configurations(request)
    assert caplog.text.count("going on without it") == 1


def test_summary_check_prune_and_clear(database):
    old, new = make_problem(), make_problem(batch=2)
    database.save(MACHINE, [(old, result()), (old, result("eng2"))], measured_at="2020-01-01T00:00:00+00:00")
    other = {"device": "another GPU"}
    database.save(other, [(old, result())], measured_at="2020-01-01T00:00:00+00:00")
    database.save(MACHINE, [(new, result())])
    first, second = database.machines()
    assert (first.conditions, first.problems, first.measurements, first.failures) == (MACHINE, 2, 3, 0)
    assert first.first == "2020-01-01T00:00:00+00:00" < first.last
    assert second.conditions == other
    assert database.check() == []
    assert database.prune("2021-01-01") == 3
    assert [each.measurements for each in database.machines()] == [1]
    assert database.load(MACHINE, [old]) == []
    assert [each.conditions for each in database.machines()] == [MACHINE]
    assert database.clear() == 1
    assert database.machines() == []
    database.save(MACHINE, [(new, result())])
    assert len(database.load(MACHINE, [new])) == 1


def test_check_finds_rows_that_make_no_sense(database, path):
    database.save(MACHINE, [(make_problem(), result())])
    connection = sqlite3.connect(path)
    connection.execute("UPDATE measurements SET time_ms = -1")
    connection.commit()
    assert any("-1.0 ms is no time" in each for each in database.check())
    connection.execute("UPDATE measurements SET time_ms = 1")
    connection.execute("UPDATE problems SET problem = '{}'")
    connection.commit()
    assert database.check()
    connection.close()


def test_profiles_are_exported_and_imported(database, tmp_path):
    items = [(make_problem(batch=size), result(time_ms=size / 7)) for size in (1, 2, 4)]
    database.save(MACHINE, [*items, (make_problem(batch=8), result(complete=False))])
    profile = database.export_profile("mine", MACHINE)
    assert profile.conditions == MACHINE
    save_profile(profile, tmp_path / "mine.json")
    other = Database(tmp_path / "other.db")
    assert other.import_profile(load_profile(str(tmp_path / "mine.json"))) == 4
    found = other.load(MACHINE, [part for part, _ in items])
    assert [each.time_ms for _, each in sorted(found, key=lambda item: item[0].batch)] == pytest.approx(
        [1 / 7, 2 / 7, 4 / 7], rel=1e-4
    )
    assert {(each.algorithm.name, each.algorithm.notes, each.spread_ms, each.complete) for _, each in found} == {
        ("eng1_k2=3", ("TENSOR_CORE", "NONDETERMINISTIC"), 0.01, True)
    }
    backend = ReplayBackend(load_profile(str(tmp_path / "mine.json")))
    assert backend.measurement(items[0][0], "eng1_k2=3").time_ms == pytest.approx(1 / 7, rel=1e-4)
    with pytest.raises(DatabaseError, match="has nothing of"):
        database.export_profile("none", {"device": "none"})


def kill_in_mid_write(process):
    """Kill a worker that is a victim once it is in its last write, in which nobody else can write."""
    told = process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    assert told == "in mid-write\n", process.stderr.read()


@pytest.mark.slow
def test_sixteen_processes_share_a_database_though_three_are_killed_and_eight_find_damage(tmp_path):
    """Sixteen processes use one file, and three are killed while they write. No row is lost or torn.

    Eight of them plan for machines whose rows are spoiled at random, and some of whose reads fail. Each ends well.
    """
    path, seconds = tmp_path / "measurements.db", SHARED_SECONDS
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.database_worker", str(path)]
    victims = range(5, 8)
    processes = []
    for seed in range(16):
        doomed = ["victim"] if seed in victims else ["spoiled"] if seed >= 8 else []
        own = str(seconds * (seed - 4) / 4 if seed in victims else seconds)
        arguments = [*command, str(tmp_path / f"log{seed}"), str(seed), own, *doomed]
        processes.append(
            subprocess.Popen(
                arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    with ThreadPoolExecutor(len(victims)) as pool:  # in whatever order they come to their last write
        list(pool.map(kill_in_mid_write, [processes[seed] for seed in victims]))
    for seed, process in enumerate(processes):
        output, errors = process.communicate(timeout=600)
        if seed in victims:
            assert process.returncode == -signal.SIGKILL
        else:
            assert (process.returncode, output) == (0, "done\n"), errors
            assert not errors or seed >= 8  # which name the rows that make no sense
    assert not [file for file in tmp_path.iterdir() if "damaged" in file.name]
    database = Database(path)
    assert all("make no sense" in line for line in database.check())
    machine = CpuBackend().machine()
    batches = 0
    for seed in range(8):
        for line in (tmp_path / f"log{seed}").read_text().splitlines():
            turn, count = map(int, line.split())
            request = database_worker.request_of(seed, turn)
            rows = database.load(machine, [request.problem.part(size) for size in request.sizes])
            assert len(rows) == count, (seed, turn)
            assert database.load_exploration(machine, "cpu", request) is not None
            batches += 1
        if seed in victims:  # nothing of an uncommitted transaction is there
            last = database_worker.request_of(seed, 1 << 20)
            assert database.load(machine, [last.problem.part(size) for size in last.sizes]) == []
    assert batches > 100
    for seed in range(8, 16):
        planned, lost = map(int, (tmp_path / f"log{seed}").read_text().split())
        assert planned >= database_worker.FEWEST_TURNS
        assert lost > 0  # the damage was real


@pytest.mark.parametrize("path", ["/", ".", "", "~nosuchuser/x", "n" * 300, "a\0b"])
def test_a_path_that_no_file_can_have_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DatabaseError, match=r"^database "):
        Database(path)
    assert not list(tmp_path.iterdir())
