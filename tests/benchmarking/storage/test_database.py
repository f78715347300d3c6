"""The database: saved rows are loaded again, and many processes share a file.

TEST_SHARED_SECONDS says how long processes share a file; without it, 8 s.
"""

import gc
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import database_worker
from tests.support.databases import EXPLORATION, MACHINE, PARTS, PROBLEM, REQUEST, edit, measurement, rows
from tests.support.operands import QUICK
from tests.support.problems import BESIDE, DIFFERENT, make_problem
from ucudnn import Handle
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.benchmarking.storage.connection import SCHEMA_VERSION
from ucudnn.benchmarking.storage.database import Database
from ucudnn.errors import DatabaseError, DatabaseVersionError

ROOT = Path(__file__).parents[3]
SHARED_SECONDS = float(os.environ.get("TEST_SHARED_SECONDS", "8"))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "measurements.db"


@pytest.fixture
def database(path):
    return Database(path)


def times(database, *parts):
    return [each.time_ms for _, each in database.load(MACHINE, parts or [PROBLEM])]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_restored_after_loading(database, monkeypatch, enabled):
    states = []
    monkeypatch.setattr(
        "ucudnn.benchmarking.storage.database.decode_measurement", lambda row: states.append(gc.isenabled())
    )
    database.save(MACHINE, [(PROBLEM, measurement())])
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        database.load(MACHINE, [PROBLEM])
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()
    assert states == [False]


def test_loaded_measurements_equal_the_saved_ones(database, path):
    many = [(PROBLEM.with_batch(size), measurement(time_ms=size)) for size in range(5, 1205)]
    items = [*rows(), *many]
    database.save(MACHINE, items)
    for reader in (database, Database(path)):
        found = reader.load(MACHINE, [*PARTS, *(part for part, _ in many), PROBLEM.with_batch(2000)])
        assert sorted(found, key=str) == sorted(items, key=str)
    assert database.load({**MACHINE, "cudnn": "9.20.0"}, PARTS) == []
    assert database.load(MACHINE, []) == []


@pytest.mark.parametrize(("field", "value"), DIFFERENT.items(), ids=DIFFERENT)
def test_the_whole_problem_is_the_key(database, field, value):
    part = make_problem(**BESIDE.get(field, {}))
    database.save(MACHINE, [(part, measurement())])
    other = make_problem(**BESIDE.get(field, {}) | {field: value})
    assert other != part
    assert database.load(MACHINE, [other]) == []
    database.save(MACHINE, [(other, measurement(time_ms=9.0))])
    assert times(database, part) == [1.25]
    assert database.load(MACHINE, [other]) == [(other, measurement(time_ms=9.0))]


def test_an_incomplete_measurement_does_not_replace_a_complete_one(database):
    for time_ms, complete, kept in ((1.25, True, 1.25), (3.0, False, 1.25), (1.5, True, 1.5)):
        database.save(MACHINE, [(PROBLEM, measurement(time_ms=time_ms, complete=complete))])
        assert times(database) == [kept]


def test_several_measurements_are_saved_together_or_not_at_all(database):
    with pytest.raises(DatabaseError):
        database.save(MACHINE, [(PROBLEM, measurement("eng1")), (PROBLEM, measurement("eng2", samples=None))])
    assert times(database) == []


@pytest.mark.parametrize(
    ("request_", "exploration"),
    [(REQUEST, EXPLORATION), (replace(REQUEST, rows=(4, 2)), replace(EXPLORATION, divisions=((1, 4), (2, 3))))],
)
def test_explorations_come_back_in_another_process_for_the_same_request_only(path, request_, exploration):
    with closing(Database(path)) as writer, closing(Database(path)) as reader:
        writer.save_exploration(MACHINE, "cudnn", request_, exploration)
        assert reader.load_exploration(MACHINE, "cudnn", request_) == exploration
        assert reader.check() == []
        for change in (
            {"limit_bytes": 1001},
            {"sizes": (1, 4)},
            {"whole": False},
            {"apart": True},
            {"adaptive": True},
            {"problem": make_problem(batch=16)},
            {"least_size": 2},
            {"rows": (3,)},
        ):
            assert reader.load_exploration(MACHINE, "cudnn", replace(request_, **change)) is None
        assert reader.load_exploration(MACHINE, "cudnn:legacy", request_) is None
        assert reader.load_exploration({"device": "another"}, "cudnn", request_) is None


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
    known = Database(path).load(CpuBackend().machine(), [problem.part(size) for size in (1, 2, 4)])
    assert third._benchmark.measured < len(known) + 12


@pytest.mark.parametrize(
    ("version", "way_out"), [(1, "delete the file"), (SCHEMA_VERSION - 1, "delete the file"), (99, "upgrade ucudnn")]
)
def test_another_schema_version_is_refused_with_a_way_out(path, version, way_out, caplog):
    with closing(Database(path)) as database:
        database.save(MACHINE, rows())
    edit(path, f"PRAGMA user_version = {version}")
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


def test_summary_check_prune_and_clear(database):
    old, new = make_problem(), make_problem(batch=2)
    database.save(MACHINE, [(old, measurement()), (old, measurement("eng2"))], measured_at="2020-01-01T00:00:00+00:00")
    other = {"device": "another GPU"}
    database.save(other, [(old, measurement())], measured_at="2020-01-01T00:00:00+00:00")
    database.save(MACHINE, [(new, measurement())])
    first, second = database.machines()
    assert (first.conditions, first.problems, first.measurements, first.failures) == (MACHINE, 2, 3, 0)
    assert first.first == "2020-01-01T00:00:00+00:00" < first.last
    assert second.conditions == other
    assert database.check() == []
    assert database.prune("2021-01-01") == 3
    assert [each.measurements for each in database.machines()] == [1]
    assert database.load(MACHINE, [old]) == []
    assert [each.conditions for each in database.machines()] == [MACHINE]
    assert database.prune(None) == 1
    assert database.machines() == []
    database.save(MACHINE, [(new, measurement())])
    assert len(database.load(MACHINE, [new])) == 1


def kill_in_mid_write(process):
    """Kill a worker that is a victim once it is in its last write, in which nobody else can write."""
    told = process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    assert told == "in mid-write\n", process.stderr.read()


@pytest.mark.slow
def test_eight_processes_share_a_database_though_three_are_killed_and_eight_another_that_is_spoiled(tmp_path):
    """Eight processes use one file, and three of them are killed while they write. No row is lost or torn.

    Eight others use a file whose rows are spoiled at random, and which they set aside. Each ends well.
    """
    path, seconds = tmp_path / "measurements.db", SHARED_SECONDS
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.database_worker"]
    victims = range(5, 8)
    processes = []
    for seed in range(16):
        doomed = ["victim"] if seed in victims else ["spoiled"] if seed >= 8 else []
        own = str(seconds * (seed - 4) / 4 if seed in victims else seconds)
        file = tmp_path / "spoiled.db" if seed >= 8 else path
        arguments = [*command, str(file), str(tmp_path / f"log{seed}"), str(seed), own, *doomed]
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
    assert {file.name.partition(".damaged")[0] for file in tmp_path.glob("*.damaged*")} == {"spoiled.db"}
    database = Database(path)
    assert database.damage() == []
    machine = CpuBackend().machine()
    batches = 0
    for seed in range(8):
        for line in (tmp_path / f"log{seed}").read_text().splitlines():
            turn, count = map(int, line.split())
            request = database_worker.request_of(seed, turn)
            found = database.load(machine, [request.problem.part(size) for size in request.sizes])
            assert len(found) == count, (seed, turn)
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
