"""An export moves a whole database: every row arrives as it was, and planning from it measures nothing."""

import json
import sqlite3
from contextlib import closing

import pytest

from tests.support.databases import MACHINE, PARTS, measurement
from tests.support.operands import QUICK
from tests.support.problems import make_problem
from tests.support.saved_files import save_profile
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.backends.replay import ReplayBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import Request
from ucudnn.benchmarking.storage.database import Database
from ucudnn.benchmarking.storage.store import open_store
from ucudnn.errors import DatabaseError, ProfileError
from ucudnn.problem import Operation
from ucudnn.profiles.format import load_profile
from ucudnn.profiles.measurement import Algorithm, Measurement, MeasurementStatus

REQUESTS = [
    Request(
        problem=make_problem(operation=operation, batch=8, channels=12, spatial=(20, 20), filters=12, kernel=(3, 3)),
        sizes=(1, 2, 4, 8),
        limit_bytes=1 << 20,
        rows=(9, 3),
    )
    for operation in Operation
]


def rows(path):
    """Return all rows of a database, by table."""
    with closing(sqlite3.connect(path)) as connection:
        return {
            table: sorted(map(repr, connection.execute(f"SELECT * FROM {table}")))
            for table in ("machines", "problems", "measurements", "explorations")
        }


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """Return a database with complete, incomplete and failed measurements, and with finished requests."""
    path = tmp_path_factory.mktemp("filled") / "times.db"
    Benchmark(CpuBackend(), effort=QUICK, storage=open_store(str(path), CpuBackend())).explore(REQUESTS)
    broken = Algorithm(name="BROKEN", workspace_bytes=64, api="cpu", compiles=True)
    others = [
        Measurement.failed(broken, "it is broken"),
        Measurement.failed(broken, "no memory", MeasurementStatus.HINDERED),
        Measurement.of(broken, [0.1, 1 / 3], complete=False),
    ]
    parts = [make_problem(batch=size, filters=2) for size in (1, 2, 3)]
    with closing(Database(path)) as database:
        database.save(CpuBackend().machine(), list(zip(parts, others, strict=True)), "2020-02-29T12:00:00+00:00")
    return path


def moved(path, tmp_path, suffix="json", change=None):
    """Export a database to a file, change its rows, and import them into another database that is not empty."""
    file = tmp_path / f"mine.{suffix}"
    save_profile(Database(path).export_profile("mine", CpuBackend().machine()), file)
    if change is not None:
        content = json.loads(file.read_text())
        change(content["database"])
        file.write_text(json.dumps(content))
    return tmp_path / "other.db", Database(tmp_path / "other.db").import_profile(load_profile(str(file)))


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_every_row_arrives_as_it_was(filled, tmp_path, suffix):
    other, count = moved(filled, tmp_path, suffix)
    before = rows(filled)
    assert len(before["explorations"]) == 3
    assert count == len(before["measurements"])
    assert rows(other) == before
    assert Database(other).check() == []


def test_planning_after_an_import_measures_nothing(filled, tmp_path):
    other, _ = moved(filled, tmp_path)
    benchmark = Benchmark(CpuBackend(), effort=QUICK, storage=open_store(str(other), CpuBackend()))
    benchmark.explore(REQUESTS)
    assert benchmark.measured == 0
    assert all(benchmark.micro_configurations(each) for each in REQUESTS)


def test_an_import_adds_to_what_is_there(filled, tmp_path):
    other = tmp_path / "other.db"
    problem, algorithm = make_problem(batch=3, filters=8), Algorithm(name="GEMM", workspace_bytes=64, api="cpu")
    Database(other).save(CpuBackend().machine(), [(problem, Measurement.of(algorithm, [1.5]))])
    moved(filled, tmp_path)
    assert len(rows(other)["measurements"]) == len(rows(filled)["measurements"]) + 1


def test_an_export_is_a_profile_that_can_be_replayed(tmp_path):
    database = Database(tmp_path / "times.db")
    database.save(MACHINE, [(part, measurement(time_ms=part.batch / 7)) for part in PARTS])
    profile = database.export_profile("mine", MACHINE)
    assert profile.conditions == MACHINE
    save_profile(profile, tmp_path / "mine.json")
    backend = ReplayBackend(load_profile(str(tmp_path / "mine.json")))
    assert backend.measurement(PARTS[0], "eng1_k2=3").time_ms == pytest.approx(1 / 7, rel=1e-4)
    with pytest.raises(DatabaseError, match="has nothing of"):
        database.export_profile("none", {"device": "none"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.update(measurements=[[0, 1]]), "make no sense|cannot be read"),
        (lambda rows: rows.update(measurements=3), "cannot be read"),
        (lambda rows: rows.update(problems=["{}"]), "make no sense|cannot be read"),
        (lambda rows: rows["measurements"][0].__setitem__(0, 10**9), "cannot be read: IndexError"),
        (lambda rows: rows["measurements"][0].__setitem__(5, "unknown"), "status 'unknown' is none of"),
        (lambda rows: rows["measurements"][0].__setitem__(6, -1.0), "time_ms -1.0 is no number"),
        (lambda rows: rows["measurements"][0].__setitem__(-1, "yesterday"), "yesterday"),
        (lambda rows: rows["measurements"][0].__setitem__(8, 1 << 63), "samples 92233.* is no whole number"),
        (lambda rows: rows["measurements"][0].__setitem__(10, 10**30), "workspace_bytes 10+ is no whole number"),
        (lambda rows: rows["explorations"][0].__setitem__(1, '{"\ud800": 1}'), "surrogates not allowed"),
        (lambda rows: rows["explorations"][0].__setitem__(4, str([[1, 1]] * 7000)), "more slabs than any plan"),
        (lambda rows: rows["explorations"][0].__setitem__(3, "[99]"), "size 99 is no whole number from 1 to"),
        (lambda rows: rows["explorations"][0].__setitem__(1, "["), "Expecting value"),
        (lambda rows: rows.update(measurement_columns=["time"]), "other columns"),
        (lambda rows: rows.pop("explorations"), "cannot be read: KeyError"),
    ],
)
def test_rows_that_make_no_sense_are_refused_and_nothing_is_kept(filled, tmp_path, change, message):
    with pytest.raises(ProfileError, match=message):
        moved(filled, tmp_path, change=change)
    assert not (tmp_path / "other.db").exists() or rows(tmp_path / "other.db")["measurements"] == []
